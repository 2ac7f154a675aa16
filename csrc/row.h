// From a row's digits to its loss, denominator and what its gradient needs: docs/SPEC.md sections 6 and 12. One row, one thread.
#pragma once

#include "backend.h"
#include "sums.h"
#include "words.h"

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
// digits: of a row that is not degenerate, summed over all shards; row_max, x_target: as mapped. x_target is looked at if has_target. Returns kOk or kBadDigits.
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

// That of a target whose logit is the maximum (as mapped), of digits that are those of a row: log of the sum of e^(x - max), with nothing lost where it is small.
DCE_FN double max_loss(const int64_t* digits, float max) {
  RowSums sums;
  row_sums(digits, max, true, max, sums);
  return row_loss(sums, max);
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
// W: the sum of the weights of all classes.
DCE_FN double class_weight(const RowOptions& o, int64_t columns) { return o.weight_words != nullptr ? weight_sum(o.weight_words) : static_cast<double>(columns); }

// RN64 of a signed integer of three 64-bit limbs, two's complement.
DCE_FN double rounded(uint64_t l0, uint64_t l1, uint64_t l2) {
  const bool negative = l2 >> 63;
  if (negative) {
    l0 = ~l0 + 1, l1 = ~l1 + (l0 == 0), l2 = ~l2 + (l0 == 0 && l1 == 0);
  }
  const Scaled s = leading(l0, l1, l2, 0);
  const double v = mul64(s.m, pow2(s.k));
  return negative ? -v : v;
}
// The mean over all classes of a row's losses. words: its sum of logits over all shards; loss, x_target: of the target, shifted; loss_of_max: that of a target whose logit is the maximum,
// looked at where there are weights.
DCE_FN double mean_loss(const RowOptions& o, const RowSums& r, const int64_t* words, double loss, float x_target, double loss_of_max, int64_t columns) {
  int64_t w[kLogitWords];
  for (int i = 0; i < kLogitWords; ++i) w[i] = words[i];
  carry_logit_words(w);
  const int64_t infinite = infinite_of(w[3]);
  const double all = class_weight(o, columns);
  if (is_nan(static_cast<float>(all))) return from_bits(uint64_t{0x7FF8000000000000});
  if (infinite > 0) return static_cast<double>(from_bits(kInf32));
  const uint64_t w0 = static_cast<uint64_t>(w[0]), w1 = static_cast<uint64_t>(w[1]), w2 = static_cast<uint64_t>(w[2]), w3 = static_cast<uint64_t>(w[3]);
  const double b = mul64(rounded(w0 | w1 << 48, w1 >> 16 | w2 << 32, w2 >> 32 | w3 << 16), 0x1p-31);
  // by the target's loss, which is good to its last bit where it is small, but not where it is so large that all would cancel
  const double sum = o.weight_words != nullptr ? fma64(all, loss_of_max, -b) : r.kept ? fma64(all, loss, fma64(all, static_cast<double>(x_target), -b)) : fma64(all, log_sum(r, 0.0), -b);
  return div(sum, static_cast<double>(columns));
}

// As the logits' own, where they are mapped; tgt: of the target's logit, y_target.
DCE_FN RowState through_map(const LogitMap& map, const RowState& s, float y_target) {
  if (is_identity(map)) return s;
  const double scale = static_cast<double>(map.scale);
  return {mul64(s.inv, scale), mul64(s.tgt, mul64(scale, static_cast<double>(slope_at(map, y_target))))};
}
// inv', tgt'
DCE_FN RowState scaled_state(const RowOptions& o, const RowState& state, double weight, double lse, double share, float y_target, int64_t columns) {
  double factor = weight, tgt = mul64(weight, state.tgt);
  if (o.smoothing != 0.0) {
    const double keep = add64(1.0, -o.smoothing), size = static_cast<double>(columns), mean = o.weight_words != nullptr ? div(weight_sum(o.weight_words), size) : 1.0;
    factor = fma64(keep, weight, mul64(o.smoothing, mean));
    tgt = fma64(o.smoothing, fma64(mean, share, -div(weight, size)), mul64(keep, tgt));
  }
  if (o.z_loss != 0.0) {
    const double slope = mul64(2.0, o.z_loss);
    factor = fma64(slope, lse, factor);
    tgt = fma64(mul64(slope, lse), share, tgt);
  }
  return through_map(o.map, {mul64(state.inv, factor), tgt}, y_target);
}
// Of a row that has a target. y_target: its logit as mapped.
DCE_FN RowState state_with(const RowOptions& options, const RowSums& r, int64_t target, float y_target, int64_t columns) {
  const RowState state = row_state(r);
  return options.on ? scaled_state(options, state, static_cast<double>(weight_of(options.weights, target)), row_lse(r), target_share(r), y_target, columns) : state;
}
// What a column's gradient has besides, with smoothing and for an upstream gradient of 1.
DCE_FN double constant_of(const RowOptions& o, int64_t columns) {
  return mul64(-div(o.smoothing, static_cast<double>(columns)), static_cast<double>(o.map.scale));
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
  RowState plain;   // inv, and p in place of tgt: the state of the lse
  double constant;  // with smoothing
  double inv;       // as it was before the map
};
// The vocabulary's columns as summed words tell them: whether they lie side by side from 0 is for the tag to say.
DCE_FN int64_t columns_of(const int64_t* words) { return words[kColumnsWord] & 0xFFFFFFFF; }

DCE_FN RowResult nan_row(int32_t status) {
  const double nan64 = from_bits(uint64_t{0x7FF8000000000000});
  const float nan32 = from_bits(kNaN32);
  return {nan32, nan32, {nan64, nan64}, status, nan32, nan32, {nan64, nan64}, nan64, nan64};
}
constexpr RowResult kIgnoredRow = {0.0f, 0.0f, {0.0, 0.0}, kIgnored, 0.0f, 0.0f, {0.0, 0.0}, 0.0, 0.0};

// What the sums of a row say, whose words are known to be those of its columns, all of them. max, y_target: the row's maximum and its target's logit, as mapped; logit_words: with
// smoothing, its four; loss_of_max: with smoothing and weights. has_target: the target is a column, and else kBadTarget is in status, which is that of the result.
DCE_FN RowResult result_of(const RowSums& sums, double loss_of_max, const int64_t* logit_words, float max, bool has_target, int64_t target, float y_target, int64_t columns,
                           const RowOptions& options, int32_t status) {
  RowResult out = nan_row(status);
  out.denom = row_denom(sums, max);
  const double lse = options.on ? row_lse(sums) : 0.0, z = options.on ? z_of(options, lse) : 0.0;
  out.lse = static_cast<float>(lse);
  out.z_loss = static_cast<float>(z);
  const RowState state = row_state(sums);
  out.inv = state.inv;
  if (!has_target) return out;
  const double loss = row_loss(sums, y_target);
  out.state = state;
  if (!options.on) {
    out.loss = static_cast<float>(loss);
    return out;
  }
  const double weight = static_cast<double>(weight_of(options.weights, target));
  double weighted = mul64(weight, loss);
  if (options.smoothing != 0.0) {
    const double mean = mean_loss(options, sums, logit_words, loss, add32(y_target, -sums.frame.shift), loss_of_max, columns);
    weighted = fma64(options.smoothing, mean, mul64(add64(1.0, -options.smoothing), weighted));
    out.constant = constant_of(options, columns);
  }
  out.loss = canonical(options.z_loss != 0.0 ? add64(weighted, z) : weighted);
  const double share = target_share(sums);
  out.plain = through_map(options.map, {state.inv, share}, y_target);
  out.state = scaled_state(options, state, weight, lse, share, y_target, columns);
  return out;
}
// The same from digits.
DCE_FN RowResult finish_row(const int64_t* digits, const int64_t* logit_words, float max, bool has_target, int64_t target, float y_target, int64_t columns, const RowOptions& options,
                            int32_t status) {
  RowSums sums;
  status |= row_sums(digits, max, has_target, y_target, sums);
  if (status & kBadDigits) return nan_row(status);
  const double loss_of_max = options.on && options.smoothing != 0.0 && options.weight_words != nullptr ? max_loss(digits, max) : 0.0;
  return result_of(sums, loss_of_max, logit_words, max, has_target, target, y_target, columns, options, status);
}

// words: the row's eight words summed over all shards; logit_words: with smoothing, its four. x_target is read only if the target is in [0, V) and not ignored.
DCE_FN RowResult finalize_row(const int64_t* words, const int64_t* logit_words, float row_max, int64_t target, float x_target, int64_t columns, int64_t ignore_index,
                              const RowOptions& options) {
  if (target == ignore_index) return kIgnoredRow;
  const bool has_target = target >= 0 && target < columns;
  const float max = options.on ? mapped(options.map, row_max) : row_max;
  int32_t status = has_target ? kOk : kBadTarget;
  if (is_degenerate(row_max) || is_degenerate(max)) status |= kDegenerate;
  if (words[kColumnsWord] >> 32) {
    status |= kAboveMaximum;
  } else if (words[kColumnsWord] != columns) {
    status |= kBadColumns;
  }
  if (words[kTagWord] != shard_tag(row_max, 0, columns, map_salt(options.map))) status |= kBadCover;
  if (status & ~kBadTarget) return nan_row(status);

  // no row sums to less than its maximum's own term: the given maximum is above every logit
  const RowFrame frame = row_frame(max);
  int64_t rest[kDigits], own[kDigits] = {0, 0, 0, 0, 0, 0};
  add_shifted(own, term_significand(term(add32(max, -frame.shift))), frame.n_max - frame.base);
  for (int i = 0; i < kDigits; ++i) rest[i] = wrapping_sub(words[i], own[i]);
  carry(rest);
  if (rest[kDigits - 1] < 0 || (has_target && !(x_target <= row_max))) return nan_row(status | kBadDigits);
  return finish_row(words, logit_words, max, has_target, target, options.on && has_target ? mapped(options.map, x_target) : x_target, columns, options, status);
}

DCE_FN void write_row(const RowOutputs& out, const RowOptions& options, int64_t row, const RowResult& r) {
  out.loss[row] = r.loss;
  out.denom[row] = r.denom;
  out.status[row] = r.status;
  double* const state = out.state + state_width(options) * row;
  state[0] = r.state.inv;
  state[1] = r.state.tgt;
  if (!options.on) return;
  state[2] = r.plain.inv;
  state[3] = r.plain.tgt;
  if (options.smoothing != 0.0) state[4] = r.constant;
  out.lse[row] = r.lse;
  out.z_loss[row] = r.z_loss;
}

// ---- statistics (SPEC 13)

DCE_FN const int64_t* row_words(const int64_t* logit_words, int64_t row) { return logit_words != nullptr ? logit_words + row * kLogitWords : nullptr; }

// words, stat_words: the row's, summed over all shards; least: the least logit above -inf. The rest as in finalize_row.
DCE_FN void write_stats(const StatOutputs& out, int64_t row, const int64_t* digits, const int64_t* stat_words, float row_max, float least, int64_t target, float x_target, int64_t columns,
                        int64_t ignore_index, const LogitMap& map) {
  const RowOptions only_map = {true, 0.0, {nullptr, 0}, 0, 0.0, nullptr, map};
  const int64_t size = columns < 0 ? columns_of(digits) : columns;
  const RowResult r = finalize_row(digits, nullptr, row_max, target, x_target, size, ignore_index, only_map);
  const bool ignored = r.status & kIgnored, wrong = r.status & ~(kIgnored | kBadTarget);
  const float none = ignored ? 0.0f : from_bits(kNaN32);
  out.lse[row] = r.lse;
  out.logprob[row] = r.loss > 0 ? -r.loss : r.loss;
  out.hit[row] = false;
  out.entropy[row] = out.max_abs[row] = none;
  if (ignored || wrong) return;
  int64_t words[kStatWords] = {stat_words[0], stat_words[1]};
  carry_stat_words(words);
  const int64_t before = before_of(words[1]), high = words[1] - before * kBefore;
  const double sum = rounded(static_cast<uint64_t>(words[0]) | static_cast<uint64_t>(high) << 40, static_cast<uint64_t>(high >> 24), static_cast<uint64_t>(high >> 63));
  const float max = mapped(map, row_max);
  out.entropy[row] = static_cast<float>(add64(max_loss(digits, max), mul64(mul64(sum, 0x1p-43), r.inv)));
  const float top = from_bits(bits(max) & 0x7FFFFFFFu), low = from_bits(bits(mapped(map, least)) & 0x7FFFFFFFu);
  out.max_abs[row] = canonical(static_cast<double>(top > low ? top : low));
  out.hit[row] = !(r.status & kBadTarget) && x_target == row_max && before == 0;
}

// ---- targets

DCE_FN int64_t target_at(const Targets& t, int64_t row) {
  return t.is_int64 ? static_cast<const int64_t*>(t.data)[row] : static_cast<const int32_t*>(t.data)[row];
}
DCE_FN bool is_ignored(const Targets& t, int64_t row) { return t.data != nullptr && target_at(t, row) == t.ignore_index; }

// ---- gradient of a row (SPEC 7)

struct RowScale {
  float scale;     // of every column's a = P 2^-23 2^(n - n_max)
  float target;    // the gradient at the target itself
  float constant;  // with smoothing, what every other column gets besides; else -0, which adds nothing to any product, not even to its sign
};
DCE_FN bool is_finite(const RowScale& f) { return is_finite(f.scale) && is_finite(f.constant); }
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
  const RowScale out = {static_cast<float>(mul64(upstream, state.inv)), static_cast<float>(mul64(upstream, state.tgt)), -0.0f};
  return out;
}
DCE_FN RowScale row_scale_of(const Upstream& u, const RowStates& states, int64_t row) {
  const double g = upstream_of(u, row);
  const RowState state = state_of(states, row);
  RowScale out = row_scale(g, state);
  const double* const more = states.data + states.width * row;
  if (states.width == 5) out.constant = static_cast<float>(mul64(g, more[4]));
  if (u.lse == nullptr) return out;
  const double l = static_cast<double>(u.lse[row * u.lse_stride]);
  out.scale = static_cast<float>(fma64(l, more[2], mul64(g, state.inv)));
  out.target = static_cast<float>(fma64(l, more[3], mul64(g, state.tgt)));
  return out;
}

constexpr int kGradDepth = 125;  // octaves below n_max; a lower term's gradient is 0

}  // namespace dce
