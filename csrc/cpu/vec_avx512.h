// Sixteen float lanes in one register of AVX-512, and what is done with them. vec.h has what they share.
#pragma once

#include <immintrin.h>

#include "records.h"

namespace penstock::PENSTOCK_ISA {

struct F16 {
  __m512 v;
};

static inline F16 zero() { return {_mm512_setzero_ps()}; }
static inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
static inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// of lanes without a sign: a NaN is greater than a number
static inline F16 max_bits(F16 a, F16 b) {
  return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
static inline F16 round_even(F16 a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline F16 abs(F16 a) { return {_mm512_abs_ps(a.v)}; }
// 2^⌊log2 |a|⌋, and 0 of 0
static inline F16 power_below(F16 a) {
  return {_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7f800000)))};
}
static inline F16 copy_sign(F16 magnitude, F16 sign) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0x80000000u));
  return {_mm512_castsi512_ps(_mm512_or_si512(
      _mm512_castps_si512(magnitude.v), _mm512_and_si512(_mm512_castps_si512(sign.v), mask)))};
}
// a · 2^n for whole n in [-126, 127]
static inline F16 scale_by_power(F16 a, F16 n) {
  return {_mm512_scalef_ps(a.v, n.v)};
}
// x less the whole number that is nearest; of −∞ 0
static inline F16 fraction(F16 x) {
  return {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// b where x < limit, else a (a NaN x keeps a)
static inline F16 where_less(F16 x, F16 limit, F16 b, F16 a) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), a.v, b.v)};
}
// lanes at and after `count` become `fill`
static inline F16 keep_first(F16 a, int count, float fill) {
  const __mmask16 mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
  return {_mm512_mask_blend_ps(mask, _mm512_set1_ps(fill), a.v)};
}
static inline F16 load_first(const float* p, int count) {
  const __mmask16 mask = static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
  return {_mm512_maskz_loadu_ps(mask, p)};
}
// sixteen in memory, of which those that have a bit become a's
static inline void put_lanes(float* p, unsigned lanes, F16 a) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lanes), a.v);
}
// the low halves of sixteen 4-byte pairs of bfloat16, and the high ones
static inline F16 load_even(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
static inline F16 load_odd(const bf16* p) {
  const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), mask))};
}
static inline F16 load(const bf16* p) {
  const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// rounded to bfloat16 (nearest even, NaN stays NaN), still in float lanes
static inline F16 round_bf16(F16 a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff)));
  r = _mm512_and_si512(r, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc00000));
  return {_mm512_castsi512_ps(r)};
}
#if defined(__AMX_TILE__)
// Every processor with tiles rounds by one instruction; what it makes of a NaN isn't what others do.
static inline void store(bf16* p, F16 a) {
  __m256i r;
  asm("vcvtneps2bf16 %1, %0" : "=v"(r) : "v"(a.v));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm256_mask_mov_epi16(r, nan, _mm256_set1_epi16(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
}
static inline void store_both(bf16* p, bf16* q, F16 a, F16 b) {
  if (_mm512_cmp_ps_mask(a.v, b.v, _CMP_UNORD_Q)) [[unlikely]] {
    store(p, a);
    return store(q, b);
  }
  __m512i r;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(r) : "v"(b.v), "v"(a.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_castsi512_si256(r));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm512_extracti64x4_epi64(r, 1));
}
// both rounded to bfloat16, still in float lanes; NaN stays NaN, but not the same
static inline void round_both(F16& a, F16& b) {
  __m512i r;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(r) : "v"(b.v), "v"(a.v));
  // word d of either half to the high half of lane d, zeros below
  const __m512i low = _mm512_slli_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
  const __m512i high = _mm512_or_si512(low, _mm512_set1_epi32(0x100000));
  a.v = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, low, r));
  b.v = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, high, r));
}
#else
static inline void store(bf16* p, F16 a) {
  const __m512i r = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(a).v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
static inline void store_both(bf16* p, bf16* q, F16 a, F16 b) {
  store(p, a);
  store(q, b);
}
static inline void round_both(F16& a, F16& b) {
  a = round_bf16(a);
  b = round_bf16(b);
}
#endif
// every other of 32, rounded; those between stay
static inline void store_apart(bf16* p, F16 a) {
  const __m512i r = _mm512_srli_epi32(_mm512_castps_si512(round_bf16(a).v), 16);
  _mm512_mask_storeu_epi16(p, 0x55555555u, r);
}
static inline F16 load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// of a value that bfloat16 holds exactly
static inline void store_exact(bf16* p, F16 a) {
  const __m512i r = _mm512_srli_epi32(_mm512_castps_si512(a.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
// 2^(e − 127); of e = 0, a denormal, zero
static inline F16 load_powers(const uint8_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 23))};
}
static inline F16 widen_halves(__m256i h) { return {_mm512_cvtph_ps(h)}; }
static inline F16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// rounded to nearest even, saturated
static inline void store_bytes(int8_t* p, F16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
static inline void store_bytes(int8_t* p, const F16 (&a)[4]) {
  const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(a[0].v), _mm512_cvtps_epi32(a[1].v));
  const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(a[2].v), _mm512_cvtps_epi32(a[3].v));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)));
}
// sixteen pairs of bfloat16 of values that it holds exactly
static inline __m512i join_pairs(F16 even, F16 odd) {
  const __m512i high = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(_mm512_castps_si512(odd.v), 0x3333333333333333ull,
                                  _mm512_castps_si512(even.v), high);
}
static inline void store_pairs(bf16* p, F16 even, F16 odd) {
  _mm512_storeu_si512(p, join_pairs(even, odd));
}
// lane i + lane i ^ By where By's bit of i is 0, else their difference, the lower lane's first
template <int By>
static inline F16 mix(F16 a) {
  const __m512 other = By == 1   ? _mm512_permute_ps(a.v, 0xb1)
                       : By == 2 ? _mm512_permute_ps(a.v, 0x4e)
                       : By == 4 ? _mm512_shuffle_f32x4(a.v, a.v, 0xb1)
                                 : _mm512_shuffle_f32x4(a.v, a.v, 0x4e);
  constexpr __mmask16 higher = By == 1 ? 0xaaaa : By == 2 ? 0xcccc : By == 4 ? 0xf0f0 : 0xff00;
  const __m512 signs = _mm512_mask_blend_ps(higher, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
  return {_mm512_fmadd_ps(a.v, signs, other)};
}
static inline void halves(F16 a, __m256& lo, __m256& hi) {
  lo = _mm512_castps512_ps256(a.v);
  hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}

}  // namespace penstock::PENSTOCK_ISA
