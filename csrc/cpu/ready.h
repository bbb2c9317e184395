// Integer panels that many rows pass over, made ready once: AVX2.
//
// int4 becomes unsigned bytes, [K/4, 16, 4]. int8 becomes a line of magnitudes and one of its signs as
// masks: x · w = |w| · (x ^ mask) + |w| where w is negative, since -x = ~x + 1. Exclusive or runs on
// twice as many ports as psignb, and what it leaves out doesn't depend on x. Sums stay within int16:
// |w| ≤ 128 and ~x in -128 … 127, two products.
#pragma once

#include "integers.h"

namespace penstock::PENSTOCK_ISA {

struct Ready {
  uint8_t* lines;
  float* scale;   // [groups, 16]
  int32_t* zero;  // [groups, 16] zero points, or null
  int32_t* left;  // [groups, 16] of int8: what the exclusive or leaves out
  int64_t group, groups;
};

template <int Bits>
constexpr int64_t kReadyLine = Bits == 8 ? 128 : 64;  // bytes of 4 values of K

template <int Bits>
constexpr size_t ready_bytes(int64_t k, int64_t groups) {
  return static_cast<size_t>(k / 4 * kReadyLine<Bits> + groups * kColumns * 12);
}

static inline __m256i eight_sums(__m256i bytes) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, _mm256_set1_epi8(1)), _mm256_set1_epi16(1));
}

// Half a line of int8: magnitudes to `out`, masks 64 bytes on, and |w| of those below zero into `left`.
static inline void turn_half(const uint8_t* line, uint8_t* out, __m256i& left) {
  const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line));
  const __m256i size = _mm256_abs_epi8(w), mask = _mm256_cmpgt_epi8(_mm256_setzero_si256(), w);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), size);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64), mask);
  left = _mm256_add_epi32(left, eight_sums(_mm256_and_si256(size, mask)));
}

// One group's lines, from `data` on.
template <int Bits>
static inline void ready_group(const Ready& to, const uint8_t* data, int64_t g) {
  uint8_t* out = to.lines + g * to.group / 4 * kReadyLine<Bits>;
  if constexpr (Bits == 8) {
    Sums left = set_sums(0);
    for (int64_t k = 0; k < to.group; k += 4, data += 64, out += 128) {
      turn_half(data, out, left.lo);
      turn_half(data + 32, out + 32, left.hi);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.left + g * kColumns), left.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.left + g * kColumns + 8), left.hi);
  } else {
    for (int64_t k = 0; k < to.group; k += 8, data += 64, out += 128)
      split_line(data, set_sums(0), reinterpret_cast<int8_t*>(out));
  }
}

template <int Bits>
static inline Ready make_ready(const Panel& w, uint8_t* memory) {
  const int64_t values = w.groups * kColumns;
  Ready to = {memory, nullptr, nullptr, nullptr, w.group, w.groups};
  to.scale = reinterpret_cast<float*>(memory + w.group * w.groups / 4 * kReadyLine<Bits>);
  to.left = reinterpret_cast<int32_t*>(to.scale + values);
  if (w.zero) to.zero = to.left + values;
  for (int64_t g = 0; g < w.groups; g++) {
    ready_group<Bits>(to, w.data + g * w.group * kColumns * Bits / 8, g);
    store(to.scale + g * kColumns, w.scales(g));
    if (!w.zero) continue;
    const Sums zero = zero_points<Bits>(w, g);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.zero + g * kColumns), zero.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.zero + g * kColumns + 8), zero.hi);
  }
  return to;
}

// What the sum of a group begins with; `sum`: as `multiply_ints` takes it.
template <int Bits, bool Zero>
static inline Sums first_sums(const Ready& w, int64_t g, int32_t sum) {
  Sums found = Bits == 8 ? load_sums(w.left + g * kColumns) : set_sums(Zero ? 0 : sum);
  if constexpr (Zero) found = found + load_sums(w.zero + g * kColumns) * set_sums(sum);
  return found;
}

// acc[r] += 32 values of K of row r.
template <int R>
static inline void multiply_turned(const uint8_t* lines, const int8_t* x, int64_t ldx,
                                   Sums (&acc)[R]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m256i* at = reinterpret_cast<const __m256i*>(lines + i * 128);
    const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m256i xs = _mm256_set1_epi32(word(x + r * ldx + 4 * i));
      const __m256i xa = _mm256_xor_si256(xs, _mm256_loadu_si256(at + 2));
      const __m256i xb = _mm256_xor_si256(xs, _mm256_loadu_si256(at + 3));
      const __m256i pa = _mm256_maddubs_epi16(a, xa), pb = _mm256_maddubs_epi16(b, xb);
      acc[r].lo = _mm256_add_epi32(acc[r].lo, _mm256_madd_epi16(pa, ones));
      acc[r].hi = _mm256_add_epi32(acc[r].hi, _mm256_madd_epi16(pb, ones));
      settle(acc[r].lo);
      settle(acc[r].hi);
    }
  }
}

// The same of unsigned bytes below 16: sixteen products of at most 15 · 127 fit into 16 bits.
template <int R>
static inline void multiply_small(const uint8_t* lines, const int8_t* x, int64_t ldx,
                                  Sums (&acc)[R]) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i lo[R], hi[R];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m256i* at = reinterpret_cast<const __m256i*>(lines + i * 64);
    const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m256i xs = _mm256_set1_epi32(word(x + r * ldx + 4 * i));
      const __m256i pa = _mm256_maddubs_epi16(a, xs), pb = _mm256_maddubs_epi16(b, xs);
      lo[r] = i ? _mm256_add_epi16(lo[r], pa) : pa;
      hi[r] = i ? _mm256_add_epi16(hi[r], pb) : pb;
      settle(lo[r]);
      settle(hi[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    acc[r].lo = _mm256_add_epi32(acc[r].lo, _mm256_madd_epi16(lo[r], ones));
    acc[r].hi = _mm256_add_epi32(acc[r].hi, _mm256_madd_epi16(hi[r], ones));
  }
}

// total[r][0] = Σ over groups of scale · Σ over k of (q − z) · x, for R rows, as `multiply_ints` does.
template <int R, int Bits, bool Zero>
[[gnu::always_inline]] static inline void multiply_ready(const Ready& w, const int8_t* x,
                                                         int64_t ldx, const int32_t* sums,
                                                         const float* x_scale, Bursts& bursts,
                                                         F16 (&total)[R][1]) {
  clear(total);
  const uint8_t* lines = w.lines;
  for (int64_t g = 0; g < w.groups; g++) {
    Sums acc[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] = first_sums<Bits, Zero>(w, g, sums[r * w.groups + g]);
    for (int64_t k = 0; k < w.group; k += kUnit, lines += kUnit / 4 * kReadyLine<Bits>, x += kUnit) {
      bursts.block();
      if constexpr (Bits == 8)
        multiply_turned<R>(lines, x, ldx, acc);
      else
        multiply_small<R>(lines, x, ldx, acc);
    }
    const F16 s = load(w.scale + g * kColumns);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      total[r][0] = fma(scaled_sum(acc[r], x_scale, r * w.groups + g), s, total[r][0]);
  }
}

}  // namespace penstock::PENSTOCK_ISA
