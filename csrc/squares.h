// The exact sum of squares of a tensor, 21 int64 words, and its root: docs/SPEC.md section 15.
#pragma once

#include "digits.h"

namespace dce {

constexpr int kSquareWords = 21;
constexpr int kSquareDigits = 19;    // words 0..18: radix 2^32 in units of 2^-298; of one tensor: [0, 2^32), word 18 below 2^18
constexpr int kInfinitiesWord = 19;  // elements that are +-inf
constexpr int kNaNsWord = 20;

// A finite |x| as mant * 2^(pos - 149).
struct Significand {
  uint32_t mant;  // < 2^24
  int pos;        // 0..253
};
DCE_FN Significand significand(uint32_t magnitude_bits) {
  const int biased = static_cast<int>(magnitude_bits >> 23);
  const Significand out = {(magnitude_bits & 0x7FFFFF) | (biased ? 0x800000u : 0u), biased ? biased - 1 : 0};
  return out;
}

// v * 2^bit, 0 <= bit < 512, in radix 2^32: five parts; returns the word of the first.
constexpr int kParts = 5;
DCE_FN int square_parts(uint128 v, int bit, uint32_t (&part)[kParts]) {
  const int by = bit & 31;
  const uint128 low = v << by;
  for (int i = 0; i < kParts - 1; ++i) part[i] = static_cast<uint32_t>(low >> (32 * i));
  part[kParts - 1] = static_cast<uint32_t>(v >> 96 >> (32 - by));  // what `low` has lost at the top
  return bit >> 5;
}

// ---- windows: how a GPU adds

// 22 octaves: elements with pos in [low, low + 22) are X = high * 2^23 + low in units of 2^(low - 149), high < 2^22, and so is 0.
constexpr int kOctaves = 22;
struct Window {
  int low;                     // 0..232
  float magic_high, magic_low;  // 2^23 units of high, 1.5 * 2^23 of low: adding one rounds to such a unit. magic_high is infinite, and no element is quick, where low > 230
};
// The one that ends with a greatest element of position `top`, 0..253.
DCE_FN Window window_of(int top) {
  const int low = top < kOctaves ? 0 : top - (kOctaves - 1);
  const uint32_t high = static_cast<uint32_t>(low + 24 < 255 ? low + 24 : 255);
  const Window out = {low, from_bits(high << 23), from_bits(static_cast<uint32_t>(low + 1) << 23 | 0x400000)};
  return out;
}

// Of up to 2^17 elements, no sum wraps.
struct WindowSums {
  uint64_t high;   // of high^2 < 2^46
  uint64_t cross;  // of high * low, |.| < 2^46, as two's complement
  uint64_t low;    // of low^2 < 2^46
};
constexpr int kMostInWindow = 1 << 17;
// What they add up to in units of 2^(2 low - 298), < 2^110.
DCE_FN uint128 window_total(const WindowSums& s) {
  return (static_cast<uint128>(s.high) << 46) + (static_cast<uint128>(static_cast<__int128>(static_cast<int64_t>(s.cross))) << 24) + s.low;
}

DCE_FN bool in_window(Significand x, const Window& w) { return static_cast<unsigned>(x.pos - w.low) < kOctaves; }
// Of an element in the window.
DCE_FN void add_square(Significand x, const Window& w, WindowSums& sums) {
  const uint64_t fixed = static_cast<uint64_t>(x.mant) << (x.pos - w.low);  // < 2^45
  const uint32_t high = static_cast<uint32_t>(fixed >> 23), low = static_cast<uint32_t>(fixed) & 0x7FFFFF;
  sums.high += static_cast<uint64_t>(high) * high;
  sums.cross += static_cast<uint64_t>(high) * low;
  sums.low += static_cast<uint64_t>(low) * low;
}

// The same by a few floating-point additions, of any fp32: what did not fit is seen afterwards, over many elements, and then the sums are to be thrown away.
struct Quick {
  uint32_t high = 0, rest = 0;  // ORs of bits
};
// kWide: with the part `low`; else elements of few bits in the upper octaves of the window alone fit.
template <bool kWide>
DCE_FN void add_square_quick(float x, const Window& w, WindowSums& sums, Quick& seen) {
  const float magnitude = std::fabs(x);
  const float t = add32(magnitude, w.magic_high);
  const uint32_t high = bits(t) & 0x7FFFFF;  // if t is in the binade of magic_high
  float rest = add32(magnitude, -add32(t, -w.magic_high));  // exact, within half a unit of high
  sums.high += static_cast<uint64_t>(high) * high;
  if (kWide) {
    const float u = add32(rest, w.magic_low);
    const int32_t low = static_cast<int32_t>(bits(u) - bits(w.magic_low));  // |low| <= 2^22
    rest = add32(rest, -add32(u, -w.magic_low));
    sums.cross += static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(high)) * low);
    sums.low += static_cast<uint64_t>(static_cast<int64_t>(low) * low);
  }
  seen.high |= bits(t);  // an exponent above that of magic_high leaves a bit, for no greater number is a part of its bits
  seen.rest |= bits(rest);
}
DCE_FN bool all_fitted(const Quick& seen, const Window& w) { return seen.high >> 23 == bits(w.magic_high) >> 23 && seen.rest == 0; }

// ---- words

// Canonical form, of one tensor's words and of a sum of such.
DCE_FN void carry_squares(int64_t* words) {
  for (int i = 0; i < kSquareDigits - 1; ++i) {
    words[i + 1] = wrapping_add(words[i + 1], words[i] >> 32);
    words[i] &= 0xFFFFFFFF;
  }
}

// RN64 of the root of the sum, from integers alone.
DCE_FN double norm_of(const int64_t* words) {
  if (words[kNaNsWord] > 0) return from_bits(uint64_t{0x7FF8000000000000});
  if (words[kInfinitiesWord] > 0) return from_bits(uint64_t{0x7FF0000000000000});
  int64_t w[kSquareDigits];
  for (int i = 0; i < kSquareDigits; ++i) w[i] = words[i];
  carry_squares(w);
  if (w[kSquareDigits - 1] < 0) return from_bits(uint64_t{0x7FF8000000000000});  // no sum of squares
  uint64_t limb[kSquareDigits];  // 32 bits each, the top one 63
  int top = -1;                  // the highest pair of bits that is not 0
  for (int i = 0; i < kSquareDigits; ++i) {
    limb[i] = static_cast<uint64_t>(w[i]);
    if (limb[i]) top = 16 * i + (63 - leading_zeros(limb[i])) / 2;
  }
  if (top < 0) return 0.0;
  // digit by digit, 54 bits: one more than the result has
  constexpr int kRootBits = 54;
  uint64_t root = 0, rest = 0;  // rest <= 2 root
  for (int pair = top; pair > top - kRootBits; --pair) {
    const int i = pair < 16 * kSquareDigits ? pair >> 4 : kSquareDigits - 1;
    rest = rest << 2 | (pair < 0 ? 0 : limb[i] >> (2 * (pair - 16 * i)) & 3);
    root <<= 1;
    if (rest > 2 * root) {  // that is, rest >= 2 root + 1
      rest -= 2 * root + 1;
      root += 1;
    }
  }
  bool sticky = rest != 0;
  const int below = 2 * (top - kRootBits + 1);  // bits of the sum that were not looked at
  for (int i = 0; i < kSquareDigits && 32 * i < below; ++i)
    sticky |= (below - 32 * i < 64 ? limb[i] & ((uint64_t{1} << (below - 32 * i)) - 1) : limb[i]) != 0;
  const uint64_t rounded = (root >> 1) + (root & 1 & static_cast<uint64_t>(sticky || (root >> 1 & 1)));  // [2^52, 2^53]
  return mul64(static_cast<double>(rounded), pow2(top - kRootBits + 2 - 149));  // exact
}

}  // namespace dce
