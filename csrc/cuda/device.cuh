// What the kernels share: 16-byte pieces of a row, conversions, reductions over a warp and a block.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "../row.h"

namespace dce {
namespace cuda {

constexpr int kWarp = 32;
constexpr int kVectorBytes = 16;
template <class T>
constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(T));  // elements of a 16-byte load: 4 or 8

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) { return x; }
template <>
__device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ __half narrow<__half>(float x) { return __float2half_rn(x); }

template <class T>
__device__ __forceinline__ T canonical_nan();
template <>
__device__ __forceinline__ float canonical_nan<float>() { return __uint_as_float(0x7FC00000u); }
template <>
__device__ __forceinline__ __nv_bfloat16 canonical_nan<__nv_bfloat16>() { return __ushort_as_bfloat16(0x7FC0); }
template <>
__device__ __forceinline__ __half canonical_nan<__half>() { return __ushort_as_half(0x7E00); }

// ---- vectors

template <class T>
union Vector {
  uint4 raw;
  T lane[kVector<T>];
};

// Columns [0, length) at `data` as 16-byte vectors on the memory's own grid: vector 0 is the one that holds column 0, so a row that starts anywhere needs no copy;
// the first and the last may be partial.
template <class T>
struct RowVectors {
  static constexpr int kLanes = kVector<T>;
  const T* data;
  int64_t length;
  int lead;  // columns of vector 0 that lie before the row, 0 .. kLanes - 1
  __device__ __forceinline__ RowVectors(const T* row, int64_t n)
      : data(row), length(n), lead(static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLanes)) {}
  // Vectors [whole_begin(), whole_end()) are whole.
  __device__ __forceinline__ int whole_begin() const { return lead != 0 ? 1 : 0; }
  __device__ __forceinline__ int whole_end() const { return static_cast<int>((length + lead) / kLanes); }
  __device__ __forceinline__ int64_t column(int i) const { return static_cast<int64_t>(i) * kLanes - lead; }  // of lane 0 of vector i
  __device__ __forceinline__ Vector<T> load(int i) const {
    Vector<T> v;
    v.raw = __ldcs(reinterpret_cast<const uint4*>(data + column(i)));
    return v;
  }
  // A partial vector, -inf where it lies outside the row.
  __device__ __forceinline__ Vector<T> load_partial(int i) const {
    Vector<T> v;
    const int64_t c = column(i);
#pragma unroll
    for (int j = 0; j < kLanes; ++j) v.lane[j] = c + j >= 0 && c + j < length ? data[c + j] : narrow<T>(-INFINITY);
    return v;
  }

  // Calls whole(v, i) for this thread's whole vectors, kUnroll loads ahead, and partial(v, i) for a partial one, if it has one.
  template <int kThreads, int kUnroll, class Whole, class Partial>
  __device__ __forceinline__ void for_each(const Whole& whole, const Partial& partial) const {
    if (length <= 0) return;
    const int end = whole_end();
    int i = whole_begin() + static_cast<int>(threadIdx.x);
    for (; i + (kUnroll - 1) * kThreads < end; i += kUnroll * kThreads) {
      Vector<T> v[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[u] = load(i + u * kThreads);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) whole(v[u], i + u * kThreads);
    }
    for_rest<kThreads>(i, whole, partial);
  }

  // The same, but that the first loads can be made before something that takes long.
  template <int kThreads, int kUnroll>
  struct Ahead {
    Vector<T> v[kUnroll];
    int i;
    bool any;
    __device__ __forceinline__ void load(const RowVectors& row) {
      any = i + (kUnroll - 1) * kThreads < row.whole_end();
      if (!any) return;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) v[u] = row.load(i + u * kThreads);
    }
  };
  template <int kThreads, int kUnroll>
  __device__ __forceinline__ Ahead<kThreads, kUnroll> load_ahead() const {
    Ahead<kThreads, kUnroll> ahead;
    ahead.i = whole_begin() + static_cast<int>(threadIdx.x);
    ahead.load(*this);
    return ahead;
  }
  template <int kThreads, int kUnroll, class Whole, class Partial>
  __device__ __forceinline__ void for_each(Ahead<kThreads, kUnroll> ahead, const Whole& whole, const Partial& partial) const {
    if (length <= 0) return;
    while (ahead.any) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) whole(ahead.v[u], ahead.i + u * kThreads);
      ahead.i += kUnroll * kThreads;
      ahead.load(*this);
    }
    for_rest<kThreads>(ahead.i, whole, partial);
  }

 private:
  template <int kThreads, class Whole, class Partial>
  __device__ __forceinline__ void for_rest(int i, const Whole& whole, const Partial& partial) const {
    const int end = whole_end();
#pragma unroll 1
    for (; i < end; i += kThreads) {
      Vector<T> v = load(i);
      whole(v, i);
    }
    const bool partial_end = (length + lead) % kLanes != 0;
    const int at = threadIdx.x == 0 && lead != 0 ? 0 : threadIdx.x == 1 && partial_end && (end > 0 || lead == 0) ? end : -1;
    if (at >= 0) {
      Vector<T> v = load_partial(at);
      partial(v, at);
    }
  }
};

// ---- order and maxima

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
}

// The greatest and the least of a run of vectors: NaN in `top` if there is one.
template <class T>
struct Extremes {
  float top = -INFINITY, low = INFINITY;
  __device__ __forceinline__ void add(const Vector<T>& v) {
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      top = max_or_nan(top, widen(v.lane[j]));
      low = fminf(low, widen(v.lane[j]));
    }
  }
  __device__ __forceinline__ float greatest() const { return top; }
  __device__ __forceinline__ float least() const { return low; }
};
template <>
struct Extremes<__nv_bfloat16> {  // two at a time
  __nv_bfloat162 top = __bfloat162bfloat162(__ushort_as_bfloat16(0xFF80)), low = __bfloat162bfloat162(__ushort_as_bfloat16(0x7F80));
  __device__ __forceinline__ void add(const Vector<__nv_bfloat16>& v) {
    const __nv_bfloat162* pair = reinterpret_cast<const __nv_bfloat162*>(&v.raw);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      top = __hmax2_nan(top, pair[j]);
      low = __hmin2(low, pair[j]);
    }
  }
  __device__ __forceinline__ float greatest() const { return max_or_nan(__low2float(top), __high2float(top)); }
  __device__ __forceinline__ float least() const { return fminf(__low2float(low), __high2float(low)); }
};

// 1 << s; 0 for every s outside [0, 31].
__device__ __forceinline__ uint32_t one_shifted(uint32_t s) {
  uint32_t w;
  asm("shl.b32 %0, 1, %1;" : "=r"(w) : "r"(s));
  return w;
}

__device__ __forceinline__ uint64_t warp_sum(uint64_t v) {
#pragma unroll
  for (int d = kWarp / 2; d > 0; d /= 2) v += __shfl_down_sync(0xFFFFFFFFu, v, d);
  return v;
}

// The sum modulo 2^64 of the lanes' values, in every lane: by pieces of 22 bits, 32 of which fit 32 bits.
__device__ __forceinline__ uint64_t warp_total(uint64_t v) {
  constexpr uint32_t kMask = (1u << 22) - 1, kAll = 0xFFFFFFFFu;
  const uint64_t low = __reduce_add_sync(kAll, static_cast<uint32_t>(v) & kMask), middle = __reduce_add_sync(kAll, static_cast<uint32_t>(v >> 22) & kMask);
  return low + (middle << 22) + (static_cast<uint64_t>(__reduce_add_sync(kAll, static_cast<uint32_t>(v >> 44))) << 44);
}

// Sum over the block of each of v[0 .. kCount), valid in thread 0. `scratch` holds kCount * (threads / 32) values; all threads call.
template <int kCount>
__device__ __forceinline__ void block_sum(uint64_t (&v)[kCount], uint64_t* scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    v[i] = warp_sum(v[i]);
    if (lane == 0) scratch[i * warps + warp] = v[i];
  }
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) v[i] = warp_sum(lane < warps ? scratch[i * warps + lane] : 0);
  }
  __syncthreads();
}

__device__ __forceinline__ int32_t block_max(int32_t v, int32_t* scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  v = __reduce_max_sync(0xFFFFFFFFu, v);
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  if (warp == 0) v = __reduce_max_sync(0xFFFFFFFFu, lane < warps ? scratch[lane] : kImageOfNegInf);
  return v;
}

__device__ __forceinline__ void atomic_add(int64_t* to, int64_t v) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(v));
}

// The logit of a row's target, 0 if the tensor has none.
template <class T>
__device__ __forceinline__ float target_logit(const Logits& logits, const Targets& targets, int64_t row) {
  const int64_t target = target_at(targets, row);
  const bool readable = target >= 0 && target < logits.columns && target != targets.ignore_index;
  return readable ? widen(static_cast<const T*>(logits.data)[row * logits.row_stride + target]) : 0.0f;
}

// ---- work

// Each row of `columns` in `pieces` cuts of `length`.
struct Pieces {
  int64_t pieces, length;
};
struct Piece {
  int64_t row, begin, length;
  __device__ __forceinline__ Piece(const Pieces& p, int64_t columns, int64_t of_row, int64_t piece)
      : row(of_row), begin(piece * p.length), length(columns - begin < p.length ? columns - begin : p.length) {}
  // Block (x, y) takes piece y of row x.
  __device__ __forceinline__ Piece(const Pieces& p, int64_t columns) : Piece(p, columns, blockIdx.x, blockIdx.y) {}
};

}  // namespace cuda
}  // namespace dce
