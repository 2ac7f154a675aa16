// Digits of a shard of each row, relative to a given maximum (SPEC 4).
#include "accumulate.cuh"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

template <class T, bool kCheck>
__global__ void __launch_bounds__(kAccumulatePolicy.threads) accumulate_kernel(Logits logits, Targets ignored, const float* row_max, Shard shard, Pieces pieces, int64_t* out) {
  constexpr int kUnroll = kAccumulatePolicy.unroll, kThreads = kAccumulatePolicy.threads, kLanes = kVector<T>;
  __shared__ uint64_t scratch[5 * (kThreads / kWarp)];
  __shared__ int64_t below[kDigits];
  const Piece piece(pieces, shard.hi - shard.lo);
  int64_t* const words = out + piece.row * kWords;
  if (is_ignored(ignored, piece.row)) return;  // its digits are not looked at
  const float max = canonical_max(row_max[piece.row]);
  const bool degenerate = is_degenerate(max);
  if (threadIdx.x < kDigits) below[threadIdx.x] = 0;
  __syncthreads();

  const RowFrame frame = row_frame(degenerate ? 0.0f : max);
  const Anchors anchors(frame);
  const RowVectors<T> row(static_cast<const T*>(logits.data) + piece.row * logits.row_stride + shard.lo + piece.begin, piece.length);
  Windows w;
  uint64_t faults = 0;
  int since_fold = 0;
  const int64_t count = degenerate && !(kCheck && max < 0) ? 0 : row.count();
  for (int64_t i = threadIdx.x; i < count; i += kUnroll * kThreads) {
    Vector<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = row.load(i + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float x[kLanes];
      float top = -INFINITY;
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        x[j] = widen(v[u].lane[j]);
        if (kCheck) top = max_or_nan(top, x[j]);
        x[j] = add32(x[j], -frame.shift);
      }
      if (kCheck && !(top <= max)) {  // a faulty column becomes -inf: no term
#pragma unroll
        for (int j = 0; j < kLanes; ++j) {
          const bool faulty = !(widen(v[u].lane[j]) <= max);
          faults += faulty;
          if (faulty) x[j] = -INFINITY;
        }
      }
      if (!degenerate) add_terms(w, x, anchors, below);
    }
    since_fold += kUnroll * kLanes;
    if (since_fold > Windows::kFlush - kUnroll * kLanes) {
      w.fold();
      since_fold = 0;
    }
  }
  w.fold();

  uint64_t total[5] = {w.near_low, w.near_high, w.far_low, w.far_high, faults};
  block_sum(total, scratch);  // its barriers also complete `below`
  if (threadIdx.x != 0) return;
  int64_t digits[kDigits];
#pragma unroll
  for (int i = 0; i < kDigits; ++i) digits[i] = below[i];
  if (!degenerate) {
    const int near_bit = frame.n_max - 31 - frame.base;  // 97..128
    add_shifted(digits, total[0] + (static_cast<uint128>(total[1]) << 32), near_bit);
    add_shifted(digits, total[2] + (static_cast<uint128>(total[3]) << 32), near_bit - 32);
  }
  const int64_t columns = piece.length + static_cast<int64_t>(total[4]) * kOneFault;
  const int64_t tag = piece.length > 0 ? shard_tag(max, shard.start + shard.lo + piece.begin, shard.start + shard.lo + piece.begin + piece.length) : 0;
  if (pieces.pieces == 1) {
#pragma unroll
    for (int i = 0; i < kDigits; ++i) words[i] = digits[i];
    words[kColumnsWord] = columns;
    words[kTagWord] = tag;
  } else {
#pragma unroll
    for (int i = 0; i < kDigits; ++i) atomic_add(&words[i], digits[i]);
    atomic_add(&words[kColumnsWord], columns);
    atomic_add(&words[kTagWord], tag);
  }
}

// Canonical words, one row a thread.
__global__ void carry_kernel(int64_t* words, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) carry(words + row * kWords);
}

}  // namespace

void accumulate(const Logits& logits, const Targets& ignored, const float* row_max, const Shard& shard, int64_t* digits, bool check_maximum, Context context) {
  const Pieces pieces = cut_rows(kAccumulatePolicy, logits.rows, shard.hi - shard.lo, element_bytes(logits.dtype));
  const cudaStream_t stream = stream_of(context);
  if (pieces.pieces > 1) check(cudaMemsetAsync(digits, 0, logits.rows * kWords * sizeof(int64_t), stream), "cudaMemsetAsync");
  with_dtype(logits.dtype, [&](auto type) {
    using T = decltype(type);
    const dim3 blocks = grid(logits.rows, pieces);
    if (check_maximum) {
      accumulate_kernel<T, true><<<blocks, kAccumulatePolicy.threads, 0, stream>>>(logits, ignored, row_max, shard, pieces, digits);
    } else {
      accumulate_kernel<T, false><<<blocks, kAccumulatePolicy.threads, 0, stream>>>(logits, ignored, row_max, shard, pieces, digits);
    }
  });
  check(cudaGetLastError(), "denom_digits");
}

void denom_digits(const Logits& logits, const float* row_max, const Shard& shard, int64_t* digits, Context context) {
  accumulate(logits, kNoTargets, row_max, shard, digits, true, context);
  carry_kernel<<<static_cast<unsigned>((logits.rows + 255) / 256), 256, 0, stream_of(context)>>>(digits, logits.rows);
  check(cudaGetLastError(), "denom_digits");
}

}  // namespace cuda
}  // namespace dce
