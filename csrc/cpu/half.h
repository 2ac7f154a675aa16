// bf16 and fp16 as fp32 and back, to nearest even, one value at a time: the meaning that the vector paths reproduce.
#pragma once

#include "../arith.h"

namespace dce {

struct Bf16 { uint16_t bits; };
struct Fp16 { uint16_t bits; };

DCE_FN float widen(float x) { return x; }
DCE_FN float widen(Bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
DCE_FN float widen(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 0x1F, fraction = x.bits & 0x3FF;
  if (exponent == 0) {  // zero or subnormal: an exact multiple of 2^-24
    const float magnitude = static_cast<float>(static_cast<int>(fraction)) * 0x1p-24f;
    return from_bits(bits(magnitude) | sign);
  }
  const uint32_t e = exponent == 31 ? 255 : exponent + 112;
  return from_bits(sign | e << 23 | fraction << 13);
}

DCE_FN void narrow(float x, float& out) { out = x; }
DCE_FN void narrow(float x, Bf16& out) {
  const uint32_t b = bits(x);
  out.bits = is_nan(x) ? 0x7FC0 : static_cast<uint16_t>((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
DCE_FN void narrow(float x, Fp16& out) {
  const uint32_t b = bits(x), magnitude = b & 0x7FFFFFFF;
  const uint16_t sign = static_cast<uint16_t>(b >> 16 & 0x8000);
  if (magnitude > kInf32) {
    out.bits = 0x7E00;
  } else if (magnitude >= 0x47800000) {  // 2^16 and above
    out.bits = sign | 0x7C00;
  } else if (magnitude < 0x38800000) {  // below 2^-14: adding 1/2 leaves the multiple of 2^-24 in the low bits, rounded
    out.bits = sign | static_cast<uint16_t>(bits(from_bits(magnitude) + 0.5f) - 0x3F000000);
  } else {
    out.bits = sign | static_cast<uint16_t>((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
  }
}

}  // namespace dce
