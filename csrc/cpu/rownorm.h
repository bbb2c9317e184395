// What rows go through before or after a product, as the same bits whether fused or not.
#pragma once

#include "elementary.h"

namespace penstock::PENSTOCK_ISA {

// 1 / sqrt(mean((x − mean)²) + eps) of R rows, side by side.
template <int R, typename T>
static inline void inverse_deviations(const T* x, int64_t stride, int64_t dim, float mean, float eps,
                                      F16 (&out)[R]) {
  F16 squares[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) squares[r] = zero();
  int64_t j = 0;
  for (; j + 16 <= dim; j += 16)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const F16 v = load(x + r * stride + j) - set1(mean);
      squares[r] = fma(v, v, squares[r]);
    }
  for (int r = 0; r < R; r++) {
    if (j < dim) {
      const int c = static_cast<int>(dim - j);
      const F16 v = keep_first(load_some(x + r * stride + j, c) - set1(mean), c, 0.0f);
      squares[r] = fma(v, v, squares[r]);
    }
    const float variance = reduce_add(squares[r]) / static_cast<float>(dim);
    out[r] = set1(1.0f / __builtin_sqrtf(variance + eps));
  }
}

template <typename T>
static inline F16 inverse_deviation(const T* x, int64_t dim, float mean, float eps) {
  F16 out[1];
  inverse_deviations(x, 0, dim, mean, eps, out);
  return out[0];
}

// out = x as floats, or its root-mean-square norm rounded to T; zeros up to `padded`.
template <typename T>
static inline void take_row(const T* x, int64_t dim, const float* norm, float eps, int64_t padded,
                            float* out) {
  const F16 scale = norm ? inverse_deviation(x, dim, 0.0f, eps) : zero();
  int64_t j = 0;
  for (; j + 16 <= dim; j += 16) {
    const F16 v = load(x + j);
    store(out + j, norm ? round_to<T>(v * scale * load(norm + j)) : v);
  }
  for (; j < padded; j += 16) {
    const int c = dim - j < 16 ? static_cast<int>(dim - j) : 16;
    F16 v = zero();
    if (c > 0) v = load_some(x + j, c);
    if (c > 0 && norm) v = round_to<T>(v * scale * load_first(norm + j, c));
    store(out + j, c > 0 && c < 16 ? keep_first(v, c, 0.0f) : v);
  }
}

// 64 floats by the Hadamard matrix of that order over 8: sums and differences of neighbours 1, 2, … 32
// apart.
static inline void rotate(F16 (&v)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) v[i] = mix<8>(mix<4>(mix<2>(mix<1>(v[i]))));
  const F16 a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  const F16 eighth = set1(0.125f);
  v[0] = (a + c) * eighth;
  v[1] = (b + d) * eighth;
  v[2] = (a - c) * eighth;
  v[3] = (b - d) * eighth;
}

// Blocks of 64 floats, in place.
static inline void rotate_row(float* floats, int64_t count) {
  for (int64_t at = 0; at < count; at += 64) {
    F16 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v[i] = load(floats + at + 16 * i);
    rotate(v);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) store(floats + at + 16 * i, v[i]);
  }
}

// In this order of max and min a NaN stays NaN.
template <typename V>
[[gnu::always_inline]] static inline V silu(V x) {
  const V from = max(set1(-kWithin), x);
  return from / (set1(1.0f) + power_within(min(set1(kWithin), from), -kLog2E));
}

static inline F16 activate(F16 x, Activation kind) {
  switch (kind) {
    case Activation::silu:
      return silu(x);
    case Activation::gelu:
      return set1(0.5f) * x * (set1(1.0f) + erf(x * set1(0.70710678118654752f)));
    case Activation::gelu_tanh: {
      const F16 cube = x * x * x;
      const F16 inner = set1(0.79788456080286536f) * fma(set1(0.044715f), cube, x);
      return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
    }
    case Activation::swiglu_oai: {
      const F16 g = min(set1(7.0f), x);  // in this order a NaN x stays NaN
      return g / (set1(1.0f) + exp(g * set1(-1.702f)));
    }
    case Activation::quick_gelu:
      return x / (set1(1.0f) + exp(x * set1(-1.702f)));
    case Activation::relu2: {
      const F16 kept = max(zero(), x);  // in this order a NaN x stays NaN
      return kept * kept;
    }
    case Activation::none:
      break;
  }
  return x;
}

// act(gate) · up.
static inline F16 gated_by(F16 gate, F16 up, Activation kind) {
  if (kind == Activation::swiglu_oai)
    up = max(set1(-7.0f), min(set1(7.0f), up)) + set1(1.0f);
  return activate(gate, kind) * up;
}

}  // namespace penstock::PENSTOCK_ISA
