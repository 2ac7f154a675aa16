// Eight lanes: AVX2, FMA and F16C. Only entered where the processor has them (csrc/cpu/backend.cpp).
#include "loops.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DCE_HAVE_AVX2 1
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

#include "rows.h"

namespace dce {
namespace cpu {
namespace {

struct Avx2 {
  static constexpr int kWidth = 8;
  using F = __m256;
  using U = __m256i;
  using M = __m256;
  struct Acc {
    __m256i even, odd;  // uint64 lanes
  };
  DCE_FN F load(const float* x) { return _mm256_loadu_ps(x); }
  DCE_FN F load(const Bf16* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
  }
  DCE_FN F load(const Fp16* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
  DCE_FN void store(float* out, F v) { _mm256_storeu_ps(out, v); }
  DCE_FN void store(Bf16* out, F v) {  // v is never NaN here
    const U b = bits(v);
    const U odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
    const U r = _mm256_srli_epi32(_mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
    const U packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_castsi256_si128(packed));
  }
  DCE_FN void store(Fp16* out, F v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
  DCE_FN F set(float x) { return _mm256_set1_ps(x); }
  DCE_FN U set_u(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  DCE_FN F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  DCE_FN F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  DCE_FN F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  DCE_FN F max(F a, F b) { return _mm256_max_ps(a, b); }
  DCE_FN M none() { return _mm256_setzero_ps(); }
  DCE_FN M either(M a, M b) { return _mm256_or_ps(a, b); }
  DCE_FN M both(M a, M b) { return _mm256_and_ps(a, b); }
  DCE_FN bool any(M m) { return _mm256_movemask_ps(m) != 0; }
  DCE_FN int count(M m) { return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(m))); }
  DCE_FN bool test(M m, int j) { return _mm256_movemask_ps(m) >> j & 1; }
  DCE_FN M unordered(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_UNORD_Q); }
  DCE_FN M less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  DCE_FN M not_less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  DCE_FN M not_less_equal(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_NLE_UQ); }
  DCE_FN F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m); }
  DCE_FN U bits(F v) { return _mm256_castps_si256(v); }
  DCE_FN F from(U v) { return _mm256_castsi256_ps(v); }
  DCE_FN U add_u(U a, U b) { return _mm256_add_epi32(a, b); }
  DCE_FN U and_u(U a, U b) { return _mm256_and_si256(a, b); }
  DCE_FN U or_u(U a, U b) { return _mm256_or_si256(a, b); }
  DCE_FN U sub_u(U a, U b) { return _mm256_sub_epi32(a, b); }
  template <int k>
  DCE_FN U shift_left(U v) { return _mm256_slli_epi32(v, k); }
  DCE_FN U one_shifted(U s) { return _mm256_sllv_epi32(_mm256_set1_epi32(1), s); }
  DCE_FN Acc zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  DCE_FN void multiply_add(Acc& a, U p, U w) {
    a.even = _mm256_add_epi64(a.even, _mm256_mul_epu32(p, w));
    a.odd = _mm256_add_epi64(a.odd, _mm256_mul_epu32(_mm256_srli_epi64(p, 32), _mm256_srli_epi64(w, 32)));
  }
  DCE_FN uint128 total(Acc a) {
    uint64_t lane[8];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lane), a.even);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lane + 4), a.odd);
    uint128 sum = 0;
    for (uint64_t v : lane) sum += v;
    return sum;
  }
};

// Constant: building it must not run an instruction of this set.
constexpr LoopTable kTable = Loops<Avx2>::table("avx2");

}  // namespace
}  // namespace cpu
}  // namespace dce
#pragma GCC pop_options
#endif

namespace dce {
namespace cpu {
const LoopTable* avx2_loops() {
#if defined(DCE_HAVE_AVX2)
  return &kTable;
#else
  return nullptr;
#endif
}
}  // namespace cpu
}  // namespace dce
