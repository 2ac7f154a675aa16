// From a row's digits to its loss, denominator and what its gradient needs: docs/SPEC.md section 6. One row, one thread.
#pragma once

#include "digits.h"

namespace dce {

// Why a row is what it is; several may hold. A row with any flag but kIgnored has a NaN loss.
enum RowStatus : int32_t {
  kOk = 0,
  kIgnored = 1,        // target == ignore_index
  kBadTarget = 2,      // target outside [0, V)
  kDegenerate = 4,     // a NaN or +inf logit, or nothing but -inf
  kBadColumns = 8,     // shards hold more or fewer than V columns
  kBadCover = 16,      // a shard missing, doubled, misplaced, or computed for another maximum
  kAboveMaximum = 32,  // a NaN, or a logit above the given maximum
  kBadDigits = 64,     // no row has such digits
};

struct RowResult {
  float loss;
  float denom;
  double inv;  // 2^n_max / S, in (2^-32, 1.5)
  double tgt;  // -(S - T) / S, in [-1, -0]
  int32_t status;
};

// m * 2^k with m in [1, 2), or m = 0.
struct Scaled {
  double m;
  int k;
};
// The nearest fp64 to canonical digits: 64 leading bits, all that is below them as one sticky bit, one conversion.
DCE_FN Scaled leading(const int64_t* digits) {
  const uint64_t limb[4] = {
      static_cast<uint64_t>(digits[0]) | static_cast<uint64_t>(digits[1]) << 32,
      static_cast<uint64_t>(digits[2]) | static_cast<uint64_t>(digits[3]) << 32,
      static_cast<uint64_t>(digits[4]) | static_cast<uint64_t>(digits[5]) << 32,
      static_cast<uint64_t>(digits[5]) >> 32,
  };
  uint64_t top = limb[0], next = 0, rest = 0;
  int weight = 0;
  for (int i = 1; i < 4; ++i) {
    if (limb[i] == 0) continue;
    rest |= next;
    next = top;
    top = limb[i];
    if (weight != 64 * (i - 1)) {  // zero limbs were skipped: what lies lower is only sticky
      rest |= next;
      next = 0;
    }
    weight = 64 * i;
  }
  Scaled out = {0.0, 0};
  if (top == 0) return out;
  const int lz = leading_zeros(top);
  if (lz) {
    top = top << lz | next >> (64 - lz);
    next <<= lz;
  }
  top |= static_cast<uint64_t>((next | rest) != 0);
  const double v = static_cast<double>(top);  // in [2^63, 2^64]
  out.k = static_cast<int>(bits(v) >> 52) - 1023;
  out.m = mul64(v, pow2(-out.k));
  out.k += weight - lz;
  return out;
}

// words: the row's eight words summed over all shards. x_target is read only if the target is in [0, V) and not ignored.
DCE_FN RowResult finalize_row(const int64_t* words, float row_max, int64_t target, float x_target, int64_t columns, int64_t ignore_index) {
  const double nan64 = from_bits(uint64_t{0x7FF8000000000000});
  RowResult out = {from_bits(kNaN32), from_bits(kNaN32), nan64, nan64, kOk};
  if (target == ignore_index) {
    out = {0.0f, 0.0f, 0.0, 0.0, kIgnored};
    return out;
  }
  const bool has_target = target >= 0 && target < columns;
  if (!has_target) out.status |= kBadTarget;
  if (is_degenerate(row_max)) out.status |= kDegenerate;
  if (words[kColumnsWord] >> 32) {
    out.status |= kAboveMaximum;
  } else if (words[kColumnsWord] != columns) {
    out.status |= kBadColumns;
  }
  if (words[kTagWord] != shard_tag(row_max, 0, columns)) out.status |= kBadCover;
  if (out.status & ~kBadTarget) return out;

  const RowFrame frame = row_frame(row_max);
  int64_t sum[kDigits], diff[kDigits];
  for (int i = 0; i < kDigits; ++i) sum[i] = words[i];
  carry(sum);
  const Scaled s_raw = leading(sum);
  if (sum[kDigits - 1] < 0 || sum[kDigits - 1] >> 54 || s_raw.m == 0.0) {
    out.status |= kBadDigits;
    return out;
  }

  // D = S - T, exactly
  bool kept = false;
  int n_target = 0;
  for (int i = 0; i < kDigits; ++i) diff[i] = sum[i];
  const float x_shifted = add32(x_target, -frame.shift);
  if (has_target) {
    if (!(x_target <= row_max)) {
      out.status |= kBadDigits;
      return out;
    }
    if (x_shifted >= kLowestTerm) {
      const Term e = term(x_shifted);
      n_target = term_exponent(e);
      kept = n_target >= frame.base;
      if (kept) {
        int64_t own[kDigits] = {0, 0, 0, 0, 0, 0};
        add_shifted(own, term_significand(e), n_target - frame.base);
        for (int i = 0; i < kDigits; ++i) diff[i] -= own[i];
        carry(diff);
        if (diff[kDigits - 1] < 0) {
          out.status |= kBadDigits;
          return out;
        }
      }
    }
  }

  const int unit = frame.base - 23;
  const Scaled s = {s_raw.m, s_raw.k + unit};
  const double e_max = exp_reduced(add32(row_max, -frame.shift), frame.n_max);
  out.denom = static_cast<float>(mul64(div(s.m, e_max), pow2(s.k - frame.n_max)));
  if (!has_target) return out;

  Scaled d = leading(diff);
  if (d.m != 0.0) d.k += unit;
  if (kept) {
    const double h = mul64(div(d.m, exp_reduced(x_shifted, n_target)), d.m == 0.0 ? 1.0 : pow2(d.k - n_target));
    out.loss = static_cast<float>(log1p(h));
  } else {
    const Split p = split(s.m);
    const double k = static_cast<double>(p.k + s.k);
    const double x = add64(static_cast<double>(x_target), -static_cast<double>(frame.shift));
    const double low = fma64(k, kLn2Lo64, log_1p_f(add64(p.m, -1.0)));
    out.loss = static_cast<float>(add64(low, fma64(k, kLn2Hi64, -x)));
  }
  const double y = recip(s.m);
  out.inv = mul64(y, pow2(frame.n_max - s.k));
  out.tgt = -mul64(mul64(d.m, y), d.m == 0.0 ? 1.0 : pow2(d.k - s.k));
  return out;
}

// ---- gradient of a row (SPEC 7)

struct RowScale {
  float scale;   // of every column's a = P 2^-23 2^(n - n_max)
  float target;  // the gradient at the target itself
};
// grad: the row's upstream gradient; count: rows counted, for a mean, else 0.
DCE_FN RowScale row_scale(float grad, int64_t count, double inv, double tgt) {
  double g = static_cast<double>(grad);
  if (count > 0) g = div(g, static_cast<double>(count));
  const RowScale out = {static_cast<float>(mul64(g, inv)), static_cast<float>(mul64(g, tgt))};
  return out;
}

constexpr int kGradDepth = 125;  // octaves below n_max; a lower term's gradient is 0

}  // namespace dce
