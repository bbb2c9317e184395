// Sixteen virtual float lanes: one AVX-512 register, or two of AVX2. Same operations, same bits.
#pragma once

#include <immintrin.h>

#if defined(__AVX512F__)
#include "vec_avx512.h"
#else
#include "vec_avx2.h"
#endif

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
