// The loops over a piece of a row, written once over a vector type: row maximum, digits, gradient. rows_portable.cpp, rows_avx2.cpp and
// rows_avx512.cpp instantiate it; those include it under their target pragma, so that it is compiled for their instruction set.
#pragma once

#include "loops.h"

namespace dce {
namespace cpu {

// V supplies: kWidth, vectors F (fp32) and U (uint32), masks M, an accumulator Acc of per-lane uint64, and the operations used below.
template <class V>
struct Loops {
  using F = typename V::F;
  using U = typename V::U;

  // The vector at x + i, -inf past the end.
  template <class T>
  DCE_FN F load(const T* x, int64_t i, int64_t n) {
    if (i + V::kWidth <= n) return V::load(x + i);
    float lane[V::kWidth];
    for (int j = 0; j < V::kWidth; ++j) lane[j] = i + j < n ? widen(x[i + j]) : -HUGE_VALF;
    return V::load(lane);
  }

  struct VectorTerm {
    F z, t;
  };
  // What dce::term and dce::minus_tanh_half have in common: e^r = 1 + q r.
  struct Reduced {
    F z, r, q;
  };
  DCE_FN Reduced reduced(F x) {
    const F z = V::fma(x, V::set(kLog2e), V::set(kMagic));
    const F minus_n = V::sub(V::set(kMagic), z);
    F r = V::fma(minus_n, V::set(kLn2Hi), x);
    r = V::fma(minus_n, V::set(kLn2Lo), r);
    F q = V::fma(V::set(kC6), r, V::set(kC5));
    q = V::fma(q, r, V::set(kC4));
    q = V::fma(q, r, V::set(kC3));
    q = V::fma(q, r, V::set(kC2));
    return {z, r, V::fma(q, r, V::set(1.0f))};
  }
  // dce::term, lane by lane
  DCE_FN VectorTerm vector_term(F x) {
    const Reduced e = reduced(x);
    return {e.z, V::fma(e.q, e.r, V::set(kOffset))};
  }

  DCE_FN F absolute(F x) { return V::from(V::and_u(V::bits(x), V::set_u(0x7FFFFFFFu))); }
  // dce::mapped, lane by lane
  DCE_FN F vector_map(const LogitMap& m, F x) {
    if (m.cap == 0.0f) return V::mul(x, V::set(m.scale));
    const F w = absolute(V::mul(x, V::set(m.doubled))), end = V::set(kTanhEnd), one = V::set(1.0f);
    const F s = V::sub(V::set(-0.0f), V::select(V::less(w, end), w, end));
    const Reduced of = reduced(s);
    const F power = V::from(V::add_u(V::template shift_left<23>(V::bits(of.z)), V::set_u(0x3F800000u)));
    const F e = V::fma(power, V::mul(of.q, of.r), V::sub(power, one));
    const F minus_d = V::sub(V::set(-2.0f), e);
    F y = V::fma(V::fma(V::set(-kRecip2), minus_d, V::set(kRecip1)), V::sub(V::set(0.0f), minus_d), V::set(kRecip0));
    for (int i = 0; i < 2; ++i) y = V::fma(V::fma(minus_d, y, one), y, y);
    const F t = V::mul(e, y), refined = V::fma(V::fma(t, minus_d, e), y, t);
    const U magnitude = V::and_u(V::bits(V::mul(refined, V::set(m.cap))), V::set_u(0x7FFFFFFFu));
    const F capped = V::from(V::or_u(magnitude, V::and_u(V::bits(x), V::set_u(0x80000000u))));
    return V::select(V::less(absolute(x), V::set(HUGE_VALF)), capped, x);
  }
  // dce::slope_at under a cap
  DCE_FN F vector_slope(const LogitMap& m, F y) {
    const F u = V::mul(y, V::set(m.inverse_cap)), zero = V::set(0.0f);
    const F d = V::fma(V::sub(zero, u), u, V::set(1.0f));
    return V::select(V::less(zero, d), d, zero);
  }

  struct VectorFixed {
    U high, low;
    VectorFixed() : high(V::set_u(0)), low(V::set_u(0)) {}
    // dce::add_fixed
    template <int kShift>
    void add(F x) {
      constexpr float kToHigh = power_of_two(kFixedHigh - kShift), kFromHigh = power_of_two(kShift - kFixedHigh), kToLow = power_of_two(kFixedBits - kShift);
      const F z = V::fma(x, V::set(kToHigh), V::set(kMagic));
      const F rest = V::fma(V::sub(V::set(kMagic), z), V::set(kFromHigh), x);
      high = V::add_u(high, V::sub_u(V::bits(z), V::set_u(kMagicBits)));
      low = V::add_u(low, V::sub_u(V::bits(V::fma(rest, V::set(kToLow), V::set(kMagic))), V::set_u(kMagicBits)));
    }
    int64_t sum() const {
      float h[V::kWidth], l[V::kWidth];
      V::store(h, V::from(high));
      V::store(l, V::from(low));
      int64_t out = 0;
      for (int j = 0; j < V::kWidth; ++j) out += total(FixedSum{dce::bits(h[j]), dce::bits(l[j])});
      return out;
    }
  };

  template <class T>
  static int32_t max_image(const T* x, int64_t n) {
    F top = V::set(-HUGE_VALF);
    typename V::M nan = V::none();
    for (int64_t i = 0; i < n; i += V::kWidth) {
      const F v = load(x, i, n);
      nan = V::either(nan, V::unordered(v, v));
      top = V::max(v, top);
    }
    if (V::any(nan)) return kImageOfNaN;
    float lane[V::kWidth];
    V::store(lane, top);
    int32_t image = kImageOfNegInf;
    for (float v : lane) image = order_image(v) > image ? order_image(v) : image;
    return image;
  }

  // A term is P * 2^(s) with s = n - (n_max - 31), and goes to one of three places: window `near` (s in [0, 31]), window `far` (s in [-32, -1]), or,
  // rarely, straight to the digits. A lane's uint64 holds kFlush terms below 2^24 * 2^31.
  static constexpr int64_t kFlush = 256;

  template <class T, bool kCheck, bool kMap>
  DCE_FN int64_t sum(const T* x, int64_t n, RowFrame frame, const LogitMap& map, float row_max, int64_t* digits) {
    const F shift = V::set(frame.shift), limit = V::set(row_max);
    const int32_t n_top = frame.n_max + (kMap && map.cap != 0.0f);  // a cap may put a term that much above the maximum's
    const F lowest_near = V::set(kMagic + static_cast<float>(n_top - 31)), lowest_far = V::set(kMagic + static_cast<float>(n_top - 63));
    const F lowest_kept = V::set(kMagic + static_cast<float>(frame.base));
    const U anchor = V::set_u(kMagicBits + static_cast<uint32_t>(n_top - 31)), far_anchor = V::set_u(kMagicBits + static_cast<uint32_t>(n_top - 63));
    const int near_bit = n_top - 31 - frame.base;  // 97..129
    int64_t faults = 0;
    for (int64_t begin = 0; begin < n; begin += kFlush * V::kWidth) {
      const int64_t end = begin + kFlush * V::kWidth < n ? begin + kFlush * V::kWidth : n;
      typename V::Acc near = V::zero(), far = V::zero();
      for (int64_t i = begin; i < end; i += V::kWidth) {
        const F raw = load(x, i, n);
        F v = V::sub(kMap ? vector_map(map, raw) : raw, shift);
        if (kCheck) {
          const typename V::M bad = V::not_less_equal(raw, limit);
          if (V::any(bad)) {  // a faulty column becomes -inf: no term
            faults += V::count(bad);
            v = V::select(bad, V::set(-HUGE_VALF), v);
          }
        }
        const VectorTerm e = vector_term(v);
        const U p = V::sub_u(V::bits(e.t), V::set_u(kOffsetBits));
        // one_shifted gives 0 for every shift outside [0, 31], whatever garbage z is
        V::multiply_add(near, p, V::one_shifted(V::sub_u(V::bits(e.z), anchor)));
        if (V::any(V::less(e.z, lowest_near))) {
          V::multiply_add(far, p, V::one_shifted(V::sub_u(V::bits(e.z), far_anchor)));
          const typename V::M lower = V::both(V::less(e.z, lowest_far), V::not_less(e.z, lowest_kept));
          if (V::any(lower)) add_lanes(v, lower, frame, digits);
        }
      }
      add_shifted(digits, V::total(near), near_bit);
      add_shifted(digits, V::total(far), near_bit - 32);
    }
    carry(digits);
    return faults;
  }

  static __attribute__((noinline)) void add_lanes(F v, typename V::M lanes, RowFrame frame, int64_t* digits) {
    float lane[V::kWidth];
    V::store(lane, v);
    for (int j = 0; j < V::kWidth; ++j) {
      if (!V::test(lanes, j)) continue;
      const Term e = term(lane[j]);
      add_shifted(digits, term_significand(e), term_exponent(e) - frame.base);
    }
  }

  template <class T>
  static int64_t count_above(const T* x, int64_t n, float row_max) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += V::kWidth) count += V::count(V::not_less_equal(load(x, i, n), V::set(row_max)));
    return count;
  }

  template <class T>
  static void digits(const T* x, int64_t n, RowFrame frame, const LogitMap& map, int64_t* out) {
    is_identity(map) ? sum<T, false, false>(x, n, frame, map, 0.0f, out) : sum<T, false, true>(x, n, frame, map, 0.0f, out);
  }
  template <class T>
  static int64_t digits_checked(const T* x, int64_t n, RowFrame frame, const LogitMap& map, float row_max, int64_t* out) {
    return is_identity(map) ? sum<T, true, false>(x, n, frame, map, row_max, out) : sum<T, true, true>(x, n, frame, map, row_max, out);
  }

  template <class T>
  static void gradient(const T* x, T* out, int64_t n, RowFrame frame, float scale) {
    const F shift = V::set(frame.shift), f = V::set(scale), half = V::set(0.5f);
    const F lowest = V::set(kMagic + static_cast<float>(frame.n_max - kGradDepth));
    const U anchor = V::set_u(kMagicBits + static_cast<uint32_t>(frame.n_max));
    for (int64_t i = 0; i < n; i += V::kWidth) {
      const VectorTerm e = vector_term(V::sub(load(x, i, n), shift));
      const U exponent = V::template shift_left<23>(V::sub_u(V::bits(e.z), anchor));
      const F a = V::from(V::add_u(V::bits(V::sub(e.t, half)), exponent));
      const F g = V::mul(V::select(V::not_less(e.z, lowest), a, V::set(0.0f)), f);
      if (i + V::kWidth <= n) {
        V::store(out + i, g);
      } else {
        float lane[V::kWidth];
        V::store(lane, g);
        for (int64_t j = i; j < n; ++j) narrow(lane[j - i], out[j]);
      }
    }
  }

  template <class T>
  static void gradient_with(const T* x, T* out, int64_t n, RowFrame frame, RowScale f, const LogitMap& map, const float* weights) {
    const bool identity = is_identity(map), capped = map.cap != 0.0f;
    const F shift = V::set(frame.shift), scale = V::set(f.scale), constant = V::set(f.constant), half = V::set(0.5f);
    const F lowest = V::set(kMagic + static_cast<float>(frame.n_max - kGradDepth));
    const U anchor = V::set_u(kMagicBits + static_cast<uint32_t>(frame.n_max));
    for (int64_t i = 0; i < n; i += V::kWidth) {
      const F raw = load(x, i, n), y = identity ? raw : vector_map(map, raw);
      const VectorTerm e = vector_term(V::sub(y, shift));
      const U exponent = V::template shift_left<23>(V::sub_u(V::bits(e.z), anchor));
      F a = V::select(V::not_less(e.z, lowest), V::from(V::add_u(V::bits(V::sub(e.t, half)), exponent)), V::set(0.0f));
      F k = weights != nullptr ? V::mul(constant, load(weights, i, n)) : constant;
      if (capped) {
        const F slope = vector_slope(map, y);
        a = V::mul(a, slope);
        k = V::mul(k, slope);
      }
      float lane[V::kWidth];
      V::store(lane, V::fma(a, scale, k));
      for (int64_t j = i; j < n && j < i + V::kWidth; ++j) narrow(lane[j - i], out[j]);
    }
  }

  static void add_wide(float p, int64_t* words, bool& infinite) {
    if (!is_finite(p)) {
      infinite = true;
      return;
    }
    const WideLogit w = wide_logit(p);
    words[w.at] += w.low;
    words[w.at + 1] += w.high;
  }
  template <class T>
  static void logit_sum(const T* x, int64_t n, float shift, const LogitMap& map, float row_max, const float* weights, int64_t* words) {
    const bool identity = is_identity(map);
    const float top = add32(identity ? row_max : mapped(map, row_max), -shift);
    const F limit = V::set(row_max), zero = V::set(0.0f);
    const auto add = [words](int64_t z) {
      words[0] += low_word(z);
      words[1] += high_word(z);
    };
    bool infinite = false;
    int64_t i = 0;
    while (i + V::kWidth <= n) {
      VectorFixed sum;
      for (int round = 0; round < kFixedTerms && i + V::kWidth <= n; ++round, i += V::kWidth) {
        const F raw = V::load(x + i);
        F p = V::sub(identity ? raw : vector_map(map, raw), V::set(shift));
        if (weights != nullptr) {
          const F w = V::load(weights + i);
          p = V::select(V::both(V::not_less(w, zero), V::not_less(zero, w)), zero, V::mul(V::sub(p, V::set(top)), w));
        }
        const typename V::M faulty = V::not_less_equal(raw, limit);
        if (V::any(faulty)) p = V::select(faulty, zero, p);
        const typename V::M wide = V::not_less_equal(absolute(p), V::set(from_bits(dce::bits(kLogitLimit) - 1)));
        if (V::any(wide)) {
          float lane[V::kWidth];
          V::store(lane, p);
          for (int j = 0; j < V::kWidth; ++j)
            if (V::test(wide, j)) add_wide(lane[j], words, infinite);
          p = V::select(wide, zero, p);
        }
        sum.template add<kLogitShift>(p);
      }
      add(sum.sum());
      carry_logit_words(words);  // 2^13 logits add less than 2^62 to a word
    }
    FixedSum rest;
    for (; i < n; ++i) {
      const float raw = widen(x[i]), v = add32(identity ? raw : mapped(map, raw), -shift), p = weights != nullptr ? weighted_logit(v, top, weights[i]) : v;
      if (!(raw <= row_max)) continue;
      if (from_bits(dce::bits(p) & 0x7FFFFFFFu) < kLogitLimit) {
        add_fixed<kLogitShift>(rest, p);
      } else {
        add_wide(p, words, infinite);
      }
    }
    add(total(rest));
    carry_logit_words(words);
    if (infinite) words[kLogitWords - 1] += kInfiniteLogit;  // once, however many: there is room for 2^15
  }

  template <class T>
  static float least(const T* x, int64_t n) {
    const F none = V::set(-HUGE_VALF);
    F deepest = none;  // of -x
    for (int64_t i = 0; i < n; i += V::kWidth) {
      const F minus = V::sub(V::set(0.0f), load(x, i, n));
      deepest = V::max(V::select(V::less(minus, V::set(HUGE_VALF)), minus, none), deepest);
    }
    float lane[V::kWidth], out = HUGE_VALF;
    V::store(lane, deepest);
    for (float v : lane) out = -v < out ? -v : out;
    return out;
  }

  template <class T>
  static void stats(const T* x, int64_t n, RowFrame frame, const LogitMap& map, float row_max, int64_t before, int64_t* words) {
    const bool identity = is_identity(map);
    const F shift = V::set(frame.shift), limit = V::set(row_max), half = V::set(0.5f), zero = V::set(0.0f);
    const F lowest = V::set(kMagic + static_cast<float>(frame.n_max - kGradDepth)), top = V::set(add32(identity ? row_max : mapped(map, row_max), -frame.shift));
    const U anchor = V::set_u(kMagicBits + static_cast<uint32_t>(frame.n_max));
    for (int64_t begin = 0; begin < n; begin += kFixedTerms * V::kWidth) {
      VectorFixed sum;
      for (int64_t i = begin; i < n && i < begin + kFixedTerms * V::kWidth; i += V::kWidth) {
        const F raw = load(x, i, n);
        const F v = V::sub(identity ? raw : vector_map(map, raw), shift);
        const VectorTerm e = vector_term(v);
        const U exponent = V::template shift_left<23>(V::sub_u(V::bits(e.z), anchor));
        const F b = V::mul(V::from(V::add_u(V::bits(V::sub(e.t, half)), exponent)), V::sub(top, v));
        const typename V::M counted = V::both(V::not_less(e.z, lowest), V::not_less(limit, raw));
        sum.template add<0>(V::select(counted, b, zero));
      }
      const int64_t s = sum.sum();
      words[0] += stat_low(s);
      words[1] += stat_high(s);
    }
    bool found = false;
    for (int64_t i = 0; i < before && !found; i += V::kWidth) {
      const F raw = load(x, i, before);
      found = V::any(V::both(V::not_less(raw, limit), V::not_less(limit, raw)));
    }
    if (found) words[1] += kBefore;
  }

  template <class T>
  static constexpr RowLoops<T> loops() {
    return {&max_image<T>, &digits<T>, &digits_checked<T>, &count_above<T>, &gradient<T>, &gradient_with<T>, &logit_sum<T>, &least<T>, &stats<T>};
  }
  static constexpr LoopTable table(const char* name) { return {name, loops<float>(), loops<Bf16>(), loops<Fp16>()}; }
};

}  // namespace cpu
}  // namespace dce
