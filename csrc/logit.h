// What the softmax is of: the logit itself, or scaled, or under a cap (docs/SPEC.md section 12). One fixed function of one logit.
#pragma once

#include "arith.h"

namespace dce {

struct LogitMap {
  float scale;  // in [2^-60, 2^60]
  float cap;    // in [2^-60, 2^60]; 0: none
  // with a cap
  float doubled;      // 2 scale / cap
  float inverse_cap;  // 1 / cap
};
DCE_FN constexpr LogitMap no_map() { return {1.0f, 0.0f, 0.0f, 0.0f}; }
inline LogitMap make_map(double scale, double cap) {
  if (cap == 0.0) return {static_cast<float>(scale), 0.0f, 0.0f, 0.0f};
  return {static_cast<float>(scale), static_cast<float>(cap), static_cast<float>(2.0 * scale / cap), static_cast<float>(1.0 / cap)};
}
DCE_FN bool is_identity(const LogitMap& m) { return m.scale == 1.0f && m.cap == 0.0f; }

constexpr float kTanhEnd = 32.0f;  // tanh(16) rounds to 1
// 1 / d for d in [1, 2]: 1 - d y is -T3(2 d - 3) / 99 for the first y, squared twice.
constexpr float kRecip2 = static_cast<float>(32.0 / 99), kRecip1 = static_cast<float>(-144.0 / 99), kRecip0 = static_cast<float>(210.0 / 99);

// -tanh(w / 2) for w >= 0: in [-1, 0], by expm1(-w) / (expm1(-w) + 2), so that it is as accurate at 0 as elsewhere.
DCE_FN float minus_tanh_half(float w) {
  const float s = -(w < kTanhEnd ? w : kTanhEnd);
  const float z = fma32(s, kLog2e, kMagic);
  const float n = add32(z, -kMagic);  // in [-46, 0]
  float r = fma32(-n, kLn2Hi, s);
  r = fma32(-n, kLn2Lo, r);
  float q = fma32(kC6, r, kC5);
  q = fma32(q, r, kC4);
  q = fma32(q, r, kC3);
  q = fma32(q, r, kC2);
  q = fma32(q, r, 1.0f);
  const float power = from_bits((bits(z) << 23) + 0x3F800000u);  // 2^n: the low bits of kMagicBits are zero
  const float e = fma32(power, mul32(q, r), add32(power, -1.0f));
  const float d = add32(e, 2.0f);
  float y = fma32(fma32(kRecip2, d, kRecip1), d, kRecip0);
  for (int i = 0; i < 2; ++i) y = fma32(fma32(-d, y, 1.0f), y, y);
  const float t = mul32(e, y);
  return fma32(fma32(-t, d, e), y, t);
}

// Under a cap. May fall by a few units in the last place where x grows; never beyond the cap. Infinite and NaN stay what they are.
DCE_FN float capped(const LogitMap& m, float x) {
  const float w = from_bits(bits(mul32(x, m.doubled)) & 0x7FFFFFFFu);
  const float y = mul32(minus_tanh_half(w), m.cap);
  return is_finite(x) ? from_bits((bits(y) & 0x7FFFFFFFu) | (bits(x) & 0x80000000u)) : x;
}
DCE_FN float mapped(const LogitMap& m, float x) { return m.cap == 0.0f ? mul32(x, m.scale) : capped(m, x); }
DCE_FN bool is_degenerate(float row_max, const LogitMap& m) { return is_degenerate(row_max) || is_degenerate(mapped(m, row_max)); }
// d map / dx / scale, from y = mapped(x): in [0, 1].
DCE_FN float slope_at(const LogitMap& m, float y) {
  if (m.cap == 0.0f) return 1.0f;
  const float u = mul32(y, m.inverse_cap);
  const float d = fma32(-u, u, 1.0f);
  return d > 0.0f ? d : 0.0f;  // -inf: a masked column
}

}  // namespace dce
