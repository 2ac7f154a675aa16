// The gradient of a stretch of a row (SPEC 7).
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

// x: shifted logits; magic: magic(n_max); scale finite. kDeep: some may lie more than kGradDepth octaves below the maximum, or have no term.
template <class T, bool kDeep, int kCount>
__device__ __forceinline__ void gradients(const float (&x)[kCount], float magic, float scale, T* out) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Term e = term(x[j], magic);
    // the low bits of z are n - n_max, and those of kMagicBits are zero: shifted by 23 they move the exponent of a
    const float a = from_bits(bits(add32(e.t, -0.5f)) + (bits(e.z) << 23));
    out[j] = narrow<T>(mul32(!kDeep || e.z >= kMagic - kGradDepth ? a : 0.0f, scale));
  }
}

// Vector i of a row to `to`, which holds column 0 of the row.
template <class T>
__device__ __forceinline__ void store(const RowVectors<T>& row, int64_t i, const Vector<T>& v, T* to, bool same_phase) {
  const int64_t c = row.column(i);
  if (same_phase && row.whole(i)) {
    __stcs(reinterpret_cast<uint4*>(to + c), v.raw);
  } else {
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j)
      if (c + j >= 0 && c + j < row.length) to[c + j] = v.lane[j];
  }
}
template <class T>
__device__ __forceinline__ bool same_phase(const RowVectors<T>& row, const T* to) {
  return (reinterpret_cast<uintptr_t>(row.data) ^ reinterpret_cast<uintptr_t>(to)) % kVectorBytes == 0;
}

// A block writes the gradient of a stretch; `own` is the target's column in it, or outside [0, length). All threads call.
template <class T, int kThreads, int kUnroll>
__device__ __forceinline__ void gradient_stretch(const RowVectors<T>& row, float max, RowScale f, int64_t own, T* to) {
  constexpr int kLanes = kVector<T>;
  const bool phase = same_phase(row, to);
  const RowFrame frame = row_frame(max);
  const float row_magic = magic(frame.n_max);
  for (int64_t i = threadIdx.x; i < row.count(); i += kUnroll * kThreads) {
    Vector<T> v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) v[u] = row.load(i + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float x[kLanes];
#pragma unroll
      for (int j = 0; j < kLanes; ++j) x[j] = add32(widen(v[u].lane[j]), -frame.shift);
      gradients<T, true>(x, row_magic, f.scale, v[u].lane);
      store(row, i + u * kThreads, v[u], to, phase);
    }
  }
  if (own < 0 || own >= row.length) return;
  __syncthreads();  // the target's column is written last
  if (threadIdx.x == 0) to[own] = narrow<T>(f.target);
}

// Every column of a stretch is `value`; nothing is read.
template <class T, int kThreads>
__device__ __forceinline__ void fill_stretch(const RowVectors<T>& row, T value, T* to) {
  Vector<T> v;
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) v.lane[j] = value;
  const RowVectors<T> out(to, row.length);
  for (int64_t i = threadIdx.x; i < out.count(); i += kThreads) store(out, i, v, to, true);
}

}  // namespace cuda
}  // namespace dce
