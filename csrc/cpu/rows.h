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
  // dce::term, lane by lane
  DCE_FN VectorTerm vector_term(F x) {
    const F z = V::fma(x, V::set(kLog2e), V::set(kMagic));
    const F minus_n = V::sub(V::set(kMagic), z);
    F r = V::fma(minus_n, V::set(kLn2Hi), x);
    r = V::fma(minus_n, V::set(kLn2Lo), r);
    F q = V::fma(V::set(kC6), r, V::set(kC5));
    q = V::fma(q, r, V::set(kC4));
    q = V::fma(q, r, V::set(kC3));
    q = V::fma(q, r, V::set(kC2));
    q = V::fma(q, r, V::set(1.0f));
    return {z, V::fma(q, r, V::set(kOffset))};
  }

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

  template <class T, bool kCheck>
  DCE_FN int64_t sum(const T* x, int64_t n, RowFrame frame, float row_max, int64_t* digits) {
    const F shift = V::set(frame.shift), limit = V::set(row_max);
    const F lowest_near = V::set(kMagic + static_cast<float>(frame.n_max - 31)), lowest_far = V::set(kMagic + static_cast<float>(frame.n_max - 63));
    const F lowest_kept = V::set(kMagic + static_cast<float>(frame.base));
    const U anchor = V::set_u(kMagicBits + static_cast<uint32_t>(frame.n_max - 31)), far_anchor = V::set_u(kMagicBits + static_cast<uint32_t>(frame.n_max - 63));
    const int near_bit = frame.n_max - 31 - frame.base;  // 97..128
    int64_t faults = 0;
    for (int64_t begin = 0; begin < n; begin += kFlush * V::kWidth) {
      const int64_t end = begin + kFlush * V::kWidth < n ? begin + kFlush * V::kWidth : n;
      typename V::Acc near = V::zero(), far = V::zero();
      for (int64_t i = begin; i < end; i += V::kWidth) {
        const F raw = load(x, i, n);
        F v = V::sub(raw, shift);
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
  static void digits(const T* x, int64_t n, RowFrame frame, int64_t* out) {
    sum<T, false>(x, n, frame, 0.0f, out);
  }
  template <class T>
  static int64_t digits_checked(const T* x, int64_t n, RowFrame frame, float row_max, int64_t* out) {
    return sum<T, true>(x, n, frame, row_max, out);
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
  static constexpr RowLoops<T> loops() {
    return {&max_image<T>, &digits<T>, &digits_checked<T>, &count_above<T>, &gradient<T>};
  }
  static constexpr LoopTable table(const char* name) { return {name, loops<float>(), loops<Bf16>(), loops<Fp16>()}; }
};

}  // namespace cpu
}  // namespace dce
