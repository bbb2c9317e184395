// Quantized panels for rows of floats: every code as a value that bfloat16 holds.
//
// What a code stands for, less its zero point or times its fine scale, is exact in bfloat16, so
// vectors may multiply it in float32 and tiles in bfloat16. The group's scale comes after its sum.
#pragma once

#include "kquants.h"

#if defined(__AVX512F__)
#include "words.h"
#endif

namespace penstock::PENSTOCK_ISA {

// A byte of floating point, on top of each word, as a float. With the exponent's bias mended,
// f = 2^e (1 + m) for every e; the smallest exponent means 2^(1 + e) m instead, which is
// 2f − `least`, and smaller than f just there. So no denormal, which would be taken for zero, comes
// up on the way.
template <Weight W>
struct Fp8 {
  static constexpr int shift = W == Weight::fp8_e4m3 ? 4 : 3;
  static constexpr int mask = W == Weight::fp8_e4m3 ? 0x07f00000 : 0x0fe00000;
  static constexpr int bias = (W == Weight::fp8_e4m3 ? 120 : 112) << 23;
  static constexpr float least = W == Weight::fp8_e4m3 ? 0x1p-6f : 0x1p-14f;
};

#if defined(__AVX512F__)

template <Weight W>
static inline __m512 widen_fp8(__m512i x) {
  using F = Fp8<W>;
  const __m512i size =
      _mm512_and_si512(_mm512_srli_epi32(x, F::shift), _mm512_set1_epi32(F::mask));
  const __m512 f = _mm512_castsi512_ps(_mm512_add_epi32(size, _mm512_set1_epi32(F::bias)));
  const __m512 small = _mm512_fmsub_ps(f, _mm512_set1_ps(2.0f), _mm512_set1_ps(F::least));
  const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0x80000000u)));
  return _mm512_or_ps(_mm512_min_ps(f, small), _mm512_castsi512_ps(sign));
}

// A small unsigned integer in the last bits of 2^23 is a float by itself: that integer more.
constexpr float kRaise = 0x1p23f;

// Byte J of each word of a line: an unsigned code and kRaise, or what it stands for.
template <Weight W, int J>
static inline F16 take(const uint8_t* line, F16) {
  static_assert(bits_of(W) == 8, "words.h has codes of 4 bits");
  const __m512i v = _mm512_loadu_si512(line);
  if constexpr (is_integer(W)) {
    const __m512i raise = _mm512_castps_si512(_mm512_set1_ps(kRaise));
    const __m512i code = _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i last = _mm512_set4_epi32(12 + J, 8 + J, 4 + J, J);
    return {_mm512_castsi512_ps(
        _mm512_mask_shuffle_epi8(raise, 0x1111111111111111ull, code, last))};
  } else {
    return {widen_fp8<W>(_mm512_slli_epi32(v, 24 - 8 * J))};
  }
}

constexpr float kTaken = kRaise + 128.0f;  // off an integer's code besides its zero point

#else

template <Weight W>
static inline __m256 widen_fp8(__m256i x) {
  using F = Fp8<W>;
  const __m256i size =
      _mm256_and_si256(_mm256_srli_epi32(x, F::shift), _mm256_set1_epi32(F::mask));
  const __m256 f = _mm256_castsi256_ps(_mm256_add_epi32(size, _mm256_set1_epi32(F::bias)));
  const __m256 small = _mm256_fmsub_ps(f, _mm256_set1_ps(2.0f), _mm256_set1_ps(F::least));
  const __m256 sign = _mm256_and_ps(_mm256_castsi256_ps(x), _mm256_set1_ps(-0.0f));
  return _mm256_or_ps(_mm256_min_ps(f, small), sign);
}

constexpr float kTaken = 0.0f;  // off an integer besides its zero point

// Level `index` of each lane; its upper bits don't count. Bit 3 chooses the half of the table.
static inline __m256 look_up(__m256i index, F16 table) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.lo, index),
                          _mm256_permutevar8x32_ps(table.hi, index),
                          _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

template <Weight W, int J>
static inline __m256 take_half(__m256i v, F16 table) {
  // where the value lies in each word: of 4 bytes, or of 8 half bytes (integers.h)
  constexpr int shift = bits_of(W) == 8 || J < 4 ? 8 * J : 8 * (J - 4) + 4;
  if constexpr (W == Weight::int4)
    return _mm256_cvtepi32_ps(
        _mm256_and_si256(_mm256_srli_epi32(v, shift), _mm256_set1_epi32(15)));
  else if constexpr (bits_of(W) == 4)
    return look_up(_mm256_srli_epi32(v, shift), table);
  else if constexpr (is_integer(W))
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - shift), 24));
  else
    return widen_fp8<W>(_mm256_slli_epi32(v, 24 - shift));
}
// Value J of each word of a line: the code itself, what it stands for, or its level in `table`.
template <Weight W, int J>
static inline F16 take(const uint8_t* line, F16 table) {
  const __m256i* at = reinterpret_cast<const __m256i*>(line);
  return {take_half<W, J>(_mm256_loadu_si256(at), table),
          take_half<W, J>(_mm256_loadu_si256(at + 1), table)};
}

#endif

// What codes stand for, less their zero points.
template <Weight W>
class Codes {
 public:
  explicit Codes(const Panel& w) : w_(w) {
    if constexpr (has_table) table_ = load(w.table);
    if constexpr (W == Weight::int8) taken_ = set1(kTaken);
  }
  // The lines that follow are of group g.
  void group(int64_t g) {
    if constexpr (W == Weight::int8_zero) taken_ = to_float(zero_points<8>(w_, g)) + set1(kTaken);
    if constexpr (W == Weight::int4) taken_ = w_.zero ? to_float(zero_points<4>(w_, g)) : set1(8.0f);
  }
  template <int J>
  F16 at(const uint8_t* line) const {
    const F16 v = take<W, J>(line, table_);
    if constexpr (takes_off) return v - taken_;
    return v;
  }

 private:
  static constexpr bool has_table = W == Weight::levels || W == Weight::nvfp4;
  static constexpr bool takes_off =
      W == Weight::int8_zero || W == Weight::int4 || (W == Weight::int8 && kTaken != 0.0f);
  const Panel& w_;
  F16 table_ = zero(), taken_ = zero();
};

// What the lines of a panel stand for, one after the other.
template <Weight W>
class Values {
 public:
  static constexpr int64_t per_line = 32 / bits_of(W);  // values of K

  explicit Values(const Panel& w) : w_(w), codes_(w) {}
  // The lines that follow are of group g.
  void group(int64_t g) { codes_.group(g); }
  // The next line starts with value k of K, after those before it.
  void line(int64_t k) {
    if constexpr (W != Weight::nvfp4) return;
    if (k % 16 == 0)
      fine_ = load(reinterpret_cast<const fp8*>(w_.fine) + k / 16 * kColumns);
  }
  template <int J>
  F16 at(const uint8_t* line) const {
    const F16 v = codes_.template at<J>(line);
    if constexpr (W == Weight::nvfp4) return v * fine_;
    return v;
  }
#if defined(__AVX512BF16__)
  // Four values from J on.
  template <int J>
  Crossed crossed_at(const uint8_t* line) const {
    if constexpr (kLooksUp)
      return {reinterpret_cast<__m512bh>(codes_.template pair<J / 4, false>(line)),
              reinterpret_cast<__m512bh>(codes_.template pair<J / 4, true>(line))};
    else
      return {reinterpret_cast<__m512bh>(join_pairs(at<J + 2>(line), at<J>(line))),
              reinterpret_cast<__m512bh>(join_pairs(at<J + 3>(line), at<J + 1>(line)))};
  }
#endif
  // All of a line, as lines of a panel of bfloat16.
  void unpack(const uint8_t* line, bf16* out) const {
    if constexpr (kLooksUp) {
      codes_.unpack(line, out);
    } else {
      unpack_four<0>(line, out);
      if constexpr (per_line > 4) unpack_four<4>(line, out);
    }
  }
#if defined(__AVX512BF16__)
  void unpack(const uint8_t* line, crossed* out) const {
    store_crossed(out, crossed_at<0>(line));
    if constexpr (per_line > 4) store_crossed(out + 4 * kColumns, crossed_at<4>(line));
  }
#endif

 private:
#if defined(__AVX512F__)
  using Source = std::conditional_t<bits_of(W) == 4, Words<W>, Codes<W>>;
  static constexpr bool kLooksUp = W == Weight::int4 || W == Weight::levels;
#else
  using Source = Codes<W>;
  static constexpr bool kLooksUp = false;
#endif

  template <int J>
  void unpack_four(const uint8_t* line, bf16* out) const {
    store_pairs(out + J * kColumns, at<J>(line), at<J + 1>(line));
    store_pairs(out + (J + 2) * kColumns, at<J + 2>(line), at<J + 3>(line));
  }

  const Panel& w_;
  Source codes_;
  F16 fine_ = zero();
};

template <Weight W, int J, int R>
static inline void step_floats(const uint8_t* line, const Values<W>& values, const float* x,
                               int64_t ldx, F16 (&even)[R], F16 (&odd)[R]) {
  if constexpr (J < Values<W>::per_line) {
    const F16 v = values.template at<J>(line);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      F16& into = J % 2 ? odd[r] : even[r];
      into = fma(set1(x[r * ldx + J]), v, into);
    }
    step_floats<W, J + 1>(line, values, x, ldx, even, odd);
  }
}

#if defined(__AVX512BF16__)

template <Weight W, int J, int R>
static inline void step_crossed(const uint8_t* line, const Values<W>& values, const crossed* x,
                                int64_t ldx, F16 (&even)[R], F16 (&odd)[R]) {
  if constexpr (J < Values<W>::per_line) {
    const Crossed w = values.template crossed_at<J>(line);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Crossed xs = set_crossed(x + r * ldx + J);
      even[r] = dot(xs.even, w.even, even[r]);
      odd[r] = dot(xs.odd, w.odd, odd[r]);
    }
    step_crossed<W, J + 4>(line, values, x, ldx, even, odd);
  }
}

#endif

// acc[r] += a unit of kUnit values of K of R rows.
template <Weight W, typename X, int R>
static inline void multiply_values(const uint8_t* data, int64_t k, Values<W>& values, const X* x,
                                   int64_t ldx, const Lines& asks, F16 (&acc)[R]) {
  F16 even[R], odd[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) even[r] = odd[r] = zero();
  asks.template lines<kUnit / Values<W>::per_line>(data);
#pragma GCC unroll 8
  for (int64_t i = 0; i < kUnit; i += Values<W>::per_line, data += 64) {
    values.line(k + i);
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<X, crossed>)
      step_crossed<W, 0>(data, values, x + i, ldx, even, odd);
    else
#endif
      step_floats<W, 0>(data, values, x + i, ldx, even, odd);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r] = acc[r] + (even[r] + odd[r]);
}

// total[r][0] = Σ over groups of scale · Σ over k of value · x, for R rows, in the order of
// `dot_panels`: each group's sum from zero, times the row's scale of the group (x_scale [R, groups] of
// rows of E4M3, else null), times its own, added up.
template <int R, Weight W, typename X>
[[gnu::always_inline]] static inline void multiply_codes(const Panel& w, const X* x, int64_t ldx,
                                                         const float* x_scale, const Lines& asks,
                                                         F16 (&total)[R][1]) {
  clear(total);
  Values<W> values(w);
  const uint8_t* data = w.data;
  for (int64_t g = 0; g < w.groups; g++) {
    values.group(g);
    F16 acc[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] = zero();
    for (int64_t k = g * w.group; k < (g + 1) * w.group; k += kUnit) {
      multiply_values(data, k, values, x + k, ldx, asks, acc);
      data += kLines<bits_of(W)> * 64;
    }
    if constexpr (W == Weight::fp8_e4m3)
      if (x_scale)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = acc[r] * set1(x_scale[r * w.groups + g]);
    const F16 s = w.scales(g);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r][0] = fma(acc[r], s, total[r][0]);
  }
}

template <Weight W, typename T>
static inline void unpack_values(Values<W>& values, const Panel& w, int64_t first, int64_t last, T* out) {
  constexpr int64_t step = Values<W>::per_line;
  const uint8_t* line = w.data + first / step * 64;
  for (int64_t k = first; k < last; k += step, line += 64, out += step * kColumns) {
    if (k == first || k % w.group == 0) values.group(k / w.group);
    values.line(k);
    prefetch_bytes(line + kAheadBytes);
    values.unpack(line, out);
  }
}

// body(a constant of the kind) for a quantized weight's kind.
template <typename Body>
static inline void with_kind(Weight kind, Body body) {
  switch (kind) {
    case Weight::int8: return body.template operator()<Weight::int8>();
    case Weight::int8_zero: return body.template operator()<Weight::int8_zero>();
    case Weight::int4: return body.template operator()<Weight::int4>();
    case Weight::fp8_e4m3: return body.template operator()<Weight::fp8_e4m3>();
    case Weight::fp8_e5m2: return body.template operator()<Weight::fp8_e5m2>();
    case Weight::levels: return body.template operator()<Weight::levels>();
    case Weight::nvfp4: return body.template operator()<Weight::nvfp4>();
    default: break;  // dense, or records (kquants.h)
  }
}

// Values [first, last) of K of a panel, exactly, as a bfloat16 panel, crossed where T says so. Both are
// multiples of kUnit.
template <typename T>
static inline void unpack_bf16(Weight kind, const Panel& w, int64_t first, int64_t last, T* out) {
  if (has_records(kind))
    return with_records(kind, w.data, [&]<Weight W>() { unpack_records<W>(w, first, last, out); });
  with_kind(kind, [&]<Weight W>() {
    Values<W> values(w);
    unpack_values(values, w, first, last, out);
  });
}

}  // namespace penstock::PENSTOCK_ISA
