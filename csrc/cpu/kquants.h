// Records of K-quants: 256 values of K of 16 columns, with their scales. ops/records.py has the
// layout, ops/linear.py the products.
//
// What scales the codes comes first, then 32 values of K after the other: four lines of their low bits,
// as in int4 (integers.h), and one or two of the bits above those. Four values of K of 16 columns come as
// one line of unsigned bytes, a word for each column.
#pragma once

#include "integers.h"

namespace penstock::PENSTOCK_ISA {

template <Weight W>
struct Record {
  static constexpr int bits = W == Weight::q4_k ? 4 : W == Weight::q5_k ? 5 : 6;
  static constexpr int group = W == Weight::q6_k ? 16 : 32;  // values of K that share a scale
  static constexpr int zero = W == Weight::q6_k ? 32 : 0;    // the code of 0; others have minima
  static constexpr int64_t groups = kRecord / group;
  // Where they lie: int8 factors [groups, 16] come first, then uint8 minima [groups / 2, 16, 2].
  static constexpr int64_t minima = groups * kColumns;
  static constexpr int64_t d = zero ? minima : 2 * minima;  // float16 [16], then dmin
  static constexpr int64_t head = 5 * 64, unit = bits * 64;
  static constexpr int64_t high = 4 * 64;  // of a unit: its upper bits
};

#if defined(__AVX512F__)

static inline Sums bytes_at(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline Sums operator|(Sums a, Sums b) { return {_mm512_or_si512(a.v, b.v)}; }
static inline Sums operator&(Sums a, int byte) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(byte)))};
}
// By bits of 16-bit words; negative: to the left.
template <int By>
static inline Sums shift_words(Sums a) {
  if constexpr (By >= 0) return {_mm512_srli_epi16(a.v, By)};
  return {_mm512_slli_epi16(a.v, By < 0 ? -By : 0)};
}
template <int By>
static inline Sums shift_lanes(Sums a) { return {_mm512_srli_epi32(a.v, By)}; }
static inline Sums low_byte(Sums a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(255))}; }
// Sixteen bytes pairs, each in a lane of 32 bits; all 32 bytes, each in a word.
static inline Sums widen_pairs(const uint8_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline Sums widen_words(const uint8_t* p) {
  return {_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// sum + products of words, by pairs.
static inline Sums add_words(Sums sum, Sums a, Sums b) {
  return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)};
}
template <int By>
static inline Sums raise_lanes(Sums a) { return {_mm512_slli_epi32(a.v, By)}; }

#else

static inline Sums bytes_at(const void* p) { return load_sums(static_cast<const int32_t*>(p)); }
static inline Sums operator|(Sums a, Sums b) {
  return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
}
static inline Sums operator&(Sums a, int byte) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(byte));
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
template <int By>
static inline Sums shift_words(Sums a) {
  if constexpr (By >= 0) return {_mm256_srli_epi16(a.lo, By), _mm256_srli_epi16(a.hi, By)};
  constexpr int left = By < 0 ? -By : 0;
  return {_mm256_slli_epi16(a.lo, left), _mm256_slli_epi16(a.hi, left)};
}
template <int By>
static inline Sums shift_lanes(Sums a) {
  return {_mm256_srli_epi32(a.lo, By), _mm256_srli_epi32(a.hi, By)};
}
static inline Sums low_byte(Sums a) {
  const __m256i mask = _mm256_set1_epi32(255);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
static inline Sums widen_pairs(const uint8_t* p) {
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1))};
}
static inline Sums widen_words(const uint8_t* p) {
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(at)), _mm256_cvtepu8_epi16(_mm_loadu_si128(at + 1))};
}
static inline Sums multiply_words(Sums a, Sums b) {
  return {_mm256_madd_epi16(a.lo, b.lo), _mm256_madd_epi16(a.hi, b.hi)};
}
static inline Sums add_words(Sums sum, Sums a, Sums b) { return sum + multiply_words(a, b); }
template <int By>
static inline Sums raise_lanes(Sums a) {
  return {_mm256_slli_epi32(a.lo, By), _mm256_slli_epi32(a.hi, By)};
}

#endif

// Codes 4 · (8 · unit + T) and the next three of 16 columns.
template <Weight W, int T>
[[gnu::always_inline]] static inline Sums record_codes(const uint8_t* record, int64_t unit) {
  const uint8_t *low = record + Record<W>::head + unit * Record<W>::unit, *high = low + Record<W>::high;
  const Sums codes = shift_words<T % 2 ? 4 : 0>(bytes_at(low + T / 2 * 64)) & 15;
  if constexpr (W == Weight::q5_k) return codes | (shift_words<T - 4>(bytes_at(high)) & 16);
  if constexpr (W == Weight::q6_k)
    return codes | (shift_words<2 * (T % 4) - 4>(bytes_at(high + T / 4 * 64)) & 48);
  return codes;
}

// float16 d, and dmin, of each column.
template <Weight W>
static inline F16 record_scale(const uint8_t* record) {
  return load_half(reinterpret_cast<const uint16_t*>(record + Record<W>::d));
}
template <Weight W>
static inline F16 record_least(const uint8_t* record) {
  return load_half(reinterpret_cast<const uint16_t*>(record + Record<W>::d) + kColumns);
}

// What a group's codes are multiplied by, and what is added: w = code · step + start.
template <Weight W>
static inline void record_steps(const uint8_t* record, int64_t g, F16& step, F16& start) {
  using R = Record<W>;
  const auto* factors = reinterpret_cast<const int8_t*>(record) + g * kColumns;
  step = record_scale<W>(record) * to_float(widen_bytes(factors));
  if constexpr (R::zero != 0) {
    start = step * set1(static_cast<float>(-R::zero));
  } else {
    const Sums pairs = widen_pairs(record + R::minima + g / 2 * 2 * kColumns);
    const Sums own = g % 2 ? shift_lanes<8>(pairs) : low_byte(pairs);
    start = zero() - record_least<W>(record) * to_float(own);
  }
}

template <Weight W, int T, typename T2>
static inline void unpack_codes_of(const uint8_t* record, int64_t unit, F16 step, F16 start, T2* out) {
  const Sums codes = record_codes<W, T>(record, unit);
  F16 a = fma(to_float(low_byte(codes)), step, start);
  F16 b = fma(to_float(low_byte(shift_lanes<8>(codes))), step, start);
  F16 c = fma(to_float(low_byte(shift_lanes<16>(codes))), step, start);
  F16 d = fma(to_float(shift_lanes<24>(codes)), step, start);
  round_both(a, b);
  round_both(c, d);
  bf16* lines = reinterpret_cast<bf16*>(out) + T * 4 * kColumns;
  constexpr bool crosses = std::is_same_v<T2, crossed>;
  crosses ? store_pairs(lines, c, a) : store_pairs(lines, a, b);
  crosses ? store_pairs(lines + 2 * kColumns, d, b) : store_pairs(lines + 2 * kColumns, c, d);
}

// Values [first, last) of K of a panel, rounded to bfloat16, crossed where T says so.
template <Weight W, typename T>
static inline void unpack_records(const Panel& w, int64_t first, int64_t last, T* out) {
  using R = Record<W>;
  for (int64_t k = first; k < last; k += kUnit, out += kUnit * kColumns) {
    const uint8_t* record = w.data + k / kRecord * w.record_bytes;
    const int64_t unit = k % kRecord / kUnit;
    F16 step, start;
    record_steps<W>(record, unit * kUnit / R::group, step, start);
    unpack_codes_of<W, 0>(record, unit, step, start, out);
    unpack_codes_of<W, 1>(record, unit, step, start, out);
    unpack_codes_of<W, 2>(record, unit, step, start, out);
    unpack_codes_of<W, 3>(record, unit, step, start, out);
    if constexpr (R::group < kUnit)
      record_steps<W>(record, unit * kUnit / R::group + 1, step, start);
    unpack_codes_of<W, 4>(record, unit, step, start, out);
    unpack_codes_of<W, 5>(record, unit, step, start, out);
    unpack_codes_of<W, 6>(record, unit, step, start, out);
    unpack_codes_of<W, 7>(record, unit, step, start, out);
  }
}

// body(a constant of the kind) for a panel of records, which lie at `data`.
template <typename Body>
static inline void with_records(Weight kind, const void* data, Body body) {
  switch (record_kind(kind, data)) {
    case Weight::q4_k: return body.template operator()<Weight::q4_k>();
    case Weight::q5_k: return body.template operator()<Weight::q5_k>();
    case Weight::q6_k: return body.template operator()<Weight::q6_k>();
    default: break;
  }
}

}  // namespace penstock::PENSTOCK_ISA
