// e^x of each bfloat16 x that matters, in shared memory: one lookup in place of the ten instructions of a term, the same bits (SPEC 3).
//
// A term P 2^(n - 23) is a float32, for P has 24 bits. Up to 2^-24 in magnitude every x has the term 1; from 32 on none is in the table, and -inf shares the last
// entry, which is 0. So 2 * 3713 values are all there are. Where logits are mapped the table is of the terms that they are mapped to.
#pragma once

#include "device.cuh"

namespace dce {
namespace cuda {

// For types without a table.
template <class T>
struct TermTable {
  static constexpr bool kExists = false;
  static constexpr int kBytes = 0;
};

template <>
struct TermTable<__nv_bfloat16> {
  static constexpr bool kExists = true;
  static constexpr float kLimit = 32.0f;                  // |x| below
  static constexpr int kFirst = (127 - 24) << 7;          // bits of 2^-24
  static constexpr int kLast = ((127 + 5) << 7) - kFirst;  // index of 32, and of all above
  static constexpr int kNegative = 1 << 12;               // index of -x, beyond that of x
  static constexpr int kBytes = (kNegative + kLast + 1) * static_cast<int>(sizeof(float));
  static_assert(kLast < kNegative && kBytes <= 1 << 16, "byte offsets of 16 bits");

  const unsigned char* entries;
  unsigned char* slopes = nullptr;  // under a cap
  int shift = 0;                    // where logits are scaled up by as much as 2^shift, |x| from 2^(-24 - shift) to 2^(5 - shift) is in the table
  bool filled;
  uint32_t minus_first;  // of minus_first(shift), opaque to the compiler, which would load it anew for each use

  static constexpr uint32_t kLasts = kLast * 0x10001u;
  static __device__ __forceinline__ float logit(int i, int shift = 0) {
    return widen(__ushort_as_bfloat16(static_cast<unsigned short>(kFirst - (shift << 7) + (i & (kNegative - 1)) | (i & kNegative) << 3)));
  }
  __device__ __forceinline__ float limit() const { return from_bits(bits(kLimit) - (static_cast<uint32_t>(shift) << 23)); }
  // Whether all that the first entry stands for, 0 among them, has the term 1.
  __device__ __forceinline__ bool starts_at_one(const LogitMap& map) const {
    const Term e = term(mapped(map, logit(0, shift)));
    return term_significand(e) == 1u << 23 && term_exponent(e) == 0;
  }
  static __device__ __forceinline__ float value(Term e) { return mul32(static_cast<float>(term_significand(e)), from_bits(static_cast<uint32_t>(term_exponent(e) - 23 + 127) << 23)); }
  static __device__ __forceinline__ void fill(void* entries, int thread, int threads) {
    for (int i = thread; i < kBytes / static_cast<int>(sizeof(float)); i += threads)
      static_cast<float*>(entries)[i] = (i & (kNegative - 1)) >= kLast ? 0.0f : value(term(logit(i)));
  }
  // Of mapped logits y: e^y, and under a cap in a second table that times the slope, rounded, for the gradient (SPEC 12). Garbage where |y| is not below kLimit.
  __device__ __forceinline__ void fill(void* entries, const LogitMap& map, int thread, int threads) const {
    for (int i = thread; i < kBytes / static_cast<int>(sizeof(float)); i += threads) {
      const float y = mapped(map, logit(i, shift)), v = (i & (kNegative - 1)) >= kLast ? 0.0f : value(term(y));
      static_cast<float*>(entries)[i] = v;
      if (slopes != nullptr) reinterpret_cast<float*>(slopes)[i] = mul32(v, slope_at(map, y));
    }
  }

  // Byte offsets of the entries of a pair, 16 bits each.
  __device__ __forceinline__ uint32_t offsets(uint32_t pair) const {
    const uint32_t index = __viaddmin_s16x2_relu(pair & 0x7FFF7FFFu, minus_first, kLasts) | (pair >> 3 & kNegative * 0x10001u);
    uint32_t bytes;
    asm("shl.b32 %0, %1, 2;" : "=r"(bytes) : "r"(index));  // once for the pair, where the compiler would shift and mask each half
    return bytes;
  }
  __device__ __forceinline__ float at(uint32_t offset) const { return *reinterpret_cast<const float*>(entries + offset); }
  // e^x of the first kCount of a vector.
  template <int kCount>
  __device__ __forceinline__ void look_up(uint4 v, float (&out)[kCount]) const {
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) {
      const uint32_t o = offsets(pair[j]);
      out[2 * j] = at(o & 0xFFFF);
      out[2 * j + 1] = at(o >> 16);
    }
  }
};

inline uint32_t minus_first(int shift) { return static_cast<uint16_t>((shift << 7) - TermTable<__nv_bfloat16>::kFirst) * 0x10001u; }

// The most negative finite value of a run of vectors, which have no NaN and no +inf; 0 if none is negative.
struct LeastFinite {
  uint32_t top = 0;  // u16 images: -inf wraps to 0, a finite value to its bits + 2^7
  __device__ __forceinline__ void add(uint4 v) {
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) top = __viaddmax_u16x2(pair[j], 0x00800080u, top);
  }
  __device__ __forceinline__ float least() const {
    const uint32_t image = max(top & 0xFFFF, top >> 16);
    return image > 0x8080 ? widen(__ushort_as_bfloat16(static_cast<unsigned short>(image - 0x80))) : 0.0f;
  }
};

}  // namespace cuda
}  // namespace dce
