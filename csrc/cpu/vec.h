// Sixteen virtual float lanes: one AVX-512 register, or two of AVX2. Same operations, same bits.
#pragma once

#include <immintrin.h>

#include "records.h"

namespace penstock::PENSTOCK_ISA {

// While it lives, this thread reads and writes denormals as zero, as AMX does.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};

#if defined(__AVX512F__)

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

#else

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

#endif

// E4M3 by way of float16, which has the same shape and 2^8 times the bias, and whose smallest values
// DAZ leaves alone.
static inline F16 load(const fp8* p) {
  const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i sign = _mm256_slli_epi16(_mm256_srli_epi16(b, 7), 15);
  const __m256i size = _mm256_slli_epi16(_mm256_and_si256(b, _mm256_set1_epi16(0x7f)), 7);
  const __m256i nan = _mm256_and_si256(_mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80)),
                                       _mm256_set1_epi16(0x7e00));
  return widen_halves(_mm256_or_si256(_mm256_or_si256(sign, size), nan)) * set1(256.0f);
}

// The defined order of a sum over lanes: l with l + 8, then l + 4, l + 2, l + 1.
static inline float reduce_add(F16 a) {
  __m256 lo, hi;
  halves(a, lo, hi);
  const __m256 s8 = _mm256_add_ps(lo, hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

static inline float reduce_max(F16 a) {
  __m256 lo, hi;
  halves(a, lo, hi);
  const __m256 s8 = _mm256_max_ps(lo, hi);
  const __m128 s4 = _mm_max_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_max_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_max_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

// One value, for the ends of rows.
static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  const uint32_t u = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
static inline void from_float(float x, float& out) { out = x; }
static inline void from_float(float x, bf16& out) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  u = x != x ? 0x7fc00000u : u + 0x7fff + ((u >> 16) & 1);
  out.bits = static_cast<uint16_t>(u >> 16);
}

static inline void from_float(float x, int8_t& out) { out = static_cast<int8_t>(x); }
// Nearest E4M3, ties to even, never beyond ±448.
static inline void from_float(float x, fp8& out) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  const uint32_t sign = u >> 24 & 0x80, size = u & 0x7fffffff;
  uint32_t bits;
  if (size > 0x7f800000)
    bits = 0x7f;
  else if (size >= 0x43e00000)  // 448
    bits = 0x7e;
  else if (size >= 0x3c800000)  // 2^-6, the smallest normal
    bits = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
  else
    bits = static_cast<uint32_t>(__builtin_rintf(__builtin_fabsf(x) * 512.0f));
  out.bits = static_cast<uint8_t>(sign | bits);
}

// The nearest value of E4M3, ties to even, never beyond ±448; it stays a float. 1.5 · 2^20 times the
// power of two below a value has the step of E4M3 there.
static inline F16 round_e4m3(F16 a) {
  const F16 end = set1(448.0f), x = min(max(a, zero() - end), end);
  const F16 raise = max(power_below(x), set1(0x1p-6f)) * set1(0x1.8p20f);
  return (x + raise) - raise;
}

template <typename T>
static inline F16 load_some(const T* p, int count) {
  if (count >= 16) return load(p);
  float tmp[16] = {};
  for (int i = 0; i < count; i++) tmp[i] = to_float(p[i]);
  return load(tmp);
}
template <typename T>
static inline void store_some(T* p, F16 a, int count) {
  if (count >= 16) return store(p, a);
  float tmp[16];
  store(tmp, a);
  for (int i = 0; i < count; i++) from_float(tmp[i], p[i]);
}

// What T can hold of a: the value that a store and a load would give back.
template <typename T>
static inline F16 round_to(F16 a);
template <>
inline F16 round_to<float>(F16 a) {
  return a;
}
template <>
inline F16 round_to<bf16>(F16 a) {
  return round_bf16(a);
}

// One bit for each lane, the lowest for the first: whether x ≥ limit (a NaN isn't).
static inline unsigned not_less(F16 x, F16 limit) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ);
#else
  const int lo = _mm256_movemask_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_GE_OQ));
  const int hi = _mm256_movemask_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_GE_OQ));
  return static_cast<unsigned>(lo | hi << 8);
#endif
}

}  // namespace penstock::PENSTOCK_ISA
