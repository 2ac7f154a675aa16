// The exact sum of a batch of fp32 losses, twelve int64 words, and its rounding: docs/SPEC.md sections 8 and 12.
#pragma once

#include "backend.h"
#include "digits.h"

namespace dce {

constexpr int kSumWords = 12;
constexpr int kBatchWords = 2 * kSumWords;  // of losses, then, for a weighted mean, of weights
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

// What a loss adds to word `word`, but for the count.
DCE_FN int64_t word_of_loss(float loss, int word) {
  if (!is_finite(loss)) {
    const bool plus = is_nan(loss) || loss > 0, minus = is_nan(loss) || loss < 0;
    return (word == kPlusInfWord && plus) || (word == kMinusInfWord && minus);
  }
  const LossTerm t = loss_term(loss);
  return (word == t.digit ? t.low : 0) + (word == t.digit + 1 ? t.high : 0);
}
// One counted loss into the words, but for the count.
DCE_FN void add_loss(float loss, int64_t* words) {
  for (int i = 0; i < kSumWords; ++i) words[i] += word_of_loss(loss, i);
}

// The exact sum as sign and magnitude.
constexpr int kLimbs = kSumDigits + 1;
struct Magnitude {
  uint32_t limb[kLimbs];  // 32 bits each; the top two are what is left of the carries, below 2^63
  bool negative;
  int length;  // bits; 0: the sum is 0
};
DCE_FN Magnitude magnitude(const int64_t* words) {
  Magnitude out;
  int64_t w[kSumDigits];
  out.negative = false;
  for (int pass = 0; pass < 2; ++pass) {
    for (int i = 0; i < kSumDigits; ++i) w[i] = pass ? wrapping_sub(0, w[i]) : words[i];
    for (int i = 0; i < kSumDigits - 1; ++i) {
      w[i + 1] = wrapping_add(w[i + 1], w[i] >> 32);
      w[i] &= 0xFFFFFFFF;
    }
    if (w[kSumDigits - 1] >= 0) break;
    out.negative = true;
  }
  for (int i = 0; i < kSumDigits; ++i) out.limb[i] = static_cast<uint32_t>(w[i]);
  out.limb[kSumDigits] = static_cast<uint32_t>(static_cast<uint64_t>(w[kSumDigits - 1]) >> 32);
  out.length = 0;
  for (int i = 0; i < kLimbs; ++i)
    if (out.limb[i]) out.length = 32 * i + 64 - leading_zeros(out.limb[i]);
  return out;
}

// A sum of weights that is an infinity or NaN.
DCE_FN bool not_finite(const int64_t* words) { return words[kPlusInfWord] > 0 || words[kMinusInfWord] > 0; }

// RN32(a / b) in magnitude, neither 0: 30 bits of the quotient, or down to 2^-151 where it is subnormal, by long division.
DCE_FN float quotient(const Magnitude& a, const Magnitude& b) {
  constexpr int kPlaces = 29, kWide = kLimbs + 2;  // quotient bits below the first; a and b at a common scale have at most 320 + 29 bits
  int k = a.length - b.length - 28;
  if (k < -151) k = -151;
  uint32_t rest[kWide], by[kWide];  // a 2^-min(k, 0), b 2^(max(k, 0) + 29): then the quotient of bit i is whether rest >= by 2^(i - 29)
  const auto shifted = [](const Magnitude& m, int shift, uint32_t* to) {
    for (int i = 0; i < kWide; ++i) {
      const int from = i - (shift >> 5);
      const uint64_t pair = (from >= 0 && from < kLimbs ? static_cast<uint64_t>(m.limb[from]) << 32 : 0) | (from >= 1 && from <= kLimbs ? m.limb[from - 1] : 0);
      to[i] = static_cast<uint32_t>(pair >> (32 - (shift & 31)));
    }
  };
  shifted(a, k < 0 ? -k : 0, rest);
  shifted(b, (k > 0 ? k : 0) + kPlaces, by);
  uint64_t q = 0;
  for (int bit = kPlaces; bit >= 0; --bit) {
    bool less = false;
    for (int i = 0; i < kWide; ++i) less = rest[i] != by[i] ? rest[i] < by[i] : less;
    q <<= 1;
    if (!less) {
      uint64_t borrow = 0;
      for (int i = 0; i < kWide; ++i) {
        const uint64_t d = static_cast<uint64_t>(rest[i]) - by[i] - borrow;
        rest[i] = static_cast<uint32_t>(d);
        borrow = d >> 63;
      }
      q |= 1;
    }
    for (int i = 0; i < kWide; ++i) by[i] = by[i] >> 1 | (i + 1 < kWide ? by[i + 1] << 31 : 0);
  }
  for (int i = 0; i < kWide; ++i) q |= static_cast<uint64_t>(rest[i] != 0);  // sticky
  return static_cast<float>(mul64(static_cast<double>(q), pow2(k)));
}

// RN64 of the sum of weights, +0 or normal; NaN if one is not finite.
DCE_FN double weight_sum(const int64_t* words) {
  if (not_finite(words)) return from_bits(uint64_t{0x7FF8000000000000});
  const Magnitude m = magnitude(words);
  if (m.length == 0) return 0.0;
  const int lowest = m.length > 64 ? m.length - 64 : 0;  // the leading 64 bits, all that is below as one sticky bit
  uint64_t top = 0;
  for (int i = 0; i < kLimbs; ++i) {
    const int at = 32 * i - lowest;
    if (at >= 0) {
      top |= at < 64 ? static_cast<uint64_t>(m.limb[i]) << at : 0;
    } else if (at > -32) {
      top |= m.limb[i] >> -at | static_cast<uint64_t>((m.limb[i] << (32 + at)) != 0);
    } else {
      top |= static_cast<uint64_t>(m.limb[i] != 0);
    }
  }
  const double sum = mul64(static_cast<double>(top), pow2(lowest - 149));
  return m.negative ? -sum : sum;
}

// RN32 of the exact sum, over the count if it is a mean, rounded once. Neither division nor an array indexed at run time: the fused kernel ends with it.
DCE_FN float round_over_count(const int64_t* words, bool mean) {
  const bool plus = words[kPlusInfWord] > 0, minus = words[kMinusInfWord] > 0;
  if (plus && minus) return from_bits(kNaN32);
  if (plus) return from_bits(kInf32);
  if (minus) return from_bits(kInf32 | 0x80000000u);
  if (mean && words[kCountWord] < 1) return from_bits(kNaN32);
  const uint64_t count = mean ? static_cast<uint64_t>(words[kCountWord]) : 1;
  const Magnitude sum = magnitude(words);
  if (sum.length == 0) return 0.0f;

  // A / count with at least 27 bits, or down to 2^-151 where the result is subnormal: floor((A >> k) / count) and a sticky bit
  const int count_length = 64 - leading_zeros(count);
  int k = sum.length - count_length - 28;
  if (k < -2) k = -2;
  uint128 a = 0;  // A * 2^-k, below 2^(count_length + 28) <= 2^92
  bool sticky = false;
  for (int i = kLimbs - 1; i >= 0; --i) {
    const int at = 32 * i - k;
    if (at >= 0) {
      if (sum.limb[i]) a |= static_cast<uint128>(sum.limb[i]) << at;
    } else if (at > -32) {
      a |= sum.limb[i] >> -at;
      sticky |= (sum.limb[i] << (32 + at)) != 0;
    } else {
      sticky |= sum.limb[i] != 0;
    }
  }
  uint64_t q = 0;  // below 2^31
  uint128 c = static_cast<uint128>(count) << 30;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (int i = 30; i >= 0; --i) {
    q <<= 1;
    if (a >= c) {
      a -= c;
      q |= 1;
    }
    c >>= 1;
  }
  q |= static_cast<uint64_t>(sticky || a != 0);
  const float r = static_cast<float>(mul64(static_cast<double>(q), pow2(k - 149)));
  return sum.negative && r != 0.0f ? -r : r;
}

// The same over the sum of weights.
DCE_FN float round_over_weights(const int64_t* words) {
  const bool plus = words[kPlusInfWord] > 0, minus = words[kMinusInfWord] > 0;
  if ((plus && minus) || not_finite(words + kSumWords)) return from_bits(kNaN32);
  const Magnitude a = magnitude(words), b = magnitude(words + kSumWords);
  const uint32_t sign = static_cast<uint32_t>((plus || minus ? minus : a.negative) != b.negative) << 31;
  if (plus || minus || (b.length == 0 && a.length != 0)) return from_bits(kInf32 | sign);
  if (b.length == 0) return from_bits(kNaN32);
  const float q = a.length == 0 ? 0.0f : quotient(a, b);
  return q == 0.0f ? 0.0f : from_bits(bits(q) | sign);
}

DCE_FN float round_sum(const int64_t* words, Divisor divisor) {
  return divisor == Divisor::kWeights ? round_over_weights(words) : round_over_count(words, divisor == Divisor::kCount);
}

}  // namespace dce
