// Sixteen lanes: AVX-512 F, BW, DQ and VL. Only entered where the processor has them (csrc/cpu/backend.cpp).
#include "loops.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DCE_HAVE_AVX512 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include <immintrin.h>

#include "rows.h"

namespace dce {
namespace cpu {
namespace {

struct Avx512 {
  static constexpr int kWidth = 16;
  using F = __m512;
  using U = __m512i;
  using M = __mmask16;
  struct Acc {
    __m512i even, odd;  // uint64 lanes
  };
  DCE_FN F load(const float* x) { return _mm512_loadu_ps(x); }
  DCE_FN F load(const Bf16* x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16));
  }
  DCE_FN F load(const Fp16* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  DCE_FN void store(float* out, F v) { _mm512_storeu_ps(out, v); }
  DCE_FN void store(Bf16* out, F v) {  // v is never NaN here
    const U b = bits(v);
    const U odd = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
    const U r = _mm512_srli_epi32(_mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtepi32_epi16(r));
  }
  DCE_FN void store(Fp16* out, F v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  DCE_FN F set(float x) { return _mm512_set1_ps(x); }
  DCE_FN U set_u(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  DCE_FN F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  DCE_FN F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  DCE_FN F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  DCE_FN F max(F a, F b) { return _mm512_max_ps(a, b); }
  DCE_FN M none() { return 0; }
  DCE_FN M either(M a, M b) { return static_cast<M>(a | b); }
  DCE_FN M both(M a, M b) { return static_cast<M>(a & b); }
  DCE_FN bool any(M m) { return m != 0; }
  DCE_FN int count(M m) { return __builtin_popcount(m); }
  DCE_FN bool test(M m, int j) { return m >> j & 1; }
  DCE_FN M unordered(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }
  DCE_FN M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  DCE_FN M not_less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  DCE_FN M not_less_equal(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }
  DCE_FN F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }
  DCE_FN U bits(F v) { return _mm512_castps_si512(v); }
  DCE_FN F from(U v) { return _mm512_castsi512_ps(v); }
  DCE_FN U add_u(U a, U b) { return _mm512_add_epi32(a, b); }
  DCE_FN U and_u(U a, U b) { return _mm512_and_si512(a, b); }
  DCE_FN U or_u(U a, U b) { return _mm512_or_si512(a, b); }
  DCE_FN U sub_u(U a, U b) { return _mm512_sub_epi32(a, b); }
  template <int k>
  DCE_FN U shift_left(U v) { return _mm512_slli_epi32(v, k); }
  DCE_FN U one_shifted(U s) { return _mm512_sllv_epi32(_mm512_set1_epi32(1), s); }
  DCE_FN Acc zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
  DCE_FN void multiply_add(Acc& a, U p, U w) {
    a.even = _mm512_add_epi64(a.even, _mm512_mul_epu32(p, w));
    a.odd = _mm512_add_epi64(a.odd, _mm512_mul_epu32(_mm512_srli_epi64(p, 32), _mm512_srli_epi64(w, 32)));
  }
  DCE_FN uint128 total(Acc a) {
    uint64_t lane[16];
    _mm512_storeu_si512(lane, a.even);
    _mm512_storeu_si512(lane + 8, a.odd);
    uint128 sum = 0;
    for (uint64_t v : lane) sum += v;
    return sum;
  }
};

// Constant: building it must not run an instruction of this set.
constexpr LoopTable kTable = Loops<Avx512>::table("avx512");

}  // namespace
}  // namespace cpu
}  // namespace dce
#pragma GCC pop_options
#endif

namespace dce {
namespace cpu {
const LoopTable* avx512_loops() {
#if defined(DCE_HAVE_AVX512)
  return &kTable;
#else
  return nullptr;
#endif
}
}  // namespace cpu
}  // namespace dce
