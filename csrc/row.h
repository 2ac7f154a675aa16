// From a row's digits to its loss, denominator and what its gradient needs: docs/SPEC.md sections 6 and 12. One row, one thread.
#pragma once

#include "backend.h"
#include "sums.h"

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

// m * 2^k with m in [1, 2), or m = 0.
struct Scaled {
  double m;
  int k;
};
// The nearest fp64 to an integer of four 64-bit limbs: 64 leading bits, all that is below them as one sticky bit, one conversion.
DCE_FN Scaled leading(uint64_t l0, uint64_t l1, uint64_t l2, uint64_t l3) {
  uint64_t top = l3, next = l2, rest = l1 | l0;
  int weight = 192;
  if (top == 0) top = l2, next = l1, rest = l0, weight = 128;
  if (top == 0) top = l1, next = l0, rest = 0, weight = 64;
  if (top == 0) top = l0, next = 0, weight = 0;
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
// Of canonical digits.
DCE_FN Scaled leading(const int64_t* d) {
  const auto u = [](int64_t x) { return static_cast<uint64_t>(x); };
  return leading(u(d[0]) | u(d[1]) << 32, u(d[2]) | u(d[3]) << 32, u(d[4]) | u(d[5]) << 32, u(d[5]) >> 32);
}

// What a row's digits say, before any logarithm.
struct RowSums {
  RowFrame frame;
  Scaled s;       // S, the exact sum, and
  Scaled d;       // D = S - T, that without the target's own term; both rounded once
  bool kept;      // the target has a term that is kept; then
  int32_t n_target;   // its exponent
  uint32_t p_target;  // and significand
};
// digits: of a row that is not degenerate, summed over all shards. x_target is looked at if has_target. Returns kOk or kBadDigits.
DCE_FN int32_t row_sums(const int64_t* digits, float row_max, bool has_target, float x_target, RowSums& out) {
  out.frame = row_frame(row_max);
  out.kept = false;
  out.n_target = 0;
  out.p_target = 0;
  int64_t sum[kDigits];
  for (int i = 0; i < kDigits; ++i) sum[i] = digits[i];
  carry(sum);
  if (sum[kDigits - 1] < 0 || sum[kDigits - 1] >> 54) return kBadDigits;
  const int unit = out.frame.base - 23;
  out.s = leading(sum);
  if (out.s.m == 0.0) return kBadDigits;
  out.s.k += unit;
  if (has_target) {
    if (!(x_target <= row_max)) return kBadDigits;
    const float x = add32(x_target, -out.frame.shift);
    const Term e = term(x);
    out.n_target = term_exponent(e);
    out.p_target = term_significand(e);
    out.kept = x >= kLowestTerm && out.n_target >= out.frame.base;
    if (out.kept) {
      int64_t own[kDigits] = {0, 0, 0, 0, 0, 0};
      add_shifted(own, out.p_target, out.n_target - out.frame.base);
      for (int i = 0; i < kDigits; ++i) sum[i] = wrapping_sub(sum[i], own[i]);
      carry(sum);
      if (sum[kDigits - 1] < 0) return kBadDigits;
    }
  }
  out.d = leading(sum);
  if (out.d.m != 0.0) out.d.k += unit;
  return kOk;
}

struct RowState {
  double inv;  // 2^n_max / S, in (2^-32, 1.5)
  double tgt;  // -(S - T) / S, in [-1, -0]
};
DCE_FN RowState row_state(const RowSums& r) {
  const double y = recip(r.s.m);
  const RowState out = {mul64(y, pow2(r.frame.n_max - r.s.k)), -mul64(mul64(r.d.m, y), r.d.m == 0.0 ? 1.0 : pow2(r.d.k - r.s.k))};
  return out;
}

// log S plus something, both relative to the row's shift.
DCE_FN double log_sum(const RowSums& r, double plus) {
  const Split p = split(r.s.m);
  const double k = static_cast<double>(p.k + r.s.k);
  const double low = fma64(k, kLn2Lo64, log_1p_f(add64(p.m, -1.0)));
  return add64(low, fma64(k, kLn2Hi64, plus));
}
// log(S / e^x): by log1p of (S - T) / e^x while the target's term is in the sum, so that nothing cancels.
DCE_FN double row_loss(const RowSums& r, float x_target) {
  if (r.kept) {
    const double e = exp_reduced(add32(x_target, -r.frame.shift), r.n_target);
    const double h = mul64(div(r.d.m, e), r.d.m == 0.0 ? 1.0 : pow2(r.d.k - r.n_target));
    return log1p(h);
  }
  return log_sum(r, -add64(static_cast<double>(x_target), -static_cast<double>(r.frame.shift)));
}

DCE_FN float row_denom(const RowSums& r, float row_max) {
  const double e = exp_reduced(add32(row_max, -r.frame.shift), r.frame.n_max);
  return static_cast<float>(mul64(div(r.s.m, e), pow2(r.s.k - r.frame.n_max)));
}

// ---- options (SPEC 12)

DCE_FN double row_lse(const RowSums& r) { return log_sum(r, static_cast<double>(r.frame.shift)); }
// T / S
DCE_FN double target_share(const RowSums& r) { return r.kept ? mul64(mul64(static_cast<double>(r.p_target), recip(r.s.m)), pow2(r.n_target - 23 - r.s.k)) : 0.0; }
DCE_FN double z_of(const RowOptions& options, double lse) { return mul64(mul64(options.z_loss, lse), lse); }
DCE_FN float weight_of(const Weights& w, int64_t target) {
  if (w.data == nullptr) return 1.0f;
  return target >= 0 && target < w.size ? w.data[target] : from_bits(kNaN32);
}
// inv', tgt'
DCE_FN RowState scaled_state(const RowOptions& options, const RowState& state, double weight, double lse, double share) {
  const double tgt = mul64(weight, state.tgt);
  if (options.z_loss == 0.0) return {mul64(state.inv, weight), tgt};
  const double slope = mul64(2.0, options.z_loss);
  return {mul64(state.inv, fma64(slope, lse, weight)), fma64(mul64(slope, lse), share, tgt)};
}
// Of a row that has a target.
DCE_FN RowState state_with(const RowOptions& options, const RowSums& r, int64_t target) {
  const RowState state = row_state(r);
  return options.on ? scaled_state(options, state, static_cast<double>(weight_of(options.weights, target)), row_lse(r), target_share(r)) : state;
}
DCE_FN float canonical(double x) {
  const float y = static_cast<float>(x);
  return is_nan(y) ? from_bits(kNaN32) : y;
}

struct RowResult {
  float loss;
  float denom;
  RowState state;
  int32_t status;
  // with options
  float lse, z_loss;
  RowState plain;  // inv, and p in place of tgt: the state of the lse
};
// The vocabulary's columns as summed words tell them: whether they lie side by side from 0 is for the tag to say.
DCE_FN int64_t columns_of(const int64_t* words) { return words[kColumnsWord] & 0xFFFFFFFF; }

// words: the row's eight words summed over all shards. x_target is read only if the target is in [0, V) and not ignored.
DCE_FN RowResult finalize_row(const int64_t* words, float row_max, int64_t target, float x_target, int64_t columns, int64_t ignore_index, const RowOptions& options) {
  const double nan64 = from_bits(uint64_t{0x7FF8000000000000});
  const float nan32 = from_bits(kNaN32);
  RowResult out = {nan32, nan32, {nan64, nan64}, kOk, nan32, nan32, {nan64, nan64}};
  if (target == ignore_index) {
    out = {0.0f, 0.0f, {0.0, 0.0}, kIgnored, 0.0f, 0.0f, {0.0, 0.0}};
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

  // no row sums to less than its maximum's own term: the given maximum is above every logit
  const RowFrame frame = row_frame(row_max);
  int64_t rest[kDigits], own[kDigits] = {0, 0, 0, 0, 0, 0};
  add_shifted(own, term_significand(term(add32(row_max, -frame.shift))), frame.n_max - frame.base);
  for (int i = 0; i < kDigits; ++i) rest[i] = wrapping_sub(words[i], own[i]);
  carry(rest);
  if (rest[kDigits - 1] < 0) out.status |= kBadDigits;

  RowSums sums;
  out.status |= row_sums(words, row_max, has_target, x_target, sums);
  if (out.status & kBadDigits) return out;
  out.denom = row_denom(sums, row_max);
  const double lse = options.on ? row_lse(sums) : 0.0, z = options.on ? z_of(options, lse) : 0.0;
  out.lse = static_cast<float>(lse);
  out.z_loss = static_cast<float>(z);
  if (!has_target) return out;
  const double loss = row_loss(sums, x_target);
  out.state = row_state(sums);
  if (!options.on) {
    out.loss = static_cast<float>(loss);
    return out;
  }
  const double weight = static_cast<double>(weight_of(options.weights, target)), weighted = mul64(weight, loss);
  out.loss = canonical(options.z_loss != 0.0 ? add64(weighted, z) : weighted);
  out.plain = {out.state.inv, target_share(sums)};
  out.state = scaled_state(options, out.state, weight, lse, out.plain.tgt);
  return out;
}

DCE_FN void write_row(const RowOutputs& out, int64_t row, const RowResult& r) {
  out.loss[row] = r.loss;
  out.denom[row] = r.denom;
  out.status[row] = r.status;
  const bool on = out.lse != nullptr;
  double* const state = out.state + (on ? 4 : 2) * row;
  state[0] = r.state.inv;
  state[1] = r.state.tgt;
  if (!on) return;
  state[2] = r.plain.inv;
  state[3] = r.plain.tgt;
  out.lse[row] = r.lse;
  out.z_loss[row] = r.z_loss;
}

// ---- targets

DCE_FN int64_t target_at(const Targets& t, int64_t row) {
  return t.is_int64 ? static_cast<const int64_t*>(t.data)[row] : static_cast<const int32_t*>(t.data)[row];
}
DCE_FN bool is_ignored(const Targets& t, int64_t row) { return t.data != nullptr && target_at(t, row) == t.ignore_index; }

// ---- gradient of a row (SPEC 7)

struct RowScale {
  float scale;   // of every column's a = P 2^-23 2^(n - n_max)
  float target;  // the gradient at the target itself
};
// 1 for every row.
DCE_FN Upstream upstream_one(const int64_t* sums, Divisor divisor) { return {nullptr, 0, divisor == Divisor::kOne ? nullptr : sums, divisor, nullptr, 0}; }
// grad: the row's upstream gradient; count: for a mean, points to the number of rows counted, else null.
DCE_FN double upstream(float grad, const int64_t* count) {
  const double g = static_cast<double>(grad);
  if (count == nullptr) return g;
  return *count > 0 ? div(g, static_cast<double>(*count)) : from_bits(uint64_t{0x7FF8000000000000});
}
DCE_FN float grad_of(const Upstream& u, int64_t row) { return u.grad != nullptr ? u.grad[row * u.stride] : 1.0f; }
// The upstream gradient of a row, where no mean divides by weights.
DCE_FN double plain_upstream_of(const Upstream& u, int64_t row) { return upstream(grad_of(u, row), u.sums != nullptr ? u.sums + kCountWord : nullptr); }
DCE_FN double upstream_of(const Upstream& u, int64_t row) {
  if (u.divisor != Divisor::kWeights) return plain_upstream_of(u, row);
  const double g = static_cast<double>(grad_of(u, row)), w = weight_sum(u.sums + kSumWords);
  return w > 0.0 ? div(g, w) : w < 0.0 ? div(-g, -w) : from_bits(uint64_t{0x7FF8000000000000});
}
DCE_FN RowState state_of(const RowStates& states, int64_t row) { return {states.data[states.width * row], states.data[states.width * row + 1]}; }
DCE_FN RowScale row_scale(double upstream, const RowState& state) {
  const RowScale out = {static_cast<float>(mul64(upstream, state.inv)), static_cast<float>(mul64(upstream, state.tgt))};
  return out;
}
DCE_FN RowScale row_scale_of(const Upstream& u, const RowStates& states, int64_t row) {
  const double g = upstream_of(u, row);
  const RowState state = state_of(states, row);
  if (u.lse == nullptr) return row_scale(g, state);
  const double l = static_cast<double>(u.lse[row * u.lse_stride]);
  const double* const lse_state = states.data + states.width * row + 2;
  return {static_cast<float>(fma64(l, lse_state[0], mul64(g, state.inv))), static_cast<float>(fma64(l, lse_state[1], mul64(g, state.tgt)))};
}

constexpr int kGradDepth = 125;  // octaves below n_max; a lower term's gradient is 0

}  // namespace dce
