// Rotary position embedding of one head, and where a key lies in its cache.
#pragma once

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

static inline void rotate_head(float* x, const float* cos_sin, int64_t rotary_dim,
                               bool interleaved) {
  const int64_t half = rotary_dim / 2;
  const float* cos = cos_sin;
  const float* sin = cos_sin + half;
  int64_t from = 0;
  for (; !interleaved && half - from >= 16; from += 16) {
    const F16 a = load(x + from), b = load(x + from + half);
    const F16 c = load(cos + from), s = load(sin + from);
    store(x + from, a * c - b * s);
    store(x + from + half, b * c + a * s);
  }
  for (int64_t j = from; j < half; j++) {
    float& first = interleaved ? x[2 * j] : x[j];
    float& second = interleaved ? x[2 * j + 1] : x[j + half];
    const float a = first, b = second;
    first = a * cos[j] - b * sin[j];
    second = b * cos[j] + a * sin[j];
  }
}

// Value j of a key at `offset` of a block, in panels [P/16, D/v, 16, v].
static inline int64_t key_place(int64_t padded_dim, int64_t offset, int64_t j, int64_t v) {
  return offset / 16 * padded_dim * 16 + offset % 16 * v + j / v * 16 * v + j % v;
}

// `dim` floats as the key at `offset` of a block, zeros behind them.
template <typename T>
static inline void put_key(const float* head, int64_t dim, int64_t padded_dim, int64_t offset,
                           T* out) {
  constexpr int64_t v = 4 / static_cast<int64_t>(sizeof(T));
  int64_t from = 0;
  if constexpr (sizeof(T) == 2)
    for (; dim - from >= 16; from += 16) {
      T words[16];
      store(words, load(head + from));
      for (int64_t j = 0; j < 16; j++) out[key_place(padded_dim, offset, from + j, v)] = words[j];
    }
  for (int64_t j = from; j < padded_dim; j++)
    from_float(j < dim ? head[j] : 0.0f, out[key_place(padded_dim, offset, j, v)]);
}

}  // namespace penstock::PENSTOCK_ISA
