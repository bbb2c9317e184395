// Quantized panels: their lines of 64 bytes, and 32 values of K times some rows.
//
// int8 panel: [K/4, 16, 4], a line is 4 k of 16 columns. int4 panel: [K/8, 16, 4], a byte holds two
// unsigned values: k = 8i + j in the low half and 8i + 4 + j in the high one. Integer sums are
// exact, so each instruction set may take its own way to them.
#pragma once

#include "panels.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kUnit = 32;          // values of K in one step; every group is a multiple
constexpr int64_t kAheadBytes = 4096;  // how far ahead of a stream memory is asked for

template <int Bits>
constexpr int64_t kLines = kUnit* Bits / 32;  // lines of one unit

static inline void prefetch_bytes(const uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

static inline int32_t word(const int8_t* p) {
  int32_t w;
  __builtin_memcpy(&w, p, 4);
  return w;
}

// A quantized matrix's panel: ops/linear.py.
struct Panel {
  const uint8_t* data;
  const void* scale;      // [groups, 16]
  const void* zero;       // [groups, 16] 0 … 15 of int4, signed of int8; null: 8 for int4, else 0
  const uint8_t* fine;    // [K / 16, 16] E4M3 of nvfp4
  const float* table;     // [16] of levels and nvfp4
  int64_t group, groups;  // values of K that share a scale; how many such groups
  Scale scale_type;
  int64_t record_bytes;   // of what has records

  F16 scales(int64_t g) const {
    if (!scale) return set1(1.0f);  // records have theirs in them
    const int64_t at = g * kColumns;
    if (scale_type == Scale::f16) return load_half(static_cast<const uint16_t*>(scale) + at);
    if (scale_type == Scale::e8m0) return load_powers(static_cast<const uint8_t*>(scale) + at);
    return load(static_cast<const float*>(scale) + at);
  }
};

#if defined(__AVX512F__)

// 16 sums of 32 bits.
struct Sums {
  __m512i v;
};
static inline F16 to_float(Sums a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline Sums set_sums(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline Sums load_sums(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline Sums operator*(Sums a, Sums b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
static inline Sums operator+(Sums a, Sums b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline Sums widen_bytes(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
static inline Sums widen_bytes(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

// Products are of unsigned weights: int8 ones are raised by 128, which the caller takes off again.
template <int Bits>
constexpr int32_t kRaised = Bits == 8 ? 128 : 8;

// acc[r][p] += 32 values of K of row r times panel p; panels lie `stride` bytes apart.
template <int R, int P, int Bits, typename Asks>
static inline void multiply_unit(const uint8_t* w, int64_t stride, const int8_t* x, int64_t ldx,
                                 Asks& asks, Sums (&acc)[R][P]) {
  const __m512i raise = _mm512_set1_epi8(static_cast<char>(0x80)), low = _mm512_set1_epi8(15);
#pragma GCC unroll 2
  for (int p = 0; p < P; p++) asks.template lines<kLines<Bits>>(w + p * stride);
#pragma GCC unroll 8
  for (int i = 0; i < kLines<Bits>; i++) {
    constexpr int parts = Bits == 8 ? 1 : 2;  // of a line, 4 values of K each
    __m512i lines[P][parts];
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      const uint8_t* at = w + p * stride + i * 64;
      const __m512i line = _mm512_loadu_si512(at);
      if constexpr (Bits == 8) {
        lines[p][0] = _mm512_xor_si512(line, raise);
      } else {
        lines[p][0] = _mm512_and_si512(line, low);
        lines[p][1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), low);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int h = 0; h < parts; h++) {
        const __m512i xs = _mm512_set1_epi32(word(x + r * ldx + 4 * (parts * i + h)));
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
          acc[r][p].v = _mm512_dpbusd_epi32(acc[r][p].v, lines[p][h], xs);
      }
  }
}

// An int4 line as two int8 lines of q − z; `z` holds each column's four times.
static inline void split_line(const uint8_t* line, Sums z, int8_t* out) {
  const __m512i v = _mm512_loadu_si512(line), low = _mm512_set1_epi8(15);
  _mm512_storeu_si512(out, _mm512_sub_epi8(_mm512_and_si512(v, low), z.v));
  _mm512_storeu_si512(out + 64,
                      _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(v, 4), low), z.v));
}

#else

struct Sums {
  __m256i lo, hi;
};
static inline F16 to_float(Sums a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline Sums set_sums(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline Sums load_sums(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
static inline Sums operator*(Sums a, Sums b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
static inline Sums operator+(Sums a, Sums b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
static inline Sums widen_bytes(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline Sums widen_bytes(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}

// int8 products go by |w| and ±x, since u8 · s8 pairs would overflow 16 bits.
template <int Bits>
constexpr int32_t kRaised = Bits == 8 ? 0 : 8;

// The sum so far stays where it is: left alone, gcc computes all products of a unit first, keeps
// them in memory and adds them up at the end.
static inline void settle(__m256i& sum) { asm("" : "+x"(sum)); }

template <int R, int P, int Bits, typename Asks>
static inline void multiply_unit(const uint8_t* w, int64_t, const int8_t* x, int64_t ldx,
                                 Asks& asks, Sums (&acc)[R][P]) {
  static_assert(P == 1, "sixteen registers hold the sums of one panel");
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  if constexpr (Bits == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < kLines<8>; i++) {
      asks.line(w + i * 64);
      const __m256i* at = reinterpret_cast<const __m256i*>(w + i * 64);
      const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
      const __m256i mag_a = _mm256_abs_epi8(a), mag_b = _mm256_abs_epi8(b);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m256i xs = _mm256_set1_epi32(word(x + r * ldx + 4 * i));
        const __m256i pa = _mm256_maddubs_epi16(mag_a, _mm256_sign_epi8(xs, a));
        const __m256i pb = _mm256_maddubs_epi16(mag_b, _mm256_sign_epi8(xs, b));
        acc[r][0].lo = _mm256_add_epi32(acc[r][0].lo, _mm256_madd_epi16(pa, ones));
        acc[r][0].hi = _mm256_add_epi32(acc[r][0].hi, _mm256_madd_epi16(pb, ones));
        settle(acc[r][0].lo);
        settle(acc[r][0].hi);
      }
    }
  } else {
    // eight products of at most 2 · 15 · 127 fit into 16 bits
    __m256i lo[R], hi[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) lo[r] = hi[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < kLines<4>; i++) {
      asks.line(w + i * 64);
      const __m256i* at = reinterpret_cast<const __m256i*>(w + i * 64);
      const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
      const __m256i a0 = _mm256_and_si256(a, low), b0 = _mm256_and_si256(b, low);
      const __m256i a1 = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
      const __m256i b1 = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m256i x0 = _mm256_set1_epi32(word(x + r * ldx + 8 * i));
        const __m256i x1 = _mm256_set1_epi32(word(x + r * ldx + 8 * i + 4));
        lo[r] = _mm256_add_epi16(lo[r], _mm256_add_epi16(_mm256_maddubs_epi16(a0, x0),
                                                         _mm256_maddubs_epi16(a1, x1)));
        hi[r] = _mm256_add_epi16(hi[r], _mm256_add_epi16(_mm256_maddubs_epi16(b0, x0),
                                                         _mm256_maddubs_epi16(b1, x1)));
        settle(lo[r]);
        settle(hi[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      acc[r][0].lo = _mm256_add_epi32(acc[r][0].lo, _mm256_madd_epi16(lo[r], ones));
      acc[r][0].hi = _mm256_add_epi32(acc[r][0].hi, _mm256_madd_epi16(hi[r], ones));
    }
  }
}

static inline void split_half(__m256i v, __m256i z, int8_t* out) {
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i high = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_sub_epi8(_mm256_and_si256(v, low), z));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 64), _mm256_sub_epi8(high, z));
}
static inline void split_line(const uint8_t* line, Sums z, int8_t* out) {
  const __m256i* at = reinterpret_cast<const __m256i*>(line);
  split_half(_mm256_loadu_si256(at), z.lo, out);
  split_half(_mm256_loadu_si256(at + 1), z.hi, out + 32);
}

#endif

// The zero points of a group that has them.
template <int Bits>
static inline Sums zero_points(const Panel& w, int64_t g) {
  const int64_t at = g * kColumns;
  return Bits == 4 ? widen_bytes(static_cast<const uint8_t*>(w.zero) + at)
                   : widen_bytes(static_cast<const int8_t*>(w.zero) + at);
}

// A group's sums as floats, times the row's scale of the group where it has any.
[[gnu::always_inline]] static inline F16 scaled_sum(Sums sum, const float* x_scale, int64_t at) {
  const F16 found = to_float(sum);
  return x_scale ? found * set1(x_scale[at]) : found;
}

#if defined(__AVX512F__)

// Whether an int4 panel's groups are the usual ones: codes less 8, by scales of float16.
static inline bool is_plain(const Panel& w, const float* x_scale) {
  return !w.zero && !x_scale && w.scale_type == Scale::f16;
}

// What multiply_ints does of such a one, without a decision in each group.
template <int R, typename Asks>
[[gnu::always_inline]] static inline void multiply_plain(const Panel& w, const int8_t* x, int64_t ldx,
                                                         const int32_t* sums, int64_t lds, Asks& asks,
                                                         F16 (&total)[R][1]) {
  const uint8_t* lines = w.data;
  const uint16_t* scale = static_cast<const uint16_t*>(w.scale);
  const int64_t units = w.group / kUnit;
  for (int64_t g = w.groups; g > 0; g--, scale += kColumns, sums++) {
    Sums acc[R][1];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][0] = set_sums(sums[r * lds]);
    for (int64_t u = units; u > 0; u--, lines += kLines<4> * 64, x += kUnit) {
      asks.block();
      multiply_unit<R, 1, 4>(lines, 0, x, ldx, asks, acc);
    }
    asks.scales(scale);
    const F16 s = load_half(scale);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r][0] = fma(to_float(acc[r][0]), s, total[r][0]);
  }
}

#endif

// total[r][p] = Σ over groups of scale · Σ over k of (q − z) · x, for R rows of int8 and P panels.
// sums [rows, groups], `lds` apart: −Σ over k of x, times kRaised where there are no zero points. x_scale,
// the same of rows in blocks, else null: what each group's sum is multiplied by before.
template <int R, int P, int Bits, typename Asks>
[[gnu::always_inline]] static inline void multiply_ints(const Panel (&w)[P], const int8_t* x,
                                                        int64_t ldx, const int32_t* sums,
                                                        int64_t lds, const float* x_scale, Asks& asks,
                                                        F16 (&total)[R][P]) {
  static_assert(P <= 2);
  clear(total);
#if defined(__AVX512F__)
  if constexpr (P == 1 && Bits == 4)
    if (is_plain(w[0], x_scale)) return multiply_plain<R>(w[0], x, ldx, sums, lds, asks, total);
#endif
  const uint8_t* data = w[0].data;
  const int64_t stride = w[P - 1].data - w[0].data;
  for (int64_t g = 0; g < w[0].groups; g++) {
    Sums acc[R][P];
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      if (w[0].zero) {
        Sums z = zero_points<Bits>(w[p], g);
        if constexpr (Bits == 8) z = z + set_sums(kRaised<8>);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][p] = z * set_sums(sums[r * lds + g]);
      } else {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][p] = set_sums(sums[r * lds + g]);
      }
    }
    for (int64_t k = 0; k < w[0].group; k += kUnit, data += kLines<Bits> * 64) {
      asks.block();
      multiply_unit<R, P, Bits>(data, stride, x + g * w[0].group + k, ldx, asks, acc);
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) {
      const F16 s = w[p].scales(g);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        total[r][p] = fma(scaled_sum(acc[r][p], x_scale, r * lds + g), s, total[r][p]);
    }
  }
}

// Values [first, last) of K of an int4 panel, q − z, as an int8 panel.
static inline void unpack_int8(const Panel& w, int64_t first, int64_t last, int8_t* out) {
  for (int64_t k = first; k < last; k += 8) {
    const int64_t g = k / w.group;
    const Sums z = w.zero ? zero_points<4>(w, g) : set_sums(8);
    prefetch_bytes(w.data + k * 8 + kAheadBytes);
    split_line(w.data + k * 8, z * set_sums(0x01010101), out + (k - first) * kColumns);
  }
}

}  // namespace penstock::PENSTOCK_ISA
