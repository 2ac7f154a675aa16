// e^x of each bfloat16 x that matters, in shared memory: one lookup in place of the ten instructions of a term, the same bits (SPEC 3).
//
// A term P 2^(n - 23) is a float32, for P has 24 bits. Up to 2^-24 in magnitude every x has the term 1; from 32 on none is in the table, and -inf has the last
// entry, which is 0. Where logits are mapped the table is of the terms that they are mapped to.
//
// The index of x is the bits of the product 2^-102 x, whose biased exponent is 1 to 29 from 2^-24 on, and 0 below, where products are rounded: the low 12 bits grow with |x|, and
// the sign is moved down to the 13th.
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
  static constexpr float kLimit = 32.0f;                // |x| below
  static constexpr int kExponent = 127 - 102;           // biased, of what x is multiplied by; and `shift`
  static constexpr int kFirst = (kExponent - 24) << 7;  // index of 2^-24; before it are those of lesser x, in steps
  static constexpr int kLast = (kExponent + 5) << 7;    // index of 32; with kNegative that of -inf
  static constexpr int kSignBit = 12;
  static constexpr int kNegative = 1 << kSignBit;  // index of -x, beyond that of x
  static constexpr int kBytes = (kNegative + kLast + 1) * static_cast<int>(sizeof(float));
  static_assert(kFirst > 0 && kLast < kNegative);

  const unsigned char* entries;
  unsigned char* slopes = nullptr;  // under a cap
  int shift = 0;                    // 0..60. Where logits are scaled up by as much as 2^shift, the table is of |x| below 2^(5 - shift), and 2^(-24 - shift) is the first's
  bool filled;

  static __device__ __forceinline__ float power_of_biased(int exponent) { return from_bits(static_cast<uint32_t>(exponent) << 23); }
  __device__ __forceinline__ float logit(int i) const {
    return mul32(widen(__ushort_as_bfloat16(static_cast<unsigned short>((i & (kNegative - 1)) | (i & kNegative) << (15 - kSignBit)))), power_of_biased(254 - kExponent - shift));
  }
  __device__ __forceinline__ float limit() const { return from_bits(bits(kLimit) - (static_cast<uint32_t>(shift) << 23)); }
  // Whether the entries before the first are right for every x that is rounded to them: all have the term 1 and a slope of 1.
  __device__ __forceinline__ bool starts_flat(const LogitMap& map) const {
    const float y = mapped(map, logit(kFirst));
    const Term e = term(y);
    return term_significand(e) == 1u << 23 && term_exponent(e) == 0 && slope_at(map, y) == 1.0f;
  }
  static __device__ __forceinline__ float value(Term e) { return mul32(static_cast<float>(term_significand(e)), power_of_biased(term_exponent(e) - 23 + 127)); }
  __device__ __forceinline__ void fill(void* entries, int thread, int threads) const {
    for (int i = thread; i < kBytes / static_cast<int>(sizeof(float)); i += threads)
      static_cast<float*>(entries)[i] = (i & (kNegative - 1)) >= kLast ? 0.0f : value(term(logit(i)));
  }
  // Of mapped logits y: e^y, and under a cap in a second table that times the slope, rounded, for the gradient (SPEC 12).
  __device__ __forceinline__ void fill(void* entries, const LogitMap& map, int thread, int threads) const {
    for (int i = thread; i < kBytes / static_cast<int>(sizeof(float)); i += threads) {
      const float y = mapped(map, logit(i)), v = (i & (kNegative - 1)) >= kLast ? 0.0f : value(term(y));
      static_cast<float*>(entries)[i] = v;
      if (slopes != nullptr) reinterpret_cast<float*>(slopes)[i] = mul32(v, slope_at(map, y));
    }
  }

  // Indices of a pair, 16 bits each. Both |x| must be below limit(); without kFinite x may be -inf.
  template <bool kFinite>
  __device__ __forceinline__ uint32_t indices(uint32_t pair) const {
    const uint32_t exponent = static_cast<uint32_t>(kExponent + shift) << 7;
    uint32_t scaled;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(exponent << 16 | exponent));
    // the sign from bit 15 down: of a negative one 2^15 - kNegative less is less, and taken; a positive one, below that, wraps to more
    constexpr uint32_t kDown = 0x10000 - ((1 << 15) - kNegative);
    const uint32_t index = __viaddmin_u16x2(scaled, kDown * 0x10001u, scaled);
    return kFinite ? index : __vminu2(index, (kNegative + kLast) * 0x10001u);
  }
  // e^x of the first kCount of a vector.
  template <bool kFinite, int kCount>
  __device__ __forceinline__ void look_up(uint4 v, float (&out)[kCount]) const {
    constexpr uint32_t kSize = sizeof(float);
    const uint32_t pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < kCount / 2; ++j) {
      const uint32_t i = indices<kFinite>(pair[j]);
      out[2 * j] = at(dot(i, kSize));
      out[2 * j + 1] = at(dot(i, kSize << 8));
    }
  }
  // The halves of a times the two low bytes of b, added: one half times kSize by the pipe that has the least to do. __dp2a_lo is volatile, which this need not be.
  static __device__ __forceinline__ uint32_t dot(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("dp2a.lo.u32.u32 %0, %1, %2, 0;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  __device__ __forceinline__ float at(uint32_t offset) const { return *reinterpret_cast<const float*>(entries + offset); }
};

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
