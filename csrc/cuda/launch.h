// Launch policy as data, and the host side that the kernels' files share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "device.cuh"

namespace dce {
namespace cuda {

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("det_cross_entropy: ") + what + ": " + cudaGetErrorString(status));
}
inline cudaStream_t stream_of(Context c) { return static_cast<cudaStream_t>(c.stream); }

// How a stage fills the machine.
struct Policy {
  int threads;             // of a block
  int resident;            // blocks a processor that the registers must allow
  int unroll;              // 16-byte loads in flight a thread
  int64_t piece_bytes;     // what a block takes of a row: at least, or if the next is 0 at most
  int blocks_a_processor;  // as many pieces as make this many blocks, where rows are few
};
constexpr Policy kRowMaxPolicy = {256, 3, 4, 32768, 16};
constexpr Policy kAccumulatePolicy = {128, 6, 4, 32768, 16};
// Pieces of a row one after the other, as a copy would take them: 5% faster than whole rows.
template <class T>
constexpr Policy kBackwardPolicy = sizeof(T) == 2 ? Policy{192, 7, 2, 49152, 0} : Policy{128, 8, 2, 32768, 0};
constexpr Policy kWordsPolicy = {256, 3, 4, 32768, 8};  // sums of logits, statistics: fewer than 2^15 warps add to a row
// The fused kernel (fused.cuh): rows in shared memory.
struct FusedPolicy {
  int64_t least_row_bytes;    // for shorter rows the exchange would cost more than the read it saves
  int64_t least_slice_bytes;  // of a row a block
  int least_slots;            // rows in flight a block: one summed, one whose gradient is written, one loaded
  int64_t row_cost_bytes;     // what a row costs a block beside its columns, as columns that would take as long: in a cluster,
  int64_t global_row_cost_bytes;       // in a group whose mail goes by global memory,
  int64_t global_row_cost_bytes_fp32;  // and if gradients of 32 bits are written, which keep that memory busier
};
constexpr FusedPolicy kFusedPolicy = {4096, 4096, 3, 6144, 8192, 24576};

inline int processors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return count;
}

// Cuts a multiple of 128 bytes long, so that every piece starts on the same 16-byte phase as its row.
inline Pieces cut_rows(const Policy& policy, int64_t rows, int64_t columns, int64_t element_bytes) {
  const int64_t bytes = columns * element_bytes, wanted = (static_cast<int64_t>(policy.blocks_a_processor) * processors() + rows - 1) / rows;
  int64_t most = policy.blocks_a_processor == 0 ? (bytes + policy.piece_bytes - 1) / policy.piece_bytes : bytes / policy.piece_bytes;
  if (most < 1) most = 1;
  if (most > 65535) most = 65535;
  int64_t pieces = policy.blocks_a_processor == 0 || most < wanted ? most : wanted;
  const int64_t unit = 128 / element_bytes;
  int64_t length = ((columns + pieces - 1) / pieces + unit - 1) / unit * unit;
  if (length < unit) length = unit;
  pieces = columns > 0 ? (columns + length - 1) / length : 1;
  return {pieces, length};
}
inline dim3 grid(int64_t rows, const Pieces& p) {
  if (rows >= (int64_t{1} << 31)) throw std::runtime_error("det_cross_entropy: logits: expected fewer than 2^31 rows");
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(p.pieces));
}

template <class F>
void with_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::kFloat32: return f(float{});
    case Dtype::kBFloat16: return f(__nv_bfloat16{});
    case Dtype::kFloat16: return f(__half{});
  }
}
inline int64_t element_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// The stages inside forward, which skip the rows that `ignored` marks (SPEC 6, rule 1).
void row_max_of(const Logits&, const Targets& ignored, const Shard&, float* out, Context);
// kCheck: look for logits above the given maximum. Words come out as sums of pieces, not carried.
void accumulate(const Logits&, const Targets& ignored, const float* row_max, const Shard&, const LogitMap&, int64_t* digits, bool check, Context);
// Words of a shard, which start as 0; as sums of pieces, not canonical.
void sum_logits(const Logits&, const Targets& ignored, const float* row_max, const Shard&, const LogitMap&, const Weights&, int64_t* logit_words, Context);
void sum_stats(const Logits&, const Targets&, const float* row_max, const Shard&, const LogitMap&, int64_t* stat_words, Context);

}  // namespace cuda
}  // namespace dce
