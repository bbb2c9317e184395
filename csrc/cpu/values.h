// Quantized panels for rows of floats: every code as a value that bfloat16 holds.
//
// What a code stands for, less its zero point or times its fine scale, is exact in bfloat16, so
// vectors may multiply it in float32 and tiles in bfloat16. The group's scale comes after its sum.
#pragma once

#include "kquants.h"

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

// Where value J of a line lies in each word: of 4 bytes, or of 8 half bytes (integers.h).
template <int Bits, int J>
constexpr int kShift = Bits == 8 ? 8 * J : J < 4 ? 8 * J : 8 * (J - 4) + 4;

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

// Value J of each word of a line: an unsigned code and kRaise, what it stands for, or its level in
// `table`.
template <Weight W, int J>
static inline F16 take(const uint8_t* line, F16 table) {
  constexpr int shift = kShift<bits_of(W), J>;
  const __m512i v = _mm512_loadu_si512(line);
  const __m512i raise = _mm512_castps_si512(_mm512_set1_ps(kRaise));
  if constexpr (W == Weight::int4) {
    constexpr int and_or = 0xea;
    return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_srli_epi32(v, shift),
                                                          _mm512_set1_epi32(15), raise, and_or))};
  } else if constexpr (bits_of(W) == 4) {  // the index's upper bits don't count
    return {_mm512_permutexvar_ps(_mm512_srli_epi32(v, shift), table.v)};
  } else if constexpr (is_integer(W)) {
    const __m512i code = _mm512_xor_si512(v, _mm512_set1_epi8(static_cast<char>(0x80)));
    const __m512i last = _mm512_set4_epi32(12 + J, 8 + J, 4 + J, J);
    return {_mm512_castsi512_ps(
        _mm512_mask_shuffle_epi8(raise, 0x1111111111111111ull, code, last))};
  } else {
    return {widen_fp8<W>(_mm512_slli_epi32(v, 24 - shift))};
  }
}

// What is taken off an integer's code besides its zero point.
template <Weight W>
constexpr float kTaken = W == Weight::int4 ? kRaise : kRaise + 128.0f;

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

template <Weight W>
constexpr float kTaken = 0.0f;  // off an integer besides its zero point

// Level `index` of each lane; its upper bits don't count. Bit 3 chooses the half of the table.
static inline __m256 look_up(__m256i index, F16 table) {
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.lo, index),
                          _mm256_permutevar8x32_ps(table.hi, index),
                          _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

template <Weight W, int J>
static inline __m256 take_half(__m256i v, F16 table) {
  constexpr int shift = kShift<bits_of(W), J>;
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

// What the lines of a panel stand for, one after the other.
template <Weight W>
class Values {
 public:
  static constexpr int64_t per_line = 32 / bits_of(W);  // values of K

  explicit Values(const Panel& w) : w_(w) {
    if constexpr (has_table) table_ = load(w.table);
    if constexpr (W == Weight::int8) other_ = set1(kTaken<W>);
  }
  // The lines that follow are of group g.
  void group(int64_t g) {
    if constexpr (W == Weight::int8_zero)
      other_ = to_float(zero_points<8>(w_, g)) + set1(kTaken<W>);
    if constexpr (W == Weight::int4)
      other_ = (w_.zero ? to_float(zero_points<4>(w_, g)) : set1(8.0f)) + set1(kTaken<W>);
  }
  // The next line starts with value k of K, after those before it.
  void line(int64_t k) {
    if constexpr (W != Weight::nvfp4) return;
    if (k % 16 == 0)
      other_ = load(reinterpret_cast<const fp8*>(w_.fine) + k / 16 * kColumns);
  }
  template <int J>
  F16 at(const uint8_t* line) const {
    const F16 v = take<W, J>(line, table_);
    if constexpr (takes_off) return v - other_;
    if constexpr (W == Weight::nvfp4) return v * other_;
    return v;
  }

 private:
  static constexpr bool has_table = W == Weight::levels || W == Weight::nvfp4;
  static constexpr bool takes_off =
      W == Weight::int8_zero || W == Weight::int4 || (W == Weight::int8 && kTaken<W> != 0.0f);
  const Panel& w_;
  F16 table_ = zero();
  F16 other_ = zero();  // zero points and kTaken, or fine scales
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

// Values of four k, exact in bfloat16, as the words of crossed.h.
static inline Crossed cross(F16 a, F16 b, F16 c, F16 d) {
  return {reinterpret_cast<__m512bh>(join_pairs(c, a)), reinterpret_cast<__m512bh>(join_pairs(d, b))};
}

template <Weight W, int J, int R>
static inline void step_crossed(const uint8_t* line, const Values<W>& values, const crossed* x,
                                int64_t ldx, F16 (&even)[R], F16 (&odd)[R]) {
  if constexpr (J < Values<W>::per_line) {
    const Crossed w =
        cross(values.template at<J>(line), values.template at<J + 1>(line),
              values.template at<J + 2>(line), values.template at<J + 3>(line));
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
#pragma GCC unroll 2
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

template <Weight W, int J, typename T>
static inline void unpack_line(const uint8_t* line, const Values<W>& values, T* out) {
  if constexpr (J < Values<W>::per_line) {
    const F16 a = values.template at<J>(line), b = values.template at<J + 1>(line);
    const F16 c = values.template at<J + 2>(line), d = values.template at<J + 3>(line);
    bf16* lines = reinterpret_cast<bf16*>(out) + J * kColumns;
    constexpr bool crosses = std::is_same_v<T, crossed>;
    crosses ? store_pairs(lines, c, a) : store_pairs(lines, a, b);
    crosses ? store_pairs(lines + 2 * kColumns, d, b) : store_pairs(lines + 2 * kColumns, c, d);
    unpack_line<W, J + 4>(line, values, out);
  }
}

#if defined(__AVX512F__)

// Sixteen-bit words that are looked up by their lower bits, a line of codes of 4 bits at a time.
template <Weight W>
class Words {
 public:
  explicit Words(const Panel& w) : w_(w) {
    alignas(64) bf16 words[32];
    for (int i = 0; i < 32; i += 16) {
      F16 found = zero();
      if constexpr (W == Weight::levels) {
        found = load(w.table);
      } else {  // the code less its zero point, and 16
        alignas(64) float values[16];
        for (int j = 0; j < 16; j++) values[j] = static_cast<float>(i + j - 16);
        found = load(values);
      }
      store_exact(words + i, found);
    }
    table_ = _mm512_load_si512(words);
  }
  void group(int64_t g) {
    if constexpr (W != Weight::int4) return;
    const Sums z = w_.zero ? zero_points<4>(w_, g) : set_sums(8);
    other_ = (set_sums(0x10101010) + z * set_sums(-0x01010101)).v;
  }
  void unpack(const uint8_t* line, bf16* out) const {
    const __m512i v = _mm512_loadu_si512(line), low = _mm512_set1_epi8(15);
    __m512i codes[2] = {v, _mm512_srli_epi16(v, 4)};
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      if constexpr (W == Weight::int4) codes[h] = _mm512_add_epi8(_mm512_and_si512(codes[h], low), other_);
      // the bytes of a word, each at the lower end of a word
      const __m512i first = _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000);
      const __m512i last = _mm512_set4_epi32(0x0f0f0e0e, 0x0b0b0a0a, 0x07070606, 0x03030202);
      _mm512_storeu_si512(out + h * 4 * kColumns, words(codes[h], first));
      _mm512_storeu_si512(out + (h * 4 + 2) * kColumns, words(codes[h], last));
    }
  }

 private:
  __m512i words(__m512i codes, __m512i order) const {
    return _mm512_permutexvar_epi16(_mm512_shuffle_epi8(codes, order), table_);
  }

  const Panel& w_;
  __m512i table_, other_ = _mm512_setzero_si512();
};

#endif

template <Weight W, typename T>
static inline void unpack_values(const Panel& w, int64_t first, int64_t last, T* out) {
  constexpr int64_t step = Values<W>::per_line;
  const uint8_t* line = w.data + first / step * 64;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, bf16> && (W == Weight::int4 || W == Weight::levels)) {
    Words<W> words(w);
    for (int64_t k = first; k < last; k += step, line += 64, out += step * kColumns) {
      if (k == first || k % w.group == 0) words.group(k / w.group);
      prefetch_bytes(line + kAheadBytes);
      words.unpack(line, out);
    }
    return;
  }
#endif
  Values<W> values(w);
  for (int64_t k = first; k < last; k += step, line += 64, out += step * kColumns) {
    values.group(k / w.group);
    values.line(k);
    prefetch_bytes(line + kAheadBytes);
    unpack_line<W, 0>(line, values, out);
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
  with_kind(kind, [&]<Weight W>() { unpack_values<W>(w, first, last, out); });
}

}  // namespace penstock::PENSTOCK_ISA
