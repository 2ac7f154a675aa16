// The fused kernel's blocks: their warps, what they keep in shared memory, and what they are given (fused.cuh).
#pragma once

#include "exchange.cuh"
#include "table.cuh"

namespace dce {
namespace cuda {

constexpr int kWorkers = 12;  // warps: few, for each pays for a row's prologue and reductions
constexpr int kCombiners = 3;  // warps; row i is combiner i % 3's
constexpr int kLoader = kWorkers + kCombiners;
constexpr int kFusedThreads = (kLoader + 1) * kWarp;
// A mailbox is used again when a block's combiner is two rows further. By then it has had the mail of its next row from each other block, which that block's
// combiner sends after it has read this one: no mail is overwritten unread.
constexpr int kMailboxes = 2 * kCombiners;
constexpr int kMailAt = 32;  // word of the zeros, after the sums and their counter: a multiple of 16 bytes
static_assert(kMailAt > kBatchWords, "word kBatchWords is reduce_losses'");
constexpr int kMaxSlots = 6;
constexpr uint32_t kBulkBytes = 16384;

enum RowMode : int32_t { kScaled, kZero, kNaN, kSkip };
struct RowMessage {
  RowScale scale;
  int32_t n_max;
  int32_t own;  // the target's column in the slice, if it is in it
  RowMode mode;
  // for statistics
  float max;       // of the row
  int32_t before;  // so many columns of the slice stand before a target that is a maximum; 0: nobody asks
  bool stats;      // the row has statistics
};

// What a kernel is compiled for: the plain loss; options that change a row's scale, or columns that do not end with a vector, or gradients at another distance than
// columns; all options. With kAll the gradient may not be wanted (Rows::grad is null).
enum Features : int { kPlain, kRowOptions, kAll };

// What a block keeps beside a slot of its ring.
struct SlotControl {
  Barrier full;    // the slice has arrived
  Barrier summed;  // every worker has left its sum
  Barrier scaled;  // the combiner has left its message
  Barrier empty;   // every worker and the row's combiner are done with the slot
  RowMessage message;
  int32_t ignored;
  WarpSum sum[kWorkers];
};
struct Control {
  Barrier mailed[kMailboxes];  // every block of the cluster has left its mail
  SlotControl slot[1];         // as many as there are slots
};

struct Rows {
  Logits logits;
  Targets targets;
  const int64_t* sums;  // for a mean: what it divides by; else null
  float* row_max;
  int64_t* words;
  int32_t* status;  // kOk, or kRedo for settle_kernel
  void* grad;
  Mail* mail;  // of each group, mailbox and block, zeros; null if the group is a cluster
  int32_t group, slots;
  int32_t slice;  // columns of a block, a multiple of the vector; the last block may have fewer
  uint32_t minus_first;  // TermTable's
};
// A parameter of its own, so that the kernel without options is not laid out anew.
struct RowExtras {
  RowOptions options;
  Divisor divisor;
  int64_t grad_stride;
  RowWords words;
  int32_t table_shift;  // TermTable's
};
constexpr int32_t kRedo = 1 << 30;

// Shared memory: the table, first so that its address is a constant; Control; the mail within a cluster; under a cap the table of slopes; the ring.
template <class T>
__host__ __device__ constexpr int64_t table_bytes() { return (TermTable<T>::kBytes + 15) / 16 * 16; }
__host__ __device__ constexpr int64_t control_bytes(int slots) { return (sizeof(Control) + (slots - 1) * sizeof(SlotControl) + 15) / 16 * 16; }
template <class T>
__host__ __device__ constexpr int64_t slopes_begin(int cluster, int slots) {
  return (table_bytes<T>() + control_bytes(slots) + kMailboxes * cluster * static_cast<int64_t>(sizeof(Mail)) + 127) / 128 * 128;
}
template <class T>
__host__ __device__ constexpr int64_t overhead_bytes(int cluster, int slots, bool slopes) {
  return slopes_begin<T>(cluster, slots) + (slopes ? (table_bytes<T>() + 127) / 128 * 128 : 0);
}

// A slot, and whether it is used for an even or an odd time: the phase of its barriers.
struct Slot {
  int index;
  uint32_t parity;
  __device__ __forceinline__ Slot() : index(0), parity(0) {}
  __device__ __forceinline__ void next(int slots) {
    if (++index == slots) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace cuda
}  // namespace dce
