// Digits of a shard of each row, relative to a given maximum (SPEC 4).
#include "accumulate.cuh"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

template <class T, bool kCheck, bool kMap>
__global__ void __launch_bounds__(kAccumulatePolicy.threads, kAccumulatePolicy.resident) accumulate_kernel(Logits logits, Targets ignored, const float* row_max, Shard shard, LogitMap map, Pieces pieces, int64_t* out) {
  __shared__ SumScratch<kAccumulatePolicy.threads> scratch;
  const Piece piece(pieces, shard.hi - shard.lo);
  if (is_ignored(ignored, piece.row)) return;  // its digits are not looked at
  const float max = canonical_max(row_max[piece.row]);
  const int64_t first = shard.lo + piece.begin;  // column of the tensor
  const RowVectors<T> row(static_cast<const T*>(logits.data) + piece.row * logits.row_stride + first, piece.length);
  int64_t words[kWords];
  sum_stretch<T, kCheck, kMap, kAccumulatePolicy.threads, kAccumulatePolicy.unroll>(row, max, map, words, scratch);
  if (threadIdx.x != 0) return;
  words[kTagWord] = piece.length > 0 ? shard_tag(max, shard.start + first, shard.start + first + piece.length, kMap ? map_salt(map) : 0) : 0;
  int64_t* const to = out + piece.row * kWords;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if (pieces.pieces == 1) {
      to[i] = words[i];
    } else {
      atomic_add(&to[i], words[i]);
    }
  }
}

// Canonical words, one row a thread.
__global__ void carry_kernel(int64_t* words, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) carry(words + row * kWords);
}

}  // namespace

void accumulate(const Logits& logits, const Targets& ignored, const float* row_max, const Shard& shard, const LogitMap& map, int64_t* digits, bool check_maximum, Context context) {
  const Pieces pieces = cut_rows(kAccumulatePolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  const cudaStream_t stream = stream_of(context);
  if (pieces.pieces > 1) check(cudaMemsetAsync(digits, 0, logits.rows * kWords * sizeof(int64_t), stream), "cudaMemsetAsync");
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    const bool plain = is_identity(map);
    const auto kernel = check_maximum ? (plain ? accumulate_kernel<T, true, false> : accumulate_kernel<T, true, true>)
                                      : (plain ? accumulate_kernel<T, false, false> : accumulate_kernel<T, false, true>);
    kernel<<<grid(logits.rows, pieces), kAccumulatePolicy.threads, 0, stream>>>(logits, ignored, row_max, shard, map, pieces, digits);
  });
  check(cudaGetLastError(), "denom_digits");
}

void denom_digits(const Logits& logits, const float* row_max, const Shard& shard, const LogitMap& map, int64_t* digits, Context context) {
  accumulate(logits, kNoTargets, row_max, shard, map, digits, true, context);
  carry_kernel<<<static_cast<unsigned>((logits.rows + 255) / 256), 256, 0, stream_of(context)>>>(digits, logits.rows);
  check(cudaGetLastError(), "denom_digits");
}

}  // namespace cuda
}  // namespace dce
