// The exact sum of squares of a tensor (SPEC 15). A warp takes chunks of 16-byte vectors, and has a window of octaves that moves only where it must: as long as every element of a
// vector of each lane fits, a square is a few additions in fp32 and one or three products added in registers. Else these vectors are added again by integers, window by window.
#include "../squares.h"
#include "launch.h"

namespace dce {
namespace cuda {
namespace {

constexpr int kSquareThreads = 256;
constexpr int kSquareBlocks = 4;  // a processor
constexpr int kChunkVectors = 4;  // 16-byte loads in flight a thread
constexpr unsigned kAll = 0xFFFFFFFFu;

// Elements [first, first + kElements) of [0, count), and 0 where that is outside; data + first lies on 16 bytes.
template <class T>
struct Chunk {
  static constexpr int kElements = kChunkVectors * kVector<T> * kWarp;  // 512 or 1024
  const T* data;
  int64_t first, count;
  __device__ __forceinline__ bool whole() const { return first >= 0 && first + kElements <= count; }
  __device__ __forceinline__ int64_t own(int i) const { return first + (i * kWarp + static_cast<int>(threadIdx.x % kWarp)) * kVector<T>; }  // of this lane's vector i
  __device__ __forceinline__ Vector<T> load_whole(int i) const {
    Vector<T> v;
    v.raw = __ldcs(reinterpret_cast<const uint4*>(data + own(i)));
    return v;
  }
  __device__ __forceinline__ Vector<T> load(int i) const {
    if (whole()) return load_whole(i);
    Vector<T> v;
#pragma unroll
    for (int j = 0; j < kVector<T>; ++j) {
      const int64_t at = own(i) + j;
      v.lane[j] = at >= 0 && at < count ? data[at] : narrow<T>(0.0f);
    }
    return v;
  }
};

// Calls f(bits of |x|, j) for the elements of a vector.
template <class T, class F>
__device__ __forceinline__ void for_each(const Vector<T>& v, const F& f) {
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) f(bits(widen(v.lane[j])) & 0x7FFFFFFFu, j);
}

// Adds the warp's vectors and returns true, if all elements fit; else leaves the sums as they are.
template <bool kWide, class T>
__device__ __forceinline__ bool add_quick(const Vector<T>& v, const Window& w, WindowSums& sums) {
  WindowSums next = sums;
  Quick seen;
#pragma unroll
  for (int j = 0; j < kVector<T>; ++j) add_square_quick<kWide>(widen(v.lane[j]), w, next, seen);
  const bool fit = __all_sync(kAll, all_fitted(seen, w));
  if (fit) sums = next;
  return fit;
}

// A warp's sums to its block's words, in shared memory: below 2^32 to each of five.
__device__ __forceinline__ void leave(const WindowSums& sums, const Window& w, int64_t* words) {
  const WindowSums all = {warp_sum(sums.high), warp_sum(sums.cross), warp_sum(sums.low)};
  if (threadIdx.x % kWarp != 0) return;
  uint32_t part[kParts];
  const int first = square_parts(window_total(all), 2 * w.low, part);
#pragma unroll
  for (int i = 0; i < kParts; ++i)
    if (part[i] != 0) atomic_add(&words[first + i], part[i]);
}

// The position of the warp's greatest element among those that `left` marks; -1 if none is. They are finite and not 0.
template <class T>
__device__ __forceinline__ int greatest(const Vector<T>& v, uint32_t left) {
  uint32_t most = 0;
  for_each(v, [&](uint32_t b, int j) { most = left >> j & 1 && b > most ? b : most; });
  most = __reduce_max_sync(kAll, most);
  return most == 0 ? -1 : significand(most).pos;
}

// Adds those of `left` that are in the window; returns the others.
template <class T>
__device__ __forceinline__ uint32_t add_in_window(const Vector<T>& v, uint32_t left, const Window& w, WindowSums& sums) {
  for_each(v, [&](uint32_t b, int j) {
    const Significand x = significand(b);
    if (!(left >> j & 1) || !in_window(x, w)) return;
    add_square(x, w, sums);
    left &= ~(1u << j);
  });
  return left;
}

// The warp's vectors of any elements. The window moves to end with the greatest, and `sums` with it; what lies below goes to the words at once.
template <class T>
__device__ __forceinline__ void add_any(const Vector<T>& v, Window& w, WindowSums& sums, int64_t* words) {
  if (sizeof(T) == 2 && add_quick<true>(v, w, sums)) return;
  uint32_t left = 0;
  int infinities = 0, nans = 0;
  for_each(v, [&](uint32_t b, int j) {
    left |= static_cast<uint32_t>(b != 0 && b < kInf32) << j;
    infinities += b == kInf32;
    nans += b > kInf32;
  });
  infinities = __reduce_add_sync(kAll, infinities);
  nans = __reduce_add_sync(kAll, nans);
  if (threadIdx.x % kWarp == 0) {
    if (infinities) atomic_add(&words[kInfinitiesWord], infinities);
    if (nans) atomic_add(&words[kNaNsWord], nans);
  }
  int top = greatest(v, left);
  if (top < 0) return;
  const Window own = window_of(top);
  if (own.low != w.low) {
    leave(sums, w, words);
    sums = {0, 0, 0};
    w = own;
  }
  left = add_in_window(v, left, w, sums);
#pragma unroll 1
  while ((top = greatest(v, left)) >= 0) {
    const Window lower = window_of(top);
    WindowSums part = {0, 0, 0};
    left = add_in_window(v, left, lower, part);
    leave(part, lower, words);
  }
}

// result: kSquareWords, and one that counts blocks, all 0 at first. The block that ends last carries.
template <class T>
__global__ void __launch_bounds__(kSquareThreads, kSquareBlocks) squares_kernel(const T* data, int64_t count, int64_t* result) {
  __shared__ int64_t words[kSquareWords];  // those of the digits below 2^63: at most six additions below 2^32 a vector and word, of 2^33 vectors over at least 32 blocks
  if (threadIdx.x < kSquareWords) words[threadIdx.x] = 0;
  __syncthreads();
  const int lead = static_cast<int>(reinterpret_cast<uintptr_t>(data) / sizeof(T) % kVector<T>);  // elements that the first vector has before the tensor
  constexpr int kWarps = kSquareThreads / kWarp, kMostChunks = kMostInWindow / Chunk<T>::kElements;
  const int64_t chunks = (count + lead + Chunk<T>::kElements - 1) / Chunk<T>::kElements, stride = static_cast<int64_t>(gridDim.x) * kWarps;
  Window w = window_of(0);
  WindowSums sums = {0, 0, 0};
  int added = 0;  // chunks
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp; i < chunks; i += stride) {
    const Chunk<T> chunk = {data, i * Chunk<T>::kElements - lead, count};
    Vector<T> v[kChunkVectors];
    if (chunk.whole()) {
#pragma unroll
      for (int j = 0; j < kChunkVectors; ++j) v[j] = chunk.load_whole(j);
    } else {
#pragma unroll
      for (int j = 0; j < kChunkVectors; ++j) v[j] = chunk.load(j);
    }
    uint32_t again = 0;  // vectors, the same in all lanes
#pragma unroll
    for (int j = 0; j < kChunkVectors; ++j) again |= static_cast<uint32_t>(!add_quick<sizeof(T) == 4>(v[j], w, sums)) << j;
#pragma unroll 1
    for (; again != 0; again &= again - 1) add_any(chunk.load(__ffs(again) - 1), w, sums, words);  // read anew: what is rare takes no registers
    if (++added == kMostChunks) {
      leave(sums, w, words);
      sums = {0, 0, 0};
      added = 0;
    }
  }
  leave(sums, w, words);
  __syncthreads();
  if (threadIdx.x < kSquareWords) {  // each word's upper half to the next, so that no sum over blocks wraps
    const int i = threadIdx.x;
    const int64_t own = i < kSquareDigits - 1 ? words[i] & 0xFFFFFFFF : words[i];
    const int64_t below = i > 0 && i < kSquareDigits ? words[i - 1] >> 32 : 0;
    if (own + below != 0) atomic_add(&result[i], own + below);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x != 0 || atomicAdd(reinterpret_cast<unsigned*>(result + kSquareWords), 1u) != gridDim.x - 1) return;
  __threadfence();
  int64_t total[kSquareDigits];
#pragma unroll
  for (int i = 0; i < kSquareDigits; ++i) total[i] = __ldcg(&result[i]);
  carry_squares(total);
#pragma unroll
  for (int i = 0; i < kSquareDigits; ++i) result[i] = total[i];
}

__global__ void square_norm_kernel(const int64_t* words, double* out) { *out = norm_of(words); }

}  // namespace

void square_digits(const void* data, Dtype dtype, int64_t count, int64_t* words, Context context) {
  const cudaStream_t stream = stream_of(context);
  check(cudaMemsetAsync(words, 0, (kSquareWords + 1) * sizeof(int64_t), stream), "cudaMemsetAsync");
  if (count == 0) return;
  with_dtype(dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t most = static_cast<int64_t>(processors()) * kSquareBlocks, a_block = Chunk<T>::kElements * (kSquareThreads / kWarp);
    const int64_t wanted = (count + kVector<T> + a_block - 1) / a_block;
    squares_kernel<T><<<static_cast<unsigned>(wanted < most ? wanted : most), kSquareThreads, 0, stream>>>(static_cast<const T*>(data), count, words);
  });
  check(cudaGetLastError(), "square_digits");
}

void square_norm(const int64_t* words, double* out, Context context) {
  square_norm_kernel<<<1, 1, 0, stream_of(context)>>>(words, out);
  check(cudaGetLastError(), "grad_norm");
}

}  // namespace cuda
}  // namespace dce
