// One lane, plain C++: any processor with IEEE arithmetic.
#include "rows.h"

namespace dce {
namespace cpu {
namespace {

struct Portable {
  static constexpr int kWidth = 1;
  using F = float;
  using U = uint32_t;
  using M = bool;
  using Acc = uint64_t;
  template <class T>
  DCE_FN F load(const T* x) { return widen(*x); }
  template <class T>
  DCE_FN void store(T* out, F v) { narrow(v, *out); }
  DCE_FN F set(float x) { return x; }
  DCE_FN U set_u(uint32_t x) { return x; }
  DCE_FN F fma(F a, F b, F c) { return fma32(a, b, c); }
  DCE_FN F sub(F a, F b) { return a - b; }
  DCE_FN F mul(F a, F b) { return a * b; }
  DCE_FN F max(F a, F b) { return a > b ? a : b; }
  DCE_FN M none() { return false; }
  DCE_FN M either(M a, M b) { return a || b; }
  DCE_FN M both(M a, M b) { return a && b; }
  DCE_FN bool any(M m) { return m; }
  DCE_FN int count(M m) { return m; }
  DCE_FN bool test(M m, int) { return m; }
  DCE_FN M unordered(F a, F b) { return is_nan(a) || is_nan(b); }
  DCE_FN M less(F a, F b) { return a < b; }
  DCE_FN M not_less(F a, F b) { return a >= b; }
  DCE_FN M not_less_equal(F a, F b) { return !(a <= b); }
  DCE_FN F select(M m, F a, F b) { return m ? a : b; }
  DCE_FN U bits(F v) { return dce::bits(v); }
  DCE_FN F from(U v) { return from_bits(v); }
  DCE_FN U add_u(U a, U b) { return a + b; }
  DCE_FN U and_u(U a, U b) { return a & b; }
  DCE_FN U or_u(U a, U b) { return a | b; }
  DCE_FN U sub_u(U a, U b) { return a - b; }
  template <int k>
  DCE_FN U shift_left(U v) { return v << k; }
  DCE_FN U one_shifted(U s) { return s < 32 ? 1u << s : 0; }
  DCE_FN Acc zero() { return 0; }
  DCE_FN void multiply_add(Acc& a, U p, U w) { a += static_cast<uint64_t>(p) * w; }
  DCE_FN uint128 total(Acc a) { return a; }
};

constexpr LoopTable kTable = Loops<Portable>::table("portable");

}  // namespace

const LoopTable* portable_loops() { return &kTable; }

}  // namespace cpu
}  // namespace dce
