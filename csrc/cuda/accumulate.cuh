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

// Windows more, below the two, in shared memory, for they are rarely wanted: s in [-64, -33], [-96, -65], [-128, -97], and -129. No kept term lies lower (SPEC 4).
constexpr int kLowWindows = 4;
// Adds the terms of x that lie in them to this thread's own, low[i * kThreads]. lowest: the least s of a kept term, -near_bit.
template <int kThreads, int kCount>
__device__ __forceinline__ void add_low_terms(uint64_t* low, const float (&x)[kCount], float magic, int lowest) {
  uint64_t sum[kLowWindows] = {};
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Term e = term(x[j], magic);
    if (!(e.z >= kMagic + static_cast<float>(lowest))) continue;
    const uint64_t p = term_significand(e);
    const uint32_t s = bits(e.z) - kMagicBits;
#pragma unroll
    for (int i = 0; i < kLowWindows; ++i) sum[i] += p * one_shifted(s + 64 + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < kLowWindows; ++i) low[i * kThreads] += sum[i];
}

template <int kThreads>
struct SumScratch {
  uint64_t partial[5 * (kThreads / kWarp)];
  uint64_t low[kLowWindows * kThreads];
  int64_t below[kDigits];  // sums of `low`
};

// A block's sum of a stretch of a row whose maximum is known: words[0..7] of the row, in thread 0; its tag is left to the caller. With kCheck, faulty columns add
// nothing and are counted. `max` is canonical. Without kMap the map is not looked at. All threads call.
template <class T, bool kCheck, bool kMap, int kThreads, int kUnroll>
__device__ __forceinline__ void sum_stretch(const RowVectors<T>& row, float max, const LogitMap& map, int64_t* words, SumScratch<kThreads>& scratch) {
  constexpr int kLanes = kVector<T>;
  const bool degenerate = kMap ? is_degenerate(max, map) : is_degenerate(max);
  if (threadIdx.x < kDigits) scratch.below[threadIdx.x] = 0;
  uint64_t* const low = scratch.low + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kLowWindows; ++i) low[i * kThreads] = 0;
  __syncthreads();

  const RowFrame frame = row_frame(degenerate ? 0.0f : kMap ? mapped(map, max) : max);
  const int32_t n_top = frame.n_max + (kMap && map.cap != 0.0f);  // a cap may put a term that much above the maximum's
  const int near_bit = n_top - 31 - frame.base;  // 97..129
  const float near_magic = magic(n_top - 31);
  Windows w;
  uint64_t near_low = 0, near_high = 0, far_low = 0, far_high = 0;  // sums of the windows' halves
  uint64_t faults = 0;
  int terms = 0;
  bool has_low = false;
  const auto flush_low = [&] {
#pragma unroll 1
    for (int i = 0; i < kLowWindows; ++i) {
      const uint64_t sum = low[i * kThreads];
      const int shift = near_bit - 64 - 32 * i;  // negative: no term that is kept has a bit below -shift
      if (sum == 0) continue;
      low[i * kThreads] = 0;
      int64_t words[kDigits] = {};
      add_shifted(words, shift < 0 ? sum >> -shift : sum, shift < 0 ? 0 : shift);
#pragma unroll
      for (int j = 0; j < kDigits; ++j)
        if (words[j] != 0) atomic_add(&scratch.below[j], words[j]);
    }
  };
  const auto add = [&](const Vector<T>& v, int) {
    float x[kLanes];
    float top = -INFINITY;
#pragma unroll
    for (int j = 0; j < kLanes; ++j) {
      x[j] = widen(v.lane[j]);
      if (kCheck) top = max_or_nan(top, x[j]);
      x[j] = add32(kMap ? mapped(map, x[j]) : x[j], -frame.shift);
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
    if (add_terms(w, x, near_magic) != kNoneBelow) {
      add_low_terms<kThreads>(low, x, near_magic, -near_bit);
      has_low = true;
    }
    terms += kLanes;
    if (terms > kWindowTerms - kLanes) {
      near_low += static_cast<uint32_t>(w.near);
      near_high += w.near >> 32;
      far_low += static_cast<uint32_t>(w.far);
      far_high += w.far >> 32;
      w = Windows();
      terms = 0;
      if (has_low) flush_low();
    }
  };
  if (!degenerate || (kCheck && max < 0)) row.template for_each<kThreads, kUnroll>(add, add);
  if (has_low) flush_low();
  uint64_t total[5] = {near_low + static_cast<uint32_t>(w.near), near_high + (w.near >> 32), far_low + static_cast<uint32_t>(w.far), far_high + (w.far >> 32), faults};
  block_sum(total, scratch.partial);  // its barriers also complete `below`
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < kDigits; ++i) words[i] = scratch.below[i];
  if (!degenerate) {
    add_shifted(words, total[0] + (static_cast<uint128>(total[1]) << 32), near_bit);
    add_shifted(words, total[2] + (static_cast<uint128>(total[3]) << 32), near_bit - 32);
  }
  words[kColumnsWord] = row.length + static_cast<int64_t>(total[4]) * kOneFault;
}

}  // namespace cuda
}  // namespace dce
