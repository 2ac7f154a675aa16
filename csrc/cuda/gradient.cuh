// The gradient of a stretch of a row (SPEC 7).
#pragma once

#include "device.cuh"
#include "words.cuh"

namespace dce {
namespace cuda {

// The entropy's summand (SPEC 13), summed on the way; top: the maximum, shifted as the logits are.
struct NoStats {
  __device__ __forceinline__ void add(float, float, bool) {}
};
struct WithStats {
  FixedSum sum;
  float top;
  __device__ __forceinline__ void add(float a, float x, bool has_term) { add_fixed<0>(sum, has_term ? mul32(a, add32(top, -x)) : 0.0f); }
};

// x: shifted logits; magic: magic(n_max); scale finite. kDeep: some may lie more than kGradDepth octaves below the maximum, or have no term. kConstant: with smoothing.
template <class T, bool kDeep, bool kConstant, int kCount, class Stats = NoStats>
__device__ __forceinline__ void gradients(const float (&x)[kCount], float magic, const RowScale& f, T* out, Stats&& stats = Stats()) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Term e = term(x[j], magic);
    const bool has_term = !kDeep || e.z >= kMagic - kGradDepth;
    const float a = term_ratio(e);
    stats.add(a, x[j], has_term);
    const float kept = has_term ? a : 0.0f;
    out[j] = narrow<T>(kConstant ? fma32(kept, f.scale, f.constant) : mul32(kept, f.scale));
  }
}
// The same where the logits are mapped: y.
struct NoWeight {
  __device__ __forceinline__ float operator()(int) const { return 1.0f; }
};
template <class T, int kCount, class Weight = NoWeight, class Stats = NoStats>
__device__ __forceinline__ void gradients_with(const float (&y)[kCount], const LogitMap& map, float magic, const RowScale& f, T* out, float shift = 0.0f, const Weight& weight = Weight(),
                                               Stats&& stats = Stats()) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float x = add32(y[j], -shift);
    const Term e = term(x, magic);
    const bool has_term = e.z >= kMagic - kGradDepth;
    const float a = term_ratio(e);
    stats.add(a, x, has_term);
    const float k = mul32(f.constant, weight(j)), slope = slope_at(map, y[j]);
    out[j] = narrow<T>(fma32(mul32(has_term ? a : 0.0f, slope), f.scale, mul32(k, slope)));
  }
}

// The columns of vector i that lie in a row of `length`, to `to`, which holds its column 0.
template <class T>
__device__ __forceinline__ void store_lanes(const Vector<T>& v, int64_t column, int64_t length, T* to) {
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j)
    if (column + j >= 0 && column + j < length) to[column + j] = v.lane[j];
}

// A block writes the gradient of a stretch, of which it has begun to read; `own` is the target's column in it, or outside [0, length). columns: of these, with kColumns.
// All threads call.
template <class T, bool kColumns, int kThreads, int kUnroll>
__device__ __forceinline__ void gradient_stretch(const RowVectors<T>& row, const typename RowVectors<T>::template Ahead<kThreads, kUnroll>& ahead, float max, RowScale f,
                                                 const ColumnOptions& columns, int64_t own, T* to) {
  constexpr int kLanes = kVector<T>;
  const RowFrame frame = row_frame(kColumns ? mapped(columns.map, max) : max);
  const float row_magic = magic(frame.n_max);
  const auto compute = [&](Vector<T>& v, int i) {
    float x[kLanes];
    if constexpr (kColumns) {
      const int64_t column = row.column(i);
      const auto weight = [&](int j) { return columns.weights != nullptr && column + j >= 0 && column + j < row.length ? columns.weights[column + j] : 1.0f; };
#pragma unroll
      for (int j = 0; j < kLanes; ++j) x[j] = mapped(columns.map, widen(v.lane[j]));
      gradients_with<T>(x, columns.map, row_magic, f, v.lane, frame.shift, weight);
    } else {
#pragma unroll
      for (int j = 0; j < kLanes; ++j) x[j] = add32(widen(v.lane[j]), -frame.shift);
      gradients<T, true, false>(x, row_magic, f, v.lane);
    }
  };
  const auto by_lane = [&](Vector<T>& v, int i) {
    compute(v, i);
    store_lanes(v, row.column(i), row.length, to);
  };
  // to is on the same 16-byte phase as the row, unless one of them has its rows at odd distances
  if ((reinterpret_cast<uintptr_t>(row.data) ^ reinterpret_cast<uintptr_t>(to)) % kVectorBytes == 0) {
    const auto whole = [&](Vector<T>& v, int i) {
      compute(v, i);
      __stcs(reinterpret_cast<uint4*>(to + row.column(i)), v.raw);
    };
    row.for_each(ahead, whole, by_lane);
  } else {
    row.template for_each<kThreads, 1>(by_lane, by_lane);
  }
  if (own < 0 || own >= row.length) return;
  __syncthreads();  // the target's column is written last
  if (threadIdx.x == 0) to[own] = narrow<T>(f.target);
}

// Every column of a stretch is `value`; nothing is read.
template <class T, int kThreads>
__device__ __forceinline__ void fill_stretch(int64_t length, T value, T* to) {
  Vector<T> v;
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) v.lane[j] = value;
  const RowVectors<T> out(to, length);
  for (int i = out.whole_begin() + static_cast<int>(threadIdx.x); i < out.whole_end(); i += kThreads) __stcs(reinterpret_cast<uint4*>(to + out.column(i)), v.raw);
  if (threadIdx.x < kVector<T>) {  // the columns of the partial vectors
    const int64_t first = threadIdx.x, last = out.column(out.whole_end()) + static_cast<int64_t>(threadIdx.x);
    if (first < length && first < out.column(out.whole_begin())) to[first] = value;
    if (last >= 0 && last < length) to[last] = value;
  }
}

}  // namespace cuda
}  // namespace dce
