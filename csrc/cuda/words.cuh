// The words beside a row's digits (words.h), of a stretch of a row: its sum of logits and its statistics (SPEC 12 and 13). Blocks and warps add to the row's in global memory.
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

__device__ __forceinline__ int64_t warp_sum(int64_t v) { return static_cast<int64_t>(warp_sum(static_cast<uint64_t>(v))); }  // in lane 0

__device__ __forceinline__ int64_t warp_total(const FixedSum& sum) { return static_cast<int64_t>(warp_total(static_cast<uint64_t>(total(sum)))); }  // in every lane

// A thread's part of a row's sum of logits.
struct LogitSum {
  FixedSum small;
  int64_t words[kLogitWords] = {0, 0, 0, 0};
  bool infinite = false;
  // At most kFixedTerms before a fold.
  __device__ __forceinline__ void add(float p) {
    if (fabsf(p) < kLogitLimit) {
      add_fixed<kLogitShift>(small, p);
    } else if (is_finite(p)) {
      const WideLogit w = wide_logit(p);
#pragma unroll
      for (int i = 0; i < kLogitWords; ++i) words[i] += (i == w.at ? w.low : 0) + (i == w.at + 1 ? w.high : 0);
    } else {
      infinite = true;
    }
  }
  __device__ __forceinline__ void fold() {
    const int64_t z = total(small);
    small = FixedSum();
    words[0] += low_word(z);
    words[1] += high_word(z);
    carry_logit_words(words);
  }
  // The warp's, to the row's words: from fewer than 2^15 warps, so that none overflows.
  __device__ __forceinline__ void finish(int64_t* row) {
    fold();
#pragma unroll
    for (int i = 0; i < kLogitWords; ++i) words[i] = warp_sum(words[i]);
    infinite = __any_sync(0xFFFFFFFFu, infinite);
    if (threadIdx.x % kWarp != 0) return;
    carry_logit_words(words);
    if (infinite) words[kLogitWords - 1] += kInfiniteLogit;
#pragma unroll
    for (int i = 0; i < kLogitWords; ++i)
      if (words[i] != 0) atomic_add(&row[i], words[i]);
  }
};

// A warp's summands of the entropy, to a row's statistics.
__device__ __forceinline__ void add_stats(const FixedSum& sum, int64_t* row) {
  const int64_t e = warp_total(sum);
  if (threadIdx.x % kWarp != 0 || e == 0) return;
  atomic_add(&row[0], stat_low(e));
  atomic_add(&row[1], stat_high(e));
}

// A stretch by a block. weights: of the classes of its columns, or null. `max` is canonical and the row not degenerate. All threads call.
template <class T, int kThreads, int kUnroll>
__device__ __forceinline__ void logit_stretch(const RowVectors<T>& row, float max, const LogitMap& map, const float* weights, int64_t* words) {
  const float y_max = mapped(map, max), shift = row_shift(y_max), top = add32(y_max, -shift);
  LogitSum sum;
  int terms = 0;
  const auto add = [&](const Vector<T>& v, int i) {
    const int64_t column = row.column(i);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      if (column + j < 0 || column + j >= row.length) continue;  // of a partial vector
      const float raw = widen(v.lane[j]), x = add32(mapped(map, raw), -shift);
      if (raw <= max) sum.add(weights != nullptr ? weighted_logit(x, top, weights[column + j]) : x);
    }
    terms += kVector<T>;
    if (terms > kFixedTerms - kVector<T>) {
      sum.fold();
      terms = 0;
    }
  };
  row.template for_each<kThreads, kUnroll>(add, add);
  sum.finish(words);
}

// before: as many columns of the stretch stand before the target.
template <class T, int kThreads, int kUnroll>
__device__ __forceinline__ void stat_stretch(const RowVectors<T>& row, float max, const LogitMap& map, int64_t before, int64_t* words) {
  const float top = mapped(map, max);
  const RowFrame frame = row_frame(top);
  const float row_magic = magic(frame.n_max), shifted_top = add32(top, -frame.shift);
  FixedSum sum;
  int64_t low = 0, high = 0;
  int terms = 0;
  bool found = false;
  const auto add = [&](const Vector<T>& v, int i) {
    const int64_t column = row.column(i);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      const float raw = widen(v.lane[j]), x = add32(mapped(map, raw), -frame.shift);
      const Term t = term(x, row_magic);
      add_fixed<0>(sum, t.z >= kMagic - kGradDepth && raw <= max ? mul32(term_ratio(t), add32(shifted_top, -x)) : 0.0f);
      found = found || (raw == max && column + j < before);
    }
    terms += kVector<T>;
    if (terms > kFixedTerms - kVector<T>) {
      low += stat_low(total(sum));
      high += stat_high(total(sum));
      sum = FixedSum();
      terms = 0;
    }
  };
  row.template for_each<kThreads, kUnroll>(add, add);
  low = warp_sum(low + stat_low(total(sum)));  // below 2^63 for 2^23 terms a lane
  high = warp_sum(high + stat_high(total(sum)));
  found = __any_sync(0xFFFFFFFFu, found);
  if (threadIdx.x % kWarp != 0) return;
  atomic_add(&words[0], stat_low(low));
  atomic_add(&words[1], high + stat_high(low) + (found ? kBefore : 0));
}

}  // namespace cuda
}  // namespace dce
