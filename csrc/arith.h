// The arithmetic every bit of a result comes from, in one source for host and device: docs/SPEC.md sections 1 to 3 and 5.
// Only IEEE add, multiply and fma (explicit, never contracted) and integers; no library exp or log, no division.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define DCE_FN static __host__ __device__ __forceinline__
#else
// Internal linkage and forced inlining: the same header is compiled for several instruction sets, and a shared symbol
// would let the linker put AVX-512 code where a portable caller runs.
#define DCE_FN static inline __attribute__((always_inline))
#endif

namespace dce {

// ---- single-rounding primitives

#if defined(__CUDA_ARCH__)
DCE_FN float fma32(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DCE_FN float add32(float a, float b) { return __fadd_rn(a, b); }
DCE_FN float mul32(float a, float b) { return __fmul_rn(a, b); }
DCE_FN double fma64(double a, double b, double c) { return __fma_rn(a, b, c); }
DCE_FN double add64(double a, double b) { return __dadd_rn(a, b); }
DCE_FN double mul64(double a, double b) { return __dmul_rn(a, b); }
DCE_FN uint32_t bits(float x) { return __float_as_uint(x); }
DCE_FN float from_bits(uint32_t b) { return __uint_as_float(b); }
DCE_FN uint64_t bits(double x) { return static_cast<uint64_t>(__double_as_longlong(x)); }
DCE_FN double from_bits(uint64_t b) { return __longlong_as_double(static_cast<long long>(b)); }
DCE_FN int leading_zeros(uint64_t x) { return __clzll(static_cast<long long>(x)); }
#else
DCE_FN float fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DCE_FN float add32(float a, float b) { return a + b; }
DCE_FN float mul32(float a, float b) { return a * b; }
DCE_FN double fma64(double a, double b, double c) { return __builtin_fma(a, b, c); }
DCE_FN double add64(double a, double b) { return a + b; }
DCE_FN double mul64(double a, double b) { return a * b; }
DCE_FN uint32_t bits(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
DCE_FN float from_bits(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
DCE_FN uint64_t bits(double x) { uint64_t b; std::memcpy(&b, &x, 8); return b; }
DCE_FN double from_bits(uint64_t b) { double x; std::memcpy(&x, &b, 8); return x; }
DCE_FN int leading_zeros(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
#endif

constexpr uint32_t kNaN32 = 0x7FC00000u;  // the one NaN that leaves an operation
constexpr uint32_t kInf32 = 0x7F800000u;

// Tests on bits: immune to whatever a compiler thinks of NaN.
DCE_FN bool is_nan(float x) { return (bits(x) & 0x7FFFFFFFu) > kInf32; }
DCE_FN bool is_finite(float x) { return (bits(x) & 0x7FFFFFFFu) < kInf32; }

// 2^k for -1022 <= k <= 1023.
DCE_FN double pow2(int k) { return from_bits(static_cast<uint64_t>(k + 1023) << 52); }

// ---- row maximum: an integer image of the order, so that any integer maximum settles NaN and the sign of zero (SPEC 2)

constexpr int32_t kImageOfNaN = 0x7FC00000;  // above +inf (0x7F800000)
constexpr int32_t kImageOfNegInf = static_cast<int32_t>(0x807FFFFFu);

DCE_FN int32_t order_image(float x) {
  if (is_nan(x)) return kImageOfNaN;
  const int32_t b = static_cast<int32_t>(bits(x));
  if (b == static_cast<int32_t>(0x80000000u)) return 0;  // -0 is +0
  return b >= 0 ? b : b ^ 0x7FFFFFFF;
}
DCE_FN float from_order_image(int32_t i) {
  return from_bits(static_cast<uint32_t>(i >= 0 ? i : i ^ 0x7FFFFFFF));
}

// A given maximum as row_max would have reported it.
DCE_FN float canonical_max(float row_max) { return from_order_image(order_image(row_max)); }
DCE_FN bool is_degenerate(float row_max) { return !is_finite(row_max); }

// What is subtracted from each logit before its term: 0, or the maximum where the reduction would lose accuracy.
DCE_FN float row_shift(float row_max) { return (bits(row_max) & 0x7FFFFFFFu) < 0x49800000u ? 0.0f : row_max; }

// ---- term (SPEC 3): e^x ~ P * 2^(n - 23)

constexpr float kLog2e = 0x1.715476p+0f;
constexpr float kMagic = 0x1.8p+23f;  // adding it rounds to an integer and leaves that integer in the low bits
constexpr uint32_t kMagicBits = 0x4B400000u;
constexpr float kLn2Hi = 0x1.62e430p-1f, kLn2Lo = -0x1.05c610p-29f;
constexpr float kC6 = 0x1.6a234ep-10f, kC5 = 0x1.123a6cp-7f, kC4 = 0x1.5558f4p-5f, kC3 = 0x1.55549p-3f, kC2 = 0x1.fffffcp-2f;
constexpr float kOffset = 1.5f;               // keeps t = e^r - 1 + 1.5 in [1, 2): one binade, ulp 2^-23
constexpr uint32_t kOffsetBits = 0x3F400000u; // P = bits(t) - kOffsetBits
constexpr float kLowestTerm = -0x1p+21f;      // a logit below has no term: always dropped

struct Term {
  float z;  // n - anchor + kMagic; bits(z) - kMagicBits = n - anchor
  float t;  // e^r + 0.5
};
// kMagic for exponents relative to `anchor`, |anchor| < 2^22 - 2^20. x log2(e) is never halfway between integers where a term is defined (the product's
// significand is odd), so n is the same for every anchor.
DCE_FN float magic(int32_t anchor) { return add32(kMagic, -static_cast<float>(anchor)); }
// Garbage, but no trap, outside [-2^21, 2^20]: callers select by z.
DCE_FN Term term(float x, float magic = kMagic) {
  Term out;
  out.z = fma32(x, kLog2e, magic);
  const float n = add32(out.z, -magic);
  float r = fma32(-n, kLn2Hi, x);
  r = fma32(-n, kLn2Lo, r);
  float q = fma32(kC6, r, kC5);
  q = fma32(q, r, kC4);
  q = fma32(q, r, kC3);
  q = fma32(q, r, kC2);
  q = fma32(q, r, 1.0f);
  out.t = fma32(q, r, kOffset);
  return out;
}
DCE_FN int32_t term_exponent(Term e) { return static_cast<int32_t>(bits(e.z) - kMagicBits); }     // n in (-2^22, 2^21)
DCE_FN uint32_t term_significand(Term e) { return bits(e.t) - kOffsetBits; }                      // P in (2^22, 2^24)
// P 2^-23 2^(n - anchor), of a term counted from `anchor`: the low bits of z are n - anchor, and those of kMagicBits are zero, so that shifted by 23 they move the exponent.
DCE_FN float term_ratio(Term e) { return from_bits(bits(add32(e.t, -0.5f)) + (bits(e.z) << 23)); }

// ---- fp64 functions of a row (SPEC 5)

constexpr double kLn2Hi64 = 0x1.62e42feep-1;  // 32 bits: k * kLn2Hi64 is exact for |k| < 2^21
constexpr double kLn2Lo64 = 0x1.a39ef35793c76p-33;

// d in [1, 2): a linear seed good to 1/17, squared four times.
DCE_FN double recip(double d) {
  double y = fma64(-0x1.e1e1e1e1e1e1ep-2, d, 0x1.6969696969697p+0);
  for (int i = 0; i < 4; ++i) {
    const double e = fma64(-d, y, 1.0);
    y = fma64(y, e, y);
  }
  return y;
}

// b positive and normal.
DCE_FN double div(double a, double b) {
  const int k = static_cast<int>(bits(b) >> 52) - 1023;
  const double d = mul64(b, pow2(-k));
  const double y = recip(d);
  double q = mul64(a, y);
  const double w = fma64(-q, d, a);
  q = fma64(w, y, q);
  return mul64(q, pow2(-k));
}

// e^r for |r| < 0.4, Taylor to r^13 / 13! (< 2^-51).
DCE_FN double exp_r(double r) {
  double p = 0x1.6124613a86d09p-33;
  p = fma64(p, r, 0x1.1eed8eff8d898p-29);
  p = fma64(p, r, 0x1.ae64567f544e4p-26);
  p = fma64(p, r, 0x1.27e4fb7789f5cp-22);
  p = fma64(p, r, 0x1.71de3a556c734p-19);
  p = fma64(p, r, 0x1.a01a01a01a01ap-16);
  p = fma64(p, r, 0x1.a01a01a01a01ap-13);
  p = fma64(p, r, 0x1.6c16c16c16c17p-10);
  p = fma64(p, r, 0x1.1111111111111p-7);
  p = fma64(p, r, 0x1.5555555555555p-5);
  p = fma64(p, r, 0x1.5555555555555p-3);
  p = fma64(p, r, 0.5);
  p = fma64(p, r, 1.0);
  return fma64(p, r, 1.0);
}

// e^(x - n ln 2) for the n of x's term, in fp64.
DCE_FN double exp_reduced(float x, int n) {
  const double k = static_cast<double>(n);
  double r = fma64(-k, kLn2Hi64, static_cast<double>(x));
  r = fma64(-k, kLn2Lo64, r);
  return exp_r(r);
}

// log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)): 2 atanh(f / (2 + f)).
DCE_FN double log_1p_f(double f) {
  const double s = div(f, add64(2.0, f));
  const double w = mul64(s, s);
  double p = 0x1.8618618618618p-4;
  p = fma64(p, w, 0x1.af286bca1af28p-4);
  p = fma64(p, w, 0x1.e1e1e1e1e1e1ep-4);
  p = fma64(p, w, 0x1.1111111111111p-3);
  p = fma64(p, w, 0x1.3b13b13b13b14p-3);
  p = fma64(p, w, 0x1.745d1745d1746p-3);
  p = fma64(p, w, 0x1.c71c71c71c71cp-3);
  p = fma64(p, w, 0x1.2492492492492p-2);
  p = fma64(p, w, 0x1.999999999999ap-2);
  p = fma64(p, w, 0x1.5555555555555p-1);
  p = mul64(p, w);
  return fma64(s, p, mul64(2.0, s));
}

// d = m * 2^k, m in [sqrt(1/2), sqrt(2)), for a positive normal d.
struct Split {
  double m;
  int k;
};
DCE_FN Split split(double d) {
  Split out;
  out.k = static_cast<int>(bits(d) >> 52) - 1023;
  out.m = mul64(d, pow2(-out.k));
  if (out.m >= 0x1.6a09e667f3bcdp+0) {
    out.m = mul64(out.m, 0.5);
    out.k += 1;
  }
  return out;
}

DCE_FN double log1p(double h) {
  const double w = add64(1.0, h);
  const Split p = split(w);
  const double f = p.k == 0 ? h : add64(p.m, -1.0);
  const double k = static_cast<double>(p.k);
  return fma64(k, kLn2Hi64, fma64(k, kLn2Lo64, log_1p_f(f)));
}

}  // namespace dce
