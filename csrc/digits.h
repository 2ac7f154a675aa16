// The eight int64 words of a row: six digits of the exact sum and two check words (docs/SPEC.md section 4).
#pragma once

#include "logit.h"

namespace dce {

constexpr int kWords = 8;         // int64 words a row
constexpr int kDigits = 6;        // words 0..5: radix 2^32, word i weighs 2^(32 i) units of 2^(32 (B - 4) - 23)
constexpr int kColumnsWord = 6;   // columns + 2^32 * faults
constexpr int kTagWord = 7;       // G(M, hi) - G(M, lo)
constexpr int kBlocksBelow = 4;   // terms down to block B - 4 are kept
constexpr int64_t kOneFault = int64_t{1} << 32;

// Where a row's sum stands: all that the digits need to know of the row maximum.
struct RowFrame {
  float shift;    // c
  int32_t n_max;  // exponent of the maximum's term, |n_max| < 2^21
  int32_t base;   // 32 (B - 4): the exponent that word 0 starts at; a term is kept if n >= base
};
DCE_FN int32_t base_of(int32_t n_max) { return ((n_max >> 5) - kBlocksBelow) * 32; }
// For a row that is not degenerate.
DCE_FN RowFrame row_frame(float row_max) {
  RowFrame f;
  f.shift = row_shift(row_max);
  f.n_max = term_exponent(term(add32(row_max, -f.shift)));
  f.base = base_of(f.n_max);
  return f;
}

using uint128 = unsigned __int128;

// Adds v * 2^shift, 0 <= shift < 160, v < 2^(214 - shift): below 2^32 to each of words 0..4, what is left to word 5.
DCE_FN void add_shifted(int64_t* digits, uint128 v, int shift) {
  for (int word = 0; word < kDigits; ++word) {
    const int from = 32 * word - shift;  // the bit of v that this word starts at
    const uint128 part = from >= 128 ? 0 : from >= 0 ? v >> from : from > -32 ? v << -from : 0;
    digits[word] += word < kDigits - 1 ? static_cast<int64_t>(static_cast<uint32_t>(part)) : static_cast<int64_t>(part);
  }
}

// A sum of up to 2^14 terms, on its way to digits: `near` and `far` are sums of windows of 32 octaves, each below 2^69, far 32 octaves lower. In radix 2^32,
// near * 2^low if far is 0, with 0 <= low <= 130, else (near * 2^32 + far) * 2^low, with 0 <= low <= 98: below 2^(32 * 7).
constexpr int kWindowWords = 7;
DCE_FN void window_words(uint128 near, uint128 far, int low, uint32_t (&word)[kWindowWords]) {
  const uint128 sum = far != 0 ? (near << 32) + far : near;  // < 2^102
  const int bit = low & 31, words = low >> 5;
  const uint128 v = sum << bit;
  const uint32_t part[5] = {static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32), static_cast<uint32_t>(v >> 64), static_cast<uint32_t>(v >> 96),
                            static_cast<uint32_t>(static_cast<uint64_t>(sum >> 96) << bit >> 32)};  // what v has lost at the top
  for (int i = 0; i < kWindowWords; ++i) word[i] = i < 5 ? part[i] : 0;
  // by selections, for registers cannot be indexed
  for (int step = 4; step > 0; step /= 2) {
    if (words & step) {
      for (int i = kWindowWords - 1; i >= 0; --i) word[i] = i >= step ? word[i - step] : 0;
    }
  }
}

// Sums of words wrap as two's complement: no words, however wrong, are undefined behaviour.
DCE_FN int64_t wrapping_add(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b)); }
DCE_FN int64_t wrapping_sub(int64_t a, int64_t b) { return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b)); }

// Canonical form: words 0..4 in [0, 2^32). Arithmetic shifts, so negative words borrow.
DCE_FN void carry(int64_t* digits) {
  for (int i = 0; i < kDigits - 1; ++i) {
    digits[i + 1] = wrapping_add(digits[i + 1], digits[i] >> 32);
    digits[i] &= 0xFFFFFFFF;
  }
}

DCE_FN uint64_t mix64(uint64_t k) {
  k ^= k >> 30;
  k *= 0xBF58476D1CE4E5B9u;
  k ^= k >> 27;
  k *= 0x94D049BB133111EBu;
  k ^= k >> 31;
  return k;
}
// G(M, v) in [0, 2^40): v is a global column boundary, 0 <= v < 2^31. salt: of what else the shards must have in common; 0 for the digits of unmapped logits.
DCE_FN int64_t boundary_tag(float row_max, int64_t v, uint64_t salt) {
  return static_cast<int64_t>(mix64((static_cast<uint64_t>(bits(row_max)) << 32) + static_cast<uint64_t>(v) + salt) >> 24);
}
DCE_FN int64_t shard_tag(float row_max, int64_t lo, int64_t hi, uint64_t salt) {
  return boundary_tag(row_max, hi, salt) - boundary_tag(row_max, lo, salt);
}
DCE_FN uint64_t map_salt(const LogitMap& m) { return is_identity(m) ? 0 : mix64(static_cast<uint64_t>(bits(m.scale)) << 32 | bits(m.cap)); }

}  // namespace dce
