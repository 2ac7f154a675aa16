// The words beside a row's digits (words.h), of a stretch of a row: its sum of logits and its statistics (SPEC 12 and 13). Blocks and warps add to the row's in global memory.
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

__device__ __forceinline__ int64_t warp_total(const FixedSum& sum) { return static_cast<int64_t>(warp_sum(static_cast<uint64_t>(total(sum)))); }  // in lane 0

// z, in lane 0, to a row's sum of logits; infinite: of any lane.
__device__ __forceinline__ void add_logits(int64_t z, bool infinite, int64_t* words) {
  infinite = __any_sync(0xFFFFFFFFu, infinite);
  if (threadIdx.x % kWarp != 0) return;
  if (z != 0) {
    atomic_add(&words[0], low_word(z));
    atomic_add(&words[1], high_word(z));
  }
  if (infinite) atomic_add(&words[kLogitWords - 1], kInfiniteLogit);  // once a warp: fewer than 2^15 share a row
}
// p: of a column that takes part.
__device__ __forceinline__ void add_logit(FixedSum& sum, float p, int64_t* words, bool& infinite) {
  if (fabsf(p) < kLogitLimit) {
    add_fixed<kLogitShift>(sum, p);
  } else if (is_finite(p)) {
    const WideLogit w = wide_logit(p);
    atomic_add(&words[w.at], w.low);
    if (w.high != 0) atomic_add(&words[w.at + 1], w.high);
  } else {
    infinite = true;
  }
}
__device__ __forceinline__ void add_stats(int64_t e, int64_t* words) {
  if (threadIdx.x % kWarp != 0 || e == 0) return;
  atomic_add(&words[0], stat_low(e));
  atomic_add(&words[1], stat_high(e));
}

// A stretch by a block. weights: of the classes of its columns, or null. `max` is canonical and the row not degenerate. All threads call.
template <class T, int kThreads, int kUnroll>
__device__ __forceinline__ void logit_stretch(const RowVectors<T>& row, float max, const LogitMap& map, const float* weights, int64_t* words) {
  const float shift = row_shift(mapped(map, max));
  FixedSum sum;
  int64_t z = 0;
  int terms = 0;
  bool infinite = false;
  const auto add = [&](const Vector<T>& v, int i) {
    const int64_t column = row.column(i);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      if (column + j < 0 || column + j >= row.length) continue;  // of a partial vector
      const float raw = widen(v.lane[j]), x = add32(mapped(map, raw), -shift);
      if (raw <= max) add_logit(sum, weights != nullptr ? weighted_logit(x, weights[column + j]) : x, words, infinite);
    }
    terms += kVector<T>;
    if (terms > kFixedTerms - kVector<T>) {
      z += total(sum);
      sum = FixedSum();
      terms = 0;
    }
  };
  row.template for_each<kThreads, kUnroll>(add, add);
  add_logits(static_cast<int64_t>(warp_sum(static_cast<uint64_t>(z + total(sum)))), infinite, words);
}

// before: as many columns of the stretch stand before the target.
template <class T, int kThreads, int kUnroll>
__device__ __forceinline__ void stat_stretch(const RowVectors<T>& row, float max, const LogitMap& map, int64_t before, int64_t* words) {
  const float top = mapped(map, max);
  const RowFrame frame = row_frame(top);
  const float row_magic = magic(frame.n_max), shifted_top = add32(top, -frame.shift);
  FixedSum sum;
  int64_t e = 0;
  int terms = 0;
  bool found = false;
  const auto add = [&](const Vector<T>& v, int i) {
    const int64_t column = row.column(i);
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      const float raw = widen(v.lane[j]), x = add32(mapped(map, raw), -frame.shift);
      const Term t = term(x, row_magic);
      const float a = from_bits(bits(add32(t.t, -0.5f)) + (bits(t.z) << 23));
      add_fixed<0>(sum, t.z >= kMagic - kGradDepth && raw <= max ? mul32(a, add32(shifted_top, -x)) : 0.0f);
      found = found || (raw == max && column + j < before);
    }
    terms += kVector<T>;
    if (terms > kFixedTerms - kVector<T>) {
      e += total(sum);
      sum = FixedSum();
      terms = 0;
    }
  };
  row.template for_each<kThreads, kUnroll>(add, add);
  add_stats(static_cast<int64_t>(warp_sum(static_cast<uint64_t>(e + total(sum)))), words);
  if (__any_sync(0xFFFFFFFFu, found) && threadIdx.x % kWarp == 0) atomic_add(&words[1], kBefore);
}

}  // namespace cuda
}  // namespace dce
