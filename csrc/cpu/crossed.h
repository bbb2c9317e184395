// Rows of bfloat16 for vdpbf16ps, whose sums are then the same bits as those of FMAs.
//
// It adds two products to each lane, that of the upper halves of words before that of the lower ones,
// each addition rounded by itself and denormals taken for zero (Intel SDM, VDPBF16PS). Sums over K
// are defined as even products in order and odd products in order (panels.h). So four values
// a b c d of K cross: the words (a c) and (b d), upper half first, take an even and an odd sum two
// steps on.
#pragma once

#include <type_traits>

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

constexpr int kColumns = 16;  // of a panel

// A value of a row whose fours lie as the words (a c) and (b d): c a d b in memory. Of a panel: its
// lines two by two, the words of 16 columns (a c) in the first, (b d) in the second.
struct crossed {
  uint16_t bits;
};

#if defined(__AVX512BF16__)

constexpr bool kCrosses = true;

struct Crossed {
  __m512bh even, odd;
};

// Four values of K of 16 columns: two lines of a panel.
static inline Crossed load_crossed(const bf16* lines) {
  const __m512i ab = _mm512_loadu_si512(lines), cd = _mm512_loadu_si512(lines + 2 * kColumns);
  // within each word: the lower half into the upper one, and back
  const __m512i raise = _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
  const __m512i lower = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  const __m512i even = _mm512_mask_shuffle_epi8(cd, 0xccccccccccccccccull, ab, raise);
  const __m512i odd = _mm512_mask_shuffle_epi8(ab, 0x3333333333333333ull, cd, lower);
  return {reinterpret_cast<__m512bh>(even), reinterpret_cast<__m512bh>(odd)};
}

static inline Crossed load_crossed(const crossed* lines) {
  return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(lines)),
          reinterpret_cast<__m512bh>(_mm512_loadu_si512(lines + 2 * kColumns))};
}

static inline void store_crossed(crossed* lines, const Crossed& four) {
  _mm512_storeu_si512(lines, reinterpret_cast<__m512i>(four.even));
  _mm512_storeu_si512(lines + 2 * kColumns, reinterpret_cast<__m512i>(four.odd));
}

// A panel of `k` values of K; it may be its own result.
static inline void cross_panel(const bf16* from, int64_t k, crossed* to) {
  for (int64_t j = 0; j < k * kColumns; j += 4 * kColumns) store_crossed(to + j, load_crossed(from + j));
}

// Four values of a row for all columns.
static inline Crossed set_crossed(const crossed* four) {
  int32_t even, odd;
  __builtin_memcpy(&even, four, 4);
  __builtin_memcpy(&odd, four + 2, 4);
  return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(even)),
          reinterpret_cast<__m512bh>(_mm512_set1_epi32(odd))};
}

static inline F16 dot(__m512bh x, __m512bh w, F16 sum) {
  return {_mm512_dpbf16_ps(sum.v, x, w)};
}

// Sixteen values of a row, rounded to bfloat16.
static inline void store_crossed(crossed* out, F16 a) {
  constexpr int order = _MM_SHUFFLE(1, 3, 0, 2);
  const __m256i v = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, order), order));
}

// A row of `count` floats, a multiple of 16.
static inline void cross_row(const float* row, int64_t count, crossed* out) {
  for (int64_t j = 0; j < count; j += 16) store_crossed(out + j, load(row + j));
}

#else

constexpr bool kCrosses = false;
static inline void cross_row(const float*, int64_t, crossed*) {}

#endif

// The rows that panels of T are multiplied by.
template <typename T>
using RowOf = std::conditional_t<kCrosses && std::is_same_v<T, bf16>, crossed, float>;

}  // namespace penstock::PENSTOCK_ISA
