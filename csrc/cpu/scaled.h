// Rows in int8, each kRecord values with a scale, times records of K-quants: sums of integers are
// exact within a record, scales of groups and minima included.
#pragma once

#include "kquants.h"
#include "linear.h"

namespace penstock::PENSTOCK_ISA {

// A record as memory has it: codes are put together each time. Asks: see ahead.h.
template <Weight W, typename Asks = Quiet>
class Direct {
 public:
  explicit Direct(const uint8_t* record, const Asks& asks = {}) : at_(record), asks_(asks) {
    for (int64_t at = 0; at < Record<W>::head; at += 64) asks_.line(record + at);
  }

  // The codes of a unit come next.
  void ask(int64_t unit) const {
    const uint8_t* lines = at_ + Record<W>::head + unit * Record<W>::unit;
#pragma GCC unroll 8
    for (int64_t at = 0; at < Record<W>::unit; at += 64) asks_.line(lines + at);
  }

  template <int T>
  Sums codes(int64_t unit) const { return record_codes<W, T>(at_, unit); }
  // A group's factor of each column: 32 bits or, of AVX2, twice 16.
  Sums factor(int64_t g) const {
    const auto* p = reinterpret_cast<const int8_t*>(at_) + g * kColumns;
    const Sums wide = widen_bytes(p);
#if defined(__AVX512F__)
    return wide;
#else
    return {_mm256_blend_epi16(wide.lo, _mm256_slli_epi32(wide.lo, 16), 0xaa),
            _mm256_blend_epi16(wide.hi, _mm256_slli_epi32(wide.hi, 16), 0xaa)};
#endif
  }
  // Minima of the groups 2 · i and 2 · i + 1: words.
  Sums minima(int64_t i) const { return widen_words(at_ + Record<W>::minima + i * 2 * kColumns); }
  F16 scale() const { return record_scale<W>(at_); }
  F16 least() const { return zero() - record_least<W>(at_); }

 private:
  const uint8_t* at_;
  const Asks asks_;
};

// A record that many rows pass over, put together once, in lines of 64 bytes.
template <Weight W>
class Assembled {
 public:
  static constexpr size_t bytes = (kRecord / 4 + Record<W>::groups + 4 + 2) * 64;

  Assembled(const uint8_t* record, uint8_t* memory) : at_(memory) {
    const Direct<W> from(record);
    for (int64_t unit = 0; unit < kRecord / kUnit; unit++) {
      uint8_t* to = line(unit * 8);
      put(to, from.template codes<0>(unit));
      put(to + 64, from.template codes<1>(unit));
      put(to + 128, from.template codes<2>(unit));
      put(to + 192, from.template codes<3>(unit));
      put(to + 256, from.template codes<4>(unit));
      put(to + 320, from.template codes<5>(unit));
      put(to + 384, from.template codes<6>(unit));
      put(to + 448, from.template codes<7>(unit));
    }
    for (int64_t g = 0; g < Record<W>::groups; g++) put(line(kFactors + g), from.factor(g));
    store(floats(0), from.scale());
    if constexpr (Record<W>::zero != 0) return;
    for (int64_t i = 0; i < 4; i++) put(line(kMinima + i), from.minima(i));
    store(floats(1), from.least());
  }

  void ask(int64_t) const {}
  template <int T>
  Sums codes(int64_t unit) const { return bytes_at(line(unit * 8 + T)); }
  Sums factor(int64_t g) const { return bytes_at(line(kFactors + g)); }
  Sums minima(int64_t i) const { return bytes_at(line(kMinima + i)); }
  F16 scale() const { return load(floats(0)); }
  F16 least() const { return load(floats(1)); }

 private:
  static constexpr int64_t kFactors = kRecord / 4, kMinima = kFactors + Record<W>::groups;
  uint8_t* line(int64_t i) const { return at_ + i * 64; }
  float* floats(int64_t i) const { return reinterpret_cast<float*>(line(kMinima + 4 + i)); }
  static void put(uint8_t* to, Sums x) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, x.v);
#else
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to) + 1, x.hi);
#endif
  }

  uint8_t* at_;
};

// R rows: values, their scales, and the sums of their groups as sum_groups has them, each `…_pitch`
// apart.
struct ScaledRows {
  const int8_t* values;
  const float* scale;
  const int16_t* sums;
  int64_t pitch, scale_pitch, sums_pitch;

  ScaledRows at(int64_t row) const {
    return {values + row * pitch, scale + row * scale_pitch, sums + row * sums_pitch,
            pitch,                scale_pitch,               sums_pitch};
  }
  // Where the values of record i begin.
  template <Weight W>
  ScaledRows record(int64_t i) const {
    return {values + i * kRecord, scale + i, sums + i * Record<W>::groups,
            pitch,                scale_pitch, sums_pitch};
  }
};

// All rows of a product; sums: as `sum_groups` has them for each row.
template <Weight W>
static inline ScaledRows scaled_rows(const LinearArgs& a, const int8_t* values, const float* scale,
                                     const int16_t* sums) {
  const int64_t first = Record<W>::zero ? a.padded_k / 32 : 0;
  return {values, scale, sums + first, a.padded_k, a.padded_k / kRecord, row_sums(a)};
}

#if defined(__AVX512F__)

// acc[r] += the four values from T on of a unit of row r.
template <int T, int R, typename Source>
[[gnu::always_inline]] static inline void add_codes(const Source& w, int64_t unit, const int8_t* x,
                                                    int64_t ldx, Sums (&acc)[R]) {
  const Sums codes = w.template codes<T>(unit);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    acc[r].v = _mm512_dpbusd_epi32(acc[r].v, codes.v, _mm512_set1_epi32(word(x + r * ldx + 4 * T)));
}

// sums[r] += a group of row r, whose values begin with the four from T on of a unit, times its factor.
template <Weight W, int T, int R, typename Source>
[[gnu::always_inline]] static inline void add_group(const Source& w, int64_t unit, int64_t g,
                                                    const int8_t* x, const ScaledRows& rows,
                                                    Sums (&sums)[R]) {
  Sums acc[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    acc[r] = set_sums(Record<W>::zero ? 2 * rows.sums[r * rows.sums_pitch + g] : 0);
  add_codes<T>(w, unit, x, rows.pitch, acc);
  add_codes<T + 1>(w, unit, x, rows.pitch, acc);
  add_codes<T + 2>(w, unit, x, rows.pitch, acc);
  add_codes<T + 3>(w, unit, x, rows.pitch, acc);
  if constexpr (Record<W>::group == kUnit) {
    add_codes<T + 4>(w, unit, x, rows.pitch, acc);
    add_codes<T + 5>(w, unit, x, rows.pitch, acc);
    add_codes<T + 6>(w, unit, x, rows.pitch, acc);
    add_codes<T + 7>(w, unit, x, rows.pitch, acc);
  }
  const Sums factor = w.factor(g);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r] = sums[r] + acc[r] * factor;
}

#else

// Codes of four bits: a unit's sixteen products of at most 15 · 127 fit into 16 bits; of five, half
// as many; of six, four.
template <Weight W>
constexpr int kFit = W == Weight::q4_k ? 8 : W == Weight::q5_k ? 4 : 2;

// sums[r] += N · 4 values from T on, times their factor.
template <int T, int N, int R, typename Source>
[[gnu::always_inline]] static inline void add_some(const Source& w, int64_t unit, const int8_t* x,
                                                   int64_t ldx, Sums factor, Sums (&sums)[R]) {
  __m256i lo[R], hi[R];
  const auto one = [&]<int I>() {
    const Sums codes = w.template codes<T + I>(unit);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m256i xs = _mm256_set1_epi32(word(x + r * ldx + 4 * (T + I)));
      const __m256i a = _mm256_maddubs_epi16(codes.lo, xs), b = _mm256_maddubs_epi16(codes.hi, xs);
      lo[r] = I ? _mm256_add_epi16(lo[r], a) : a;
      hi[r] = I ? _mm256_add_epi16(hi[r], b) : b;
      settle(lo[r]);
      settle(hi[r]);
    }
  };
  one.template operator()<0>();
  one.template operator()<1>();
  if constexpr (N > 2) {
    one.template operator()<2>();
    one.template operator()<3>();
  }
  if constexpr (N > 4) {
    one.template operator()<4>();
    one.template operator()<5>();
    one.template operator()<6>();
    one.template operator()<7>();
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r] = sums[r] + multiply_words({lo[r], hi[r]}, factor);
}

template <Weight W, int T, int R, typename Source>
[[gnu::always_inline]] static inline void add_group(const Source& w, int64_t unit, int64_t g,
                                                    const int8_t* x, const ScaledRows& rows,
                                                    Sums (&sums)[R]) {
  constexpr int fit = kFit<W>;
  const Sums factor = w.factor(g);
  add_some<T, fit>(w, unit, x, rows.pitch, factor, sums);
  if constexpr (fit < 8) add_some<T + fit, fit>(w, unit, x, rows.pitch, factor, sums);
  if constexpr (Record<W>::zero != 0)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m256i least = _mm256_set1_epi16(rows.sums[r * rows.sums_pitch + g]);
      sums[r] = sums[r] + multiply_words(factor, {least, least});
    }
}

#endif

// total[r] += `sums` of R rows and a record, times its scale and theirs, less its minima.
template <Weight W, int R, typename Source>
[[gnu::always_inline]] static inline void add_scaled(const Source& w, const ScaledRows& rows,
                                                     const Sums (&sums)[R], F16 (&total)[R]) {
  const F16 d = w.scale();
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    total[r] = fma(to_float(sums[r]), d * set1(rows.scale[r * rows.scale_pitch]), total[r]);
  if constexpr (Record<W>::zero != 0) return;
  Sums taken[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) taken[r] = set_sums(0);
#pragma GCC unroll 4
  for (int64_t i = 0; i < 4; i++) {
    const Sums minima = w.minima(i);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t two;
      __builtin_memcpy(&two, rows.sums + r * rows.sums_pitch + 2 * i, 4);
      taken[r] = add_words(taken[r], minima, set_sums(two));
    }
  }
  const F16 least = w.least();
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    total[r] = fma(to_float(taken[r]), least * set1(rows.scale[r * rows.scale_pitch]), total[r]);
}

// total[r] += R rows times a record of which they are the values.
template <Weight W, int R, typename Source>
[[gnu::always_inline]] static inline void add_record(const Source& w, const ScaledRows& rows,
                                                     F16 (&total)[R]) {
  Sums sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) sums[r] = set_sums(0);
  const int8_t* x = rows.values;
  for (int64_t unit = 0; unit < kRecord / kUnit; unit++, x += kUnit) {
    w.ask(unit);
    if constexpr (Record<W>::group == kUnit) {
      add_group<W, 0>(w, unit, unit, x, rows, sums);
    } else {
      add_group<W, 0>(w, unit, 2 * unit, x, rows, sums);
      add_group<W, 4>(w, unit, 2 * unit + 1, x, rows, sums);
    }
  }
  add_scaled<W>(w, rows, sums, total);
}

}  // namespace penstock::PENSTOCK_ISA
