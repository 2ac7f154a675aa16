// Words that add over columns beside a row's digits: the sum of its logits, for label smoothing (docs/SPEC.md section 12), and its statistics (section 13).
#pragma once

#include "digits.h"
#include "logit.h"

namespace dce {

// A sum of numbers in (-1, 1), each rounded once to a multiple of 2^-43, ties to even. Up to 512 of them: both halves stay in an int32.
constexpr int kFixedTerms = 512;
constexpr int kFixedBits = 43, kFixedHigh = 21;
struct FixedSum {
  uint32_t high = 0;  // int32, units of 2^-21: each number's nearest, at most 2^21
  uint32_t low = 0;   // int32, units of 2^-43: what is left of each, at most 2^21
};
DCE_FN constexpr float power_of_two(int k) {
  float p = 1.0f;
  for (; k > 0; --k) p *= 2.0f;
  for (; k < 0; ++k) p *= 0.5f;
  return p;
}
// Adds x * 2^-k. to_high, from_high, to_low: 2^(21 - k), 2^(k - 21), 2^(43 - k).
DCE_FN void add_fixed(FixedSum& sum, float x, float to_high, float from_high, float to_low) {
  const float z = fma32(x, to_high, kMagic);
  const float rest = fma32(add32(z, -kMagic), -from_high, x);  // exact
  sum.high += bits(z) - kMagicBits;
  sum.low += bits(fma32(rest, to_low, kMagic)) - kMagicBits;
}
template <int k>
DCE_FN void add_fixed(FixedSum& sum, float x) {
  constexpr float kToHigh = power_of_two(kFixedHigh - k), kFromHigh = power_of_two(k - kFixedHigh), kToLow = power_of_two(kFixedBits - k);
  add_fixed(sum, x, kToHigh, kFromHigh, kToLow);
}
// In units of 2^-43.
DCE_FN int64_t total(const FixedSum& s) {
  return static_cast<int64_t>(static_cast<int32_t>(s.high)) * (int64_t{1} << (kFixedBits - kFixedHigh)) + static_cast<int32_t>(s.low);
}

// ---- sum of logits: Z = sum of word_i * 2^(48 i), each summand rounded to a multiple of 2^-31

constexpr int kLogitWords = 4;       // int64 words a row
constexpr int kLogitRadix = 48;      // words 0..2 of one shard: [0, 2^48)
constexpr int kLogitShift = 12;      // FixedSum holds p 2^-12: units of 2^-43 there are 2^-31 of p
constexpr float kLogitLimit = 4096;  // |p| below: by FixedSum
constexpr int64_t kInfiniteLogit = int64_t{1} << 47;  // in word 3, beside the rest of Z, whose magnitude is at most 2^46

// z, a sum in units of 2^-31 with |z| < 2^63, as what it adds to words 0 and 1.
DCE_FN int64_t low_word(int64_t z) { return z & ((int64_t{1} << kLogitRadix) - 1); }
DCE_FN int64_t high_word(int64_t z) { return z >> kLogitRadix; }  // floor
// A finite p that FixedSum does not take, at least 2^12, as what it adds to words `at` and `at` + 1: 2^14 of them at most before a carry.
struct WideLogit {
  int at;         // 0..2
  int64_t low;    // |low| < 2^48
  int64_t high;   // |high| < 2^24
};
DCE_FN WideLogit wide_logit(float p) {
  const uint32_t b = bits(p);
  const int shift = static_cast<int>(b >> 23 & 0xFF) - (127 + 23 - 31);  // 20..135: of the significand
  const uint128 v = static_cast<uint128>((b & 0x7FFFFFu) | 0x800000u) << (shift % kLogitRadix);  // < 2^72
  const int64_t low = static_cast<int64_t>(v) & ((int64_t{1} << kLogitRadix) - 1), high = static_cast<int64_t>(v >> kLogitRadix);
  return b >> 31 ? WideLogit{shift / kLogitRadix, -low, -high} : WideLogit{shift / kLogitRadix, low, high};
}
// p of a column where there are weights: how far its logit lies from the row's maximum, times its class's weight. So no common offset of the logits is in the product.
DCE_FN float weighted_logit(float x, float max, float weight) { return weight == 0.0f ? 0.0f : mul32(add32(x, -max), weight); }
// One shard's words from sums of words of its pieces, fewer than 2^15, in each of which infinite p count once.
DCE_FN void carry_logit_words(int64_t* words) {
  for (int i = 0; i < kLogitWords - 1; ++i) {
    words[i + 1] = wrapping_add(words[i + 1], words[i] >> kLogitRadix);
    words[i] = low_word(words[i]);
  }
}
DCE_FN int64_t infinite_of(int64_t top) { return wrapping_add(top, kInfiniteLogit / 2) >> 47; }
DCE_FN void canonical_logit_words(int64_t* words) {
  carry_logit_words(words);
  int64_t& top = words[kLogitWords - 1];
  const int64_t infinite = infinite_of(top);
  if (infinite > 1) top -= (infinite - 1) * kInfiniteLogit;
}

// ---- statistics: E = word_0 + 2^40 (word_1 mod 2^40), in units of 2^-43

constexpr int kStatWords = 2;   // int64 words a row
constexpr int kStatRadix = 40;  // word 0 of one shard: [0, 2^40)
constexpr int64_t kBefore = int64_t{1} << 40;  // in word 1, beside the rest of E, which is below 2^34: the greatest logit stands before the target
DCE_FN int64_t stat_low(int64_t e) { return e & ((int64_t{1} << kStatRadix) - 1); }
DCE_FN int64_t stat_high(int64_t e) { return e >> kStatRadix; }
DCE_FN void carry_stat_words(int64_t* words) {
  words[1] = wrapping_add(words[1], words[0] >> kStatRadix);
  words[0] = stat_low(words[0]);
}
// How many pieces have it; rounded to nearest, so that the rest may be as low as -2^39.
DCE_FN int64_t before_of(int64_t word) { return wrapping_add(word, kBefore / 2) >> 40; }
DCE_FN void canonical_stat_words(int64_t* words) {
  carry_stat_words(words);
  const int64_t before = before_of(words[1]);
  if (before > 1) words[1] -= (before - 1) * kBefore;
}

// The least logit of a row as an unsigned number that grows as it falls; 0 is that of none.
DCE_FN uint32_t image_of_least(float least) { return is_finite(least) ? 0x7FFFFFFFu - static_cast<uint32_t>(order_image(least)) : 0; }
DCE_FN float least_of(uint32_t image) { return image == 0 ? from_bits(kInf32) : from_order_image(static_cast<int32_t>(0x7FFFFFFFu - image)); }

}  // namespace dce
