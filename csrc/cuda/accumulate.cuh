// One thread's share of a row's exact sum, for a known frame: the hot loop (SPEC 3 and 4).
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

// Terms go to one of three places by s = n - (n_max - 31): window `near` (s in [0, 31]), window `far` (s in [-32, -1]), or, rarely, straight to the digits in shared memory.
// A window's uint64 holds kFlush terms below 2^24 * 2^31; fold() moves it to two wider halves.
struct Windows {
  static constexpr int kFlush = 512;
  uint64_t near, far;
  uint64_t near_low, near_high, far_low, far_high;  // halves: sums of the low and of the high 32 bits
  __device__ __forceinline__ Windows() : near(0), far(0), near_low(0), near_high(0), far_low(0), far_high(0) {}
  __device__ __forceinline__ void fold() {
    near_low += static_cast<uint32_t>(near);
    near_high += near >> 32;
    far_low += static_cast<uint32_t>(far);
    far_high += far >> 32;
    near = far = 0;
  }
};

// What a row's frame means to the loop.
struct Anchors {
  float shift;
  uint32_t near;  // bits of z at s = 0
  float lowest_near, lowest_far, lowest_kept;  // as z
  int32_t base;
  __device__ __forceinline__ explicit Anchors(const RowFrame& f)
      : shift(f.shift),
        near(kMagicBits + static_cast<uint32_t>(f.n_max - 31)),
        lowest_near(kMagic + static_cast<float>(f.n_max - 31)),
        lowest_far(kMagic + static_cast<float>(f.n_max - 63)),
        lowest_kept(kMagic + static_cast<float>(f.base)),
        base(f.base) {}
};

// Terms below both windows, into the block's digits.
__device__ __noinline__ void add_below_windows(float x, int32_t base, int64_t* digits) {
  const Term e = term(x);
  const int shift = term_exponent(e) - base;
  const uint64_t v = static_cast<uint64_t>(term_significand(e)) << (shift & 31);
  atomic_add(&digits[shift >> 5], static_cast<int64_t>(v & 0xFFFFFFFFu));
  atomic_add(&digits[(shift >> 5) + 1], static_cast<int64_t>(v >> 32));
}

template <int kCount>
__device__ __forceinline__ void add_terms(Windows& w, const float (&x)[kCount], const Anchors& a, int64_t* digits) {
  uint32_t p[kCount], s[kCount];
  float z_min = INFINITY;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const Term e = term(x[j]);
    p[j] = term_significand(e);
    s[j] = bits(e.z) - a.near;
    z_min = fminf(z_min, e.z);
    // where there is no term, or it lies lower, the shift is out of range and the weight 0, whatever p is
    w.near += static_cast<uint64_t>(p[j]) * one_shifted(s[j]);
  }
  if (z_min < a.lowest_near) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) w.far += static_cast<uint64_t>(p[j]) * one_shifted(s[j] + 32);
    if (z_min < a.lowest_far) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const float z = from_bits(s[j] + a.near);
        if (z < a.lowest_far && z >= a.lowest_kept) add_below_windows(x[j], a.base, digits);
      }
    }
  }
}

}  // namespace cuda
}  // namespace dce
