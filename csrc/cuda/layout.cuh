// The fused kernel's blocks: their warps, what they keep in shared memory, and what they are given (fused.cuh).
#pragma once

#include <type_traits>

#include "accumulate.cuh"
#include "exchange.cuh"
#include "table.cuh"

namespace dce {
namespace cuda {

constexpr int kWorkers = 12;  // warps: few, for each pays for a row's prologue and reductions
static_assert(kWorkers * 0xFFFF < 1 << kHalfBits, "sums of halves");
constexpr int kCombiners = 3;  // warps; row i is combiner i % 3's
constexpr int kLoader = kWorkers + kCombiners;
constexpr int kFusedThreads = (kLoader + 1) * kWarp;
// A mailbox is used again when a block's combiner is two rows further. By then it has had the mail of its next row from each other block, which that block's
// combiner sends after it has read this one: no mail is overwritten unread.
constexpr int kMailboxes = 2 * kCombiners;
constexpr int kMailAt = 32;  // word of the zeros, after the sums and their counter: a multiple of 16 bytes
static_assert(kMailAt > kBatchWords, "word kBatchWords is the counter");
constexpr int kMaxSlots = 6;
constexpr uint32_t kBulkBytes = 16384;
constexpr int kLineBytes = 128;  // slices and slots begin on lines, in global and in shared memory: bulk copies are an eighth slower where they do not

enum RowMode : int32_t { kScaled, kZero, kNaN, kSkip };
struct RowMessage {
  RowScale scale;
  int32_t n_max;
  int32_t own;  // the target's column in the slice, if it is in it
  RowMode mode;
};
struct MessageWithStats : RowMessage {
  float max;       // of the row
  int32_t before;  // so many columns of the slice stand before a target that is a maximum; 0: nobody asks
  bool stats;      // the row has statistics
};
template <bool kExtras>
using MessageOf = std::conditional_t<kExtras, MessageWithStats, RowMessage>;

// What a kernel is compiled for, each for all that stands before it too: the plain loss; options that change a row's scale, columns that do not end with a vector, gradients at another
// distance than columns; label smoothing and statistics, which want more of every logit, and where the gradient may not be wanted (Rows::grad is null); a map of the logits.
enum Features : int { kPlain, kRowOptions, kExtraWords, kAll };

// What a block keeps beside a slot of its ring.
template <bool kExtras>
struct SlotControl {
  Barrier full;    // the slice has arrived
  Barrier summed;  // every worker has left its sum
  Barrier scaled;  // the combiner has left its message
  Barrier empty;   // every worker and the row's combiner are done with the slot
  MessageOf<kExtras> message;
  int32_t ignored;
  ShareSum<kExtras> sum[kWorkers];
};
template <bool kExtras>
struct Control {
  Barrier mailed[kMailboxes];  // every block of the cluster has left its mail
  uint32_t redo;               // combiners that have marked rows to do again
  SlotControl<kExtras> slot[1];  // as many as there are slots
};
// What a block needs to do rows again, where its ring was.
struct RedoScratch {
  SumScratch<kFusedThreads> sum;
  int64_t words[kWords], logit_words[kLogitWords];  // of the row
  RowScale scale;
  int64_t batch[kSumWords];  // of the losses of these rows
};

struct Rows {
  Logits logits;
  Targets targets;
  const int64_t* sums;  // for a mean: what it divides by; else null
  float* row_max;
  int64_t* words;  // of rows, where statistics are asked for
  void* grad;
  void* mail;  // Mail of each group, mailbox and block, zeros; null if the group is a cluster
  int32_t group, slots;
  int32_t slice;  // columns of a block, a multiple of kLineBytes; the last blocks may have fewer
};
// A parameter of its own, so that the kernel without options is not laid out anew.
struct RowExtras {
  RowOptions options;
  Divisor divisor;
  int64_t grad_stride;
  RowWords words;
  int32_t table_shift;  // TermTable's
};
// And where results go.
struct Results {
  RowOutputs out;
  int64_t* batch_words;  // kBatchWords, and one that counts the combiners that are done
  Total total;
};
constexpr int32_t kRedo = 1 << 30;  // the status of a row until it is done again

// Shared memory: the table, first so that its address is a constant; Control; the mail within a cluster; under a cap the table of slopes; the ring.
template <class T>
__host__ __device__ constexpr int64_t table_bytes() { return (TermTable<T>::kBytes + 15) / 16 * 16; }
template <bool kExtras>
__host__ __device__ constexpr int64_t control_bytes(int slots) { return (sizeof(Control<kExtras>) + (slots - 1) * sizeof(SlotControl<kExtras>) + 15) / 16 * 16; }
template <class T, bool kExtras>
__host__ __device__ constexpr int64_t slopes_begin(int cluster, int slots) {
  return table_bytes<T>() + control_bytes<kExtras>(slots) + (cluster > 1 ? kMailboxes * cluster * static_cast<int64_t>(sizeof(Mail<kExtras>)) : 0);
}
template <class T, bool kExtras>
__host__ __device__ constexpr int64_t overhead_bytes(int cluster, int slots, bool slopes) {
  const int64_t end = slopes_begin<T, kExtras>(cluster, slots) + (slopes ? table_bytes<T>() : 0);
  return (end + kLineBytes - 1) / kLineBytes * kLineBytes;
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

// What the warps of a block share.
template <class T, Features kFeatures>
struct Block {
  static constexpr int kLanes = kVector<T>;
  static constexpr bool kOptions = kFeatures != kPlain, kExtras = kFeatures >= kExtraWords, kMaps = kFeatures == kAll;
  const Rows& rows;
  const RowExtras& extras;
  Control<kExtras>& control;
  Mail<kExtras>* const cluster_mail;
  unsigned char* const ring;
  const int warp, lane;
  const uint32_t rank;  // in the group
  const int64_t groups, first_row;
  const int64_t begin, slot_bytes;  // of the slice: its first column; in the ring
  const int columns, vectors;       // of the slice

  __device__ __forceinline__ Block(const Rows& rows, const RowExtras& extras, unsigned char* shared)
      : rows(rows),
        extras(extras),
        control(*reinterpret_cast<Control<kExtras>*>(shared + table_bytes<T>())),
        cluster_mail(reinterpret_cast<Mail<kExtras>*>(shared + table_bytes<T>() + control_bytes<kExtras>(rows.slots))),
        ring(shared + overhead_bytes<T, kExtras>(rows.mail == nullptr ? rows.group : 0, rows.slots, kMaps && extras.options.map.cap != 0.0f)),
        warp(threadIdx.x / kWarp),
        lane(threadIdx.x % kWarp),
        rank(blockIdx.x),
        groups(gridDim.y),
        first_row(blockIdx.y),
        begin(static_cast<int64_t>(rank) * rows.slice),
        slot_bytes(static_cast<int64_t>(rows.slice) * sizeof(T)),
        columns(rows.logits.columns <= begin ? 0 : rows.logits.columns - begin < rows.slice ? static_cast<int>(rows.logits.columns - begin) : rows.slice),
        vectors((kOptions ? columns + kLanes - 1 : columns) / kLanes) {}
  static __device__ __forceinline__ unsigned all_combiners() { return gridDim.x * gridDim.y * kCombiners; }
  __device__ __forceinline__ uint4* slice(const Slot& slot) const { return reinterpret_cast<uint4*>(ring + slot.index * slot_bytes); }
  __device__ __forceinline__ SlotControl<kExtras>& at(const Slot& slot) const { return control.slot[slot.index]; }
  __device__ __forceinline__ const T* logits(int64_t row) const { return static_cast<const T*>(rows.logits.data) + row * rows.logits.row_stride; }
};

}  // namespace cuda
}  // namespace dce
