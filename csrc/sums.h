// The exact sum of a batch of fp32 losses, twelve int64 words, and its rounding: docs/SPEC.md section 8.
#pragma once

#include "digits.h"

namespace dce {

constexpr int kSumWords = 12;
constexpr int kSumDigits = 9;      // words 0..8: radix 2^32 in units of 2^-149, not carried; |word| < N (2^32 + 2^23)
constexpr int kCountWord = 9;      // rows counted
constexpr int kPlusInfWord = 10;   // of these, losses that are +inf or NaN
constexpr int kMinusInfWord = 11;  // of these, losses that are -inf or NaN

// A finite fp32 as low * 2^(32 digit) + high * 2^(32 (digit + 1)), in units of 2^-149.
struct LossTerm {
  int32_t digit;  // 0..7
  int64_t low;    // |low| < 2^32
  int32_t high;   // |high| < 2^23
};
DCE_FN LossTerm loss_term(float loss) {
  const uint32_t b = bits(loss);
  const int biased = static_cast<int>(b >> 23 & 0xFF);
  const uint64_t mant = (b & 0x7FFFFF) | (biased ? 0x800000u : 0u);
  const int pos = biased ? biased - 1 : 0;  // 0..253
  const uint64_t y = mant << (pos & 31);    // < 2^55
  const int sign = b >> 31 ? -1 : 1;
  const LossTerm out = {pos >> 5, sign * static_cast<int64_t>(y & 0xFFFFFFFFu), sign * static_cast<int32_t>(y >> 32)};
  return out;
}

// One counted loss into the words, but for the count.
DCE_FN void add_loss(float loss, int64_t* words) {
  if (!is_finite(loss)) {
    words[kPlusInfWord] += is_nan(loss) || loss > 0;
    words[kMinusInfWord] += is_nan(loss) || loss < 0;
    return;
  }
  const LossTerm t = loss_term(loss);
  words[t.digit] += t.low;
  words[t.digit + 1] += t.high;
}

// RN32 of the exact sum over `count` (1 for a plain sum), rounded once.
DCE_FN float round_sum(const int64_t* words, bool mean) {
  const bool plus = words[kPlusInfWord] > 0, minus = words[kMinusInfWord] > 0;
  if (plus && minus) return from_bits(kNaN32);
  if (plus) return from_bits(kInf32);
  if (minus) return from_bits(kInf32 | 0x80000000u);
  if (mean && words[kCountWord] < 1) return from_bits(kNaN32);
  const uint64_t count = mean ? static_cast<uint64_t>(words[kCountWord]) : 1;

  // sign and magnitude, 32 bits a limb; word 8 takes what is left of the carries, |word 8| < 2^63
  int64_t w[kSumDigits];
  bool negative = false;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < kSumDigits; ++i) w[i] = pass ? wrapping_sub(0, w[i]) : words[i];
    for (int i = 0; i < kSumDigits - 1; ++i) {
      w[i + 1] = wrapping_add(w[i + 1], w[i] >> 32);
      w[i] &= 0xFFFFFFFF;
    }
    if (w[kSumDigits - 1] >= 0) break;
    negative = true;
  }
  constexpr int kLimbs = kSumDigits + 1;
  uint32_t limb[kLimbs];
  for (int i = 0; i < kSumDigits; ++i) limb[i] = static_cast<uint32_t>(w[i]);
  limb[kSumDigits] = static_cast<uint32_t>(static_cast<uint64_t>(w[kSumDigits - 1]) >> 32);
  int length = 0;  // bits
  for (int i = 0; i < kLimbs; ++i)
    if (limb[i]) length = 32 * i + 64 - leading_zeros(limb[i]);
  if (length == 0) return 0.0f;

  // A / count with at least 27 bits, or down to 2^-151 where the result is subnormal: floor((A >> k) / count) and a sticky bit
  const int count_length = 64 - leading_zeros(count);
  int k = length - count_length - 28;
  if (k < -2) k = -2;
  uint128 a = 0;  // A * 2^-k, below 2^(count_length + 28) <= 2^92
  bool sticky = false;
  for (int i = kLimbs - 1; i >= 0; --i) {
    const int at = 32 * i - k;
    if (at >= 0) {
      if (limb[i]) a |= static_cast<uint128>(limb[i]) << at;
    } else if (at > -32) {
      a |= limb[i] >> -at;
      sticky |= (limb[i] << (32 + at)) != 0;
    } else {
      sticky |= limb[i] != 0;
    }
  }
  uint64_t q = 0;
  for (int i = 30; i >= 0; --i) {
    const uint128 c = static_cast<uint128>(count) << i;
    if (a >= c) {
      a -= c;
      q |= uint64_t{1} << i;
    }
  }
  q |= static_cast<uint64_t>(sticky || a != 0);
  const float r = static_cast<float>(mul64(static_cast<double>(q), pow2(k - 149)));
  return negative && r != 0.0f ? -r : r;
}

}  // namespace dce
