// The exact sum of a stretch of a row: the hot loop (SPEC 3 and 4).
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

// Terms are counted from the exponent of some maximum, `top`: s = n - (top - 31). Window `near` takes s in [0, 31], window `far` s in [-32, -1]; lower ones are
// rare and somebody else's. A window is a uint64 that holds kWindowTerms terms below 2^24 * 2^31.
constexpr int kWindowTerms = 512;
constexpr uint32_t kDeepest = static_cast<uint32_t>(-160);  // no kept term lies lower than s = -160 (SPEC 4)

struct Windows {
  uint64_t near = 0, far = 0;
};

constexpr int32_t kNoneBelow = INT32_MIN;

// Adds the terms of x to the windows. Returns the highest s of a term in [-160, -33], which is in neither window, or kNoneBelow.
template <int kCount>
__device__ __forceinline__ int32_t add_terms(Windows& w, const float (&x)[kCount], float magic) {
  uint32_t p[kCount], s[kCount];
  uint32_t lowest = 0;  // the s of a term below `near`, as uint32, is larger than any other, that of -inf and of all that has no term included
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Term e = term(x[j], magic);
    p[j] = term_significand(e);
    s[j] = bits(e.z) - kMagicBits;
    lowest = max(lowest, s[j]);
    // out of the window the weight is 0, whatever p is
    w.near += static_cast<uint64_t>(p[j]) * one_shifted(s[j]);
  }
  int32_t below = kNoneBelow;
  if (lowest >= kDeepest) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      w.far += static_cast<uint64_t>(p[j]) * one_shifted(s[j] + 32);
      if (s[j] >= kDeepest && s[j] < static_cast<uint32_t>(-32)) below = max(below, static_cast<int32_t>(s[j]));
    }
  }
  return below;
}

// The same where every s is known to lie in [0, 31].
template <int kCount>
__device__ __forceinline__ void add_near_terms(Windows& w, const float (&x)[kCount], float magic) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Term e = term(x[j], magic);
    w.near += static_cast<uint64_t>(term_significand(e)) * __funnelshift_l(0, 1, bits(e.z));  // 1 << s: the low five bits of kMagicBits are zero
  }
}

// The same where every s is known to lie in [-32, 31].
template <int kCount>
__device__ __forceinline__ void add_near_and_far_terms(Windows& w, const float (&x)[kCount], float far_magic) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Term e = term(x[j], far_magic);
    const uint64_t p = term_significand(e);
    const uint64_t weight = uint64_t{1} << (bits(e.z) & 63);  // 1 << (s + 32): its halves are the weights in the two windows
    w.far += p * static_cast<uint32_t>(weight);
    w.near += p * static_cast<uint32_t>(weight >> 32);
  }
}

// The same for terms given as float32 values, P 2^(n - 23) or 0. A value's exponent is n, or n - 1 where P < 2^23: it is the exponent that must lie in the window.
// origin: the biased exponent of s = 0.
__device__ __forceinline__ uint32_t significand(uint32_t b) {
  uint32_t m;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(m) : "r"(b), "r"(0x7FFFFF), "r"(0x800000));
  return m;
}
template <int kCount>
__device__ __forceinline__ void add_near_values(Windows& w, const float (&value)[kCount], uint32_t origin) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const uint32_t b = bits(value[j]);
    w.near += static_cast<uint64_t>(significand(b)) * one_shifted((b >> 23) - origin);  // of 0: s is below every window
  }
}
template <int kCount>
__device__ __forceinline__ void add_near_and_far_values(Windows& w, const float (&value)[kCount], uint32_t origin) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const uint32_t b = bits(value[j]), s = (b >> 23) - origin;
    const uint64_t p = significand(b);
    w.near += p * one_shifted(s);
    w.far += p * one_shifted(s + 32);
  }
}

// The terms of columns [begin, begin + count) that lie below both windows, straight into digits in shared memory. Read again, for it is rare.
template <class T>
__device__ __forceinline__ void add_below_windows(const RowVectors<T>& row, int64_t begin, int count, float max, const RowFrame& frame, int64_t* digits) {
#pragma unroll 1
  for (int64_t c = begin < 0 ? 0 : begin; c < begin + count && c < row.length; ++c) {
    const float raw = widen(row.data[c]);
    const Term e = term(add32(raw, -frame.shift), magic(frame.n_max - 31));
    const int32_t s = static_cast<int32_t>(bits(e.z) - kMagicBits), shift = s + frame.n_max - 31 - frame.base;
    if (!(raw <= max) || !(e.z >= kMagic - 160.0f) || s >= -32 || shift < 0) continue;
    const uint64_t v = static_cast<uint64_t>(term_significand(e)) << (shift & 31);
    atomic_add(&digits[shift >> 5], static_cast<int64_t>(v & 0xFFFFFFFFu));
    atomic_add(&digits[(shift >> 5) + 1], static_cast<int64_t>(v >> 32));
  }
}

template <int kThreads>
struct SumScratch {
  uint64_t partial[5 * (kThreads / kWarp)];
  int64_t below[kDigits];
};

// A block's sum of a stretch of a row whose maximum is known: words[0..7] of the row, in thread 0; its tag is left to the caller. With kCheck, faulty columns add
// nothing and are counted. `max` is canonical. All threads call.
template <class T, bool kCheck, int kThreads, int kUnroll>
__device__ __forceinline__ void sum_stretch(const RowVectors<T>& row, float max, int64_t* words, SumScratch<kThreads>& scratch) {
  constexpr int kLanes = kVector<T>;
  const bool degenerate = is_degenerate(max);
  if (threadIdx.x < kDigits) scratch.below[threadIdx.x] = 0;
  __syncthreads();

  const RowFrame frame = row_frame(degenerate ? 0.0f : max);
  const float near_magic = magic(frame.n_max - 31);
  Windows w;
  uint64_t near_low = 0, near_high = 0, far_low = 0, far_high = 0;  // sums of the windows' halves
  uint64_t faults = 0;
  int terms = 0;
  const auto add = [&](const Vector<T>& v, int i) {
    float x[kLanes];
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      x[j] = widen(v.lane[j]);
      if (kCheck) top = max_or_nan(top, x[j]);
      x[j] = add32(x[j], -frame.shift);
    }
    if (kCheck && !(top <= max)) {  // a faulty column becomes -inf: no term
#pragma unroll
      for (int j = 0; j < kLanes; ++j) {
        const bool faulty = !(widen(v.lane[j]) <= max);
        faults += faulty;
        if (faulty) x[j] = -INFINITY;
      }
    }
    if (degenerate) return;
    if (add_terms(w, x, near_magic) != kNoneBelow) add_below_windows(row, row.column(i), kLanes, max, frame, scratch.below);
    terms += kLanes;
    if (terms > kWindowTerms - kLanes) {
      near_low += static_cast<uint32_t>(w.near);
      near_high += w.near >> 32;
      far_low += static_cast<uint32_t>(w.far);
      far_high += w.far >> 32;
      w = Windows();
      terms = 0;
    }
  };
  if (!degenerate || (kCheck && max < 0)) row.template for_each<kThreads, kUnroll>(add, add);
  uint64_t total[5] = {near_low + static_cast<uint32_t>(w.near), near_high + (w.near >> 32), far_low + static_cast<uint32_t>(w.far), far_high + (w.far >> 32), faults};
  block_sum(total, scratch.partial);  // its barriers also complete `below`
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < kDigits; ++i) words[i] = scratch.below[i];
  if (!degenerate) {
    const int near_bit = frame.n_max - 31 - frame.base;  // 97..128
    add_shifted(words, total[0] + (static_cast<uint128>(total[1]) << 32), near_bit);
    add_shifted(words, total[2] + (static_cast<uint128>(total[3]) << 32), near_bit - 32);
  }
  words[kColumnsWord] = row.length + static_cast<int64_t>(total[4]) * kOneFault;
}

}  // namespace cuda
}  // namespace dce
