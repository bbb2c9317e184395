// Softmax of rows of scores within one span: the largest, e^(score − largest), and their sum.
#pragma once

#include "many.h"

namespace penstock::PENSTOCK_ISA {

constexpr float kMinusInfinity = -__builtin_inff();

// Rows whose exponentials are taken side by side: what hides the latency, and has room in registers.
#if defined(__AVX512F__)
constexpr int kSideBySide = 2;
#else
constexpr int kSideBySide = 1;
#endif

struct Add {
  F16 operator()(F16 a, F16 b) const { return a + b; }
  static float lanes(F16 a) { return reduce_add(a); }
};
struct Max {
  F16 operator()(F16 a, F16 b) const { return max(a, b); }
  static float lanes(F16 a) { return reduce_max(a); }
};

// What Op makes of each row's sixteen lanes, in the order of reduce_add.
template <typename Op>
static inline F16 reduce_rows(const F16* rows, [[maybe_unused]] Op op) {
#if defined(__AVX512F__)
  __m512 v[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; r++) {
    const __m512 a = rows[r].v, b = rows[r + 8].v;
    v[r] = op({_mm512_shuffle_f32x4(a, b, 0x44)}, {_mm512_shuffle_f32x4(a, b, 0xee)}).v;
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++)
    v[r] = op({_mm512_shuffle_f32x4(v[r], v[r + 4], 0x88)},
              {_mm512_shuffle_f32x4(v[r], v[r + 4], 0xdd)}).v;
#pragma GCC unroll 2
  for (int r = 0; r < 2; r++)
    v[r] = op({_mm512_shuffle_ps(v[r], v[r + 2], 0x44)}, {_mm512_shuffle_ps(v[r], v[r + 2], 0xee)}).v;
  const F16 all = op({_mm512_shuffle_ps(v[0], v[1], 0x88)}, {_mm512_shuffle_ps(v[0], v[1], 0xdd)});
  const __m512i order = _mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15);
  return {_mm512_permutexvar_ps(order, all.v)};
#else
  float all[16];
  for (int r = 0; r < 16; r++) all[r] = Op::lanes(rows[r]);
  return load(all);
#endif
}

// The largest of `count` scores, lane by lane; count: a multiple of 32.
static inline F16 largest_of(const float* row, int64_t count) {
  F16 a = load(row), b = load(row + 16);
  for (int64_t j = 32; j < count; j += 32) {
    a = max(a, load(row + j));
    b = max(b, load(row + j + 16));
  }
  return max(a, b);
}

// Weights e^(score · scale − largest) of float are taken as they stand, those that are rounded to bfloat16 as powers of 2,
// by a scale that has been multiplied by log2 e.
template <typename T>
static inline float power_scale(float scale) {
  return sizeof(T) == 2 ? scale * kLog2E : scale;
}

// What the rows' scaled scores are less by, below zero, of which `largest` are the largest. Where nothing is visible, weights
// are 0.
template <typename T>
static inline F16 below(F16 largest, float scale) {
  const F16 none = set1(-__FLT_MAX__);
  return zero() - where_less(largest, none, zero(), largest * set1(power_scale<T>(scale)));
}

// The weight.
template <typename T, typename V>
[[gnu::always_inline]] static inline V weight(V exponent) {
  if constexpr (sizeof(T) == 2)
    return power_below(exponent);
  else
    return exp_below(exponent);
}

// sums[i] = Σ weights of R rows, `pitch` apart, lane by lane.
// emit(i, j, a, b): takes those of row i's 32 scores from j on.
template <typename T, int R, typename Emit>
static inline void exponentials(const float* row, int64_t pitch, int64_t count, float scale,
                                const float* minus, F16* sums, Emit emit) {
  const F16 factor = set1(power_scale<T>(scale));
  F16 less[R], sum[R];
#pragma GCC unroll 4
  for (int i = 0; i < R; i++) {
    less[i] = set1(minus[i]);
    sum[i] = zero();
  }
  for (int64_t j = 0; j < count; j += 32) {
    Many<2 * R> x;
#pragma GCC unroll 8
    for (int i = 0; i < 2 * R; i++)
      x.v[i] = load(row + i / 2 * pitch + j + i % 2 * 16) * factor + less[i / 2];
    x = weight<T>(x);
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) {
      sum[i] = (sum[i] + x.v[2 * i]) + x.v[2 * i + 1];
      emit(i, j, x.v[2 * i], x.v[2 * i + 1]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < R; i++) sums[i] = sum[i];
}

// A row block's maxima and sums, of up to 16 rows of scores.
// emit(r, j, a, b): takes the weights of row r's 32 scores from j on, and rounds them to T.
template <typename T, typename Emit>
static inline void soften_rows(const float* scores, int64_t pitch, int64_t rows, int64_t count,
                               float scale, float* top, float* total, Emit emit) {
  F16 lanes[16];
  float minus[16];
  lanes[0] = largest_of(scores, count);
  for (int64_t r = 1; r < 16; r++) lanes[r] = r < rows ? largest_of(scores + r * pitch, count) : lanes[0];
  const F16 largest = reduce_rows(lanes, Max()), highest = largest * set1(scale);
  store(minus, below<T>(largest, scale));
  int64_t r = 0;
  for (; r + kSideBySide <= rows; r += kSideBySide)
    exponentials<T, kSideBySide>(
        scores + r * pitch, pitch, count, scale, minus + r, lanes + r,
        [&](int i, int64_t j, F16 a, F16 b) { emit(r + i, j, a, b); });
  for (; r < rows; r++)
    exponentials<T, 1>(scores + r * pitch, pitch, count, scale, minus + r, lanes + r,
                       [&](int, int64_t j, F16 a, F16 b) { emit(r, j, a, b); });
  const F16 sum = reduce_rows(lanes, Add());
  store(total, sum);
  store(top, highest + sum * zero());  // a maximum may have passed over NaN, the sum didn't
}

}  // namespace penstock::PENSTOCK_ISA
