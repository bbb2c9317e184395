// Keys and values of four bits as bfloat16: ops/kv_int4.py says what the bytes mean.
//
// A line is 16 columns of two values of k, as in panels of bfloat16, in 16 bytes. A byte holds two
// values of one token, so that tokens can be written by different threads. code · step is exact, so
// code · step + minimum is one rounding, and another, halves away from zero, makes it bfloat16.
#pragma once

#include "panels.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kLineBytes = 16;  // of two k of 16 columns

// Sixteen codes, a byte each.
static inline F16 from_codes(__m128i bytes) {
#if defined(__AVX512F__)
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes))};
#else
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
#endif
}

static inline void take_nibbles(const uint8_t* line, __m128i& low, __m128i& high) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line));
  const __m128i mask = _mm_set1_epi8(15);
  low = _mm_and_si128(bytes, mask);
  high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
}

#if defined(__AVX512F__)
static inline F16 half_up(F16 a) {
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x8000)))};
}
#else
static inline __m256 half_up(__m256 a) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_castps_si256(a), _mm256_set1_epi32(0x8000)));
}
static inline F16 half_up(F16 a) { return {half_up(a.lo), half_up(a.hi)}; }
#endif

// Two values of k of each column, each with a step and a minimum, as a line of bfloat16.
static inline void store_line(bf16* to, __m128i even, __m128i odd, const F16 (&step)[2],
                              const F16 (&minimum)[2]) {
  store_pairs(to, half_up(fma(from_codes(even), step[0], minimum[0])),
              half_up(fma(from_codes(odd), step[1], minimum[1])));
}

// A line of keys: byte c holds the even and the odd dimension of token c.
static inline void widen_keys(const uint8_t* line, const F16 (&step)[2], const F16 (&minimum)[2],
                              bf16* to) {
  __m128i low, high;
  take_nibbles(line, low, high);
  store_line(to, low, high, step, minimum);
}

// A line of values: bytes 0 … 7 hold the even position, 8 … 15 the odd one; of each, byte c the
// columns c and c + 8.
static inline void widen_values(const uint8_t* line, const F16 (&step)[2], const F16 (&minimum)[2],
                                bf16* to) {
  __m128i low, high;
  take_nibbles(line, low, high);
  store_line(to, _mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high), step, minimum);
}

// Step and minimum, float16, of `count` values in a row whose smallest and largest are given; a
// `poison` of NaN makes the step NaN.
static inline void choose_step(float low, float high, float poison, uint16_t& step,
                               uint16_t& minimum) {
  const float most = 65504.0f, least = 5.9604645e-8f;  // float16's
  low = (low < -most ? -most : low > most ? most : low) + 0.0f;  // of −0, 0
  minimum = _cvtss_sh(low, _MM_FROUND_TO_NEAREST_INT);
  float size = (high - _cvtsh_ss(minimum)) / 15.0f;
  size = size < least ? least : size > most ? most : size;
  step = _cvtss_sh(size + poison, _MM_FROUND_TO_NEAREST_INT);
}

// The codes of 16 values, still floats.
static inline F16 to_codes(F16 x, F16 step, F16 minimum) {
  return max(min(round_even((x - minimum) / step), set1(15.0f)), zero());
}

}  // namespace penstock::PENSTOCK_ISA
