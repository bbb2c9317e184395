// Sixteen float lanes in two registers of AVX2, and what is done with them. vec.h has what they share.
#pragma once

#include <immintrin.h>

#include "records.h"

namespace penstock::PENSTOCK_ISA {

struct F16 {
  __m256 lo, hi;
};

static inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline F16 operator+(F16 a, F16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline F16 operator-(F16 a, F16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline F16 operator*(F16 a, F16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline F16 operator/(F16 a, F16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
static inline F16 fma(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F16 max(F16 a, F16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
static inline F16 min(F16 a, F16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
static inline F16 max_bits(F16 a, F16 b) {
  const auto of = [](__m256 x, __m256 y) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
  };
  return {of(a.lo, b.lo), of(a.hi, b.hi)};
}
static inline F16 round_even(F16 a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
static inline F16 abs(F16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
static inline F16 power_below(F16 a) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000));
  return {_mm256_and_ps(a.lo, mask), _mm256_and_ps(a.hi, mask)};
}
static inline F16 copy_sign(F16 magnitude, F16 sign) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(magnitude.lo, _mm256_and_ps(sign.lo, mask)),
          _mm256_or_ps(magnitude.hi, _mm256_and_ps(sign.hi, mask))};
}
static inline __m256 power(__m256 n) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline F16 scale_by_power(F16 a, F16 n) {
  return {_mm256_mul_ps(a.lo, power(n.lo)), _mm256_mul_ps(a.hi, power(n.hi))};
}
static inline F16 where_less(F16 x, F16 limit, F16 b, F16 a) {
  return {_mm256_blendv_ps(a.lo, b.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(a.hi, b.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_LT_OQ))};
}
static inline __m256i first_lanes(int count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline F16 keep_first(F16 a, int count, float fill) {
  const __m256 other = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(other, a.lo, _mm256_castsi256_ps(first_lanes(count))),
          _mm256_blendv_ps(other, a.hi, _mm256_castsi256_ps(first_lanes(count - 8)))};
}
static inline F16 load_first(const float* p, int count) {
  return {_mm256_maskload_ps(p, first_lanes(count)),
          count > 8 ? _mm256_maskload_ps(p + 8, first_lanes(count - 8)) : _mm256_setzero_ps()};
}
static inline __m256i lanes_of(unsigned bits) {
  const __m256i own = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), own), own);
}
// not by masked stores, which some machines take thirty times as long for
static inline void put_lanes(float* p, unsigned lanes, F16 a) {
  const __m256 low = _mm256_castsi256_ps(lanes_of(lanes & 0xff));
  const __m256 high = _mm256_castsi256_ps(lanes_of(lanes >> 8 & 0xff));
  _mm256_storeu_ps(p, _mm256_blendv_ps(_mm256_loadu_ps(p), a.lo, low));
  _mm256_storeu_ps(p + 8, _mm256_blendv_ps(_mm256_loadu_ps(p + 8), a.hi, high));
}
static inline F16 load_even(const bf16* p) {
  const __m256i* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(at), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(at + 1), 16))};
}
static inline F16 load_odd(const bf16* p) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const __m256i* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(at), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(at + 1), mask))};
}
static inline __m256 widen(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
static inline F16 load(const bf16* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline __m256 round_half(__m256 a) {
  const __m256i u = _mm256_castps_si256(a);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  r = _mm256_and_si256(r, _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  const __m256 nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  return _mm256_blendv_ps(_mm256_castsi256_ps(r),
                          _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), nan);
}
static inline F16 round_bf16(F16 a) { return {round_half(a.lo), round_half(a.hi)}; }
static inline void round_both(F16& a, F16& b) {
  a = round_bf16(a);
  b = round_bf16(b);
}
static inline void store(bf16* p, F16 a) {
  const F16 r = round_bf16(a);
  const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(r.lo), 16);
  const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(r.hi), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
static inline void store_apart(bf16* p, F16 a) {
  bf16 words[16];
  store(words, a);
  for (int i = 0; i < 16; i++) p[2 * i] = words[i];
}
static inline F16 load(const int8_t* p) {
  return {_mm256_cvtepi32_ps(
              _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))),
          _mm256_cvtepi32_ps(
              _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8))))};
}
static inline void store_both(bf16* p, bf16* q, F16 a, F16 b) {
  store(p, a);
  store(q, b);
}
static inline void store_exact(bf16* p, F16 a) {
  const __m256i lo = _mm256_srli_epi32(_mm256_castps_si256(a.lo), 16);
  const __m256i hi = _mm256_srli_epi32(_mm256_castps_si256(a.hi), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}
static inline __m256 load_eight_powers(const uint8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 23));
}
static inline F16 load_powers(const uint8_t* p) {
  return {load_eight_powers(p), load_eight_powers(p + 8)};
}
static inline F16 widen_halves(__m256i h) {
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}
static inline F16 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline void store_bytes(int8_t* p, F16 a) {
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words),
                                   _mm256_extracti128_si256(words, 1)));
}
static inline void store_bytes(int8_t* p, const F16 (&a)[4]) {
  for (int i = 0; i < 4; i++) store_bytes(p + 16 * i, a[i]);
}
static inline __m256i join_pairs(__m256 even, __m256 odd) {
  const __m256i high = _mm256_and_si256(_mm256_castps_si256(odd),
                                        _mm256_set1_epi32(static_cast<int>(0xffff0000)));
  return _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), high);
}
static inline void store_pairs(bf16* p, F16 even, F16 odd) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), join_pairs(even.lo, odd.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 16), join_pairs(even.hi, odd.hi));
}
template <int By>
static inline __m256 mix_half(__m256 a) {
  const __m256 other = By == 1   ? _mm256_permute_ps(a, 0xb1)
                       : By == 2 ? _mm256_permute_ps(a, 0x4e)
                                 : _mm256_permute2f128_ps(a, a, 1);
  constexpr int higher = By == 1 ? 0xaa : By == 2 ? 0xcc : 0xf0;
  return _mm256_blend_ps(_mm256_add_ps(a, other), _mm256_sub_ps(other, a), higher);
}
template <int By>
static inline F16 mix(F16 a) {
  if constexpr (By == 8) return {_mm256_add_ps(a.lo, a.hi), _mm256_sub_ps(a.lo, a.hi)};
  else return {mix_half<By>(a.lo), mix_half<By>(a.hi)};
}
static inline void halves(F16 a, __m256& lo, __m256& hi) {
  lo = a.lo;
  hi = a.hi;
}

}  // namespace penstock::PENSTOCK_ISA
