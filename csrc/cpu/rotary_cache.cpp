// Between the projection and attention: normalise heads, rotate, write keys and values.
#include "linear.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// x [dim] as floats, normalised where there is a weight; `out` has room for a multiple of 16.
template <typename T>
void take_head(const T* x, int64_t dim, const float* weight, float eps, float* out) {
  F16 squares = zero();
  for (int64_t j = 0; j < dim; j += 16) {
    const F16 v = load_some(x + j, dim - j < 16 ? static_cast<int>(dim - j) : 16);
    store(out + j, v);
    squares = fma(v, v, squares);
  }
  if (!weight) return;
  const float mean = reduce_add(squares) / static_cast<float>(dim);
  const F16 scale = set1(1.0f / __builtin_sqrtf(mean + eps));
  for (int64_t j = 0; j < dim; j += 16) {
    const int c = dim - j < 16 ? static_cast<int>(dim - j) : 16;
    store(out + j, load(out + j) * scale * load_first(weight + j, c));
  }
}

void rotate(float* x, const float* cos_sin, int64_t rotary_dim, bool interleaved) {
  const int64_t half = rotary_dim / 2;
  const float* cos = cos_sin;
  const float* sin = cos_sin + half;
  for (int64_t j = 0; j < half; j++) {
    float& first = interleaved ? x[2 * j] : x[j];
    float& second = interleaved ? x[2 * j + 1] : x[j + half];
    const float a = first, b = second;
    first = a * cos[j] - b * sin[j];
    second = b * cos[j] + a * sin[j];
  }
}

template <typename T>
void one_token(const RotaryCacheArgs& a, int64_t t, float* head) {
  constexpr int64_t v = 4 / static_cast<int64_t>(sizeof(T));
  const float* cos_sin = a.cos_sin ? a.cos_sin + a.positions[t] * a.rotary_dim : nullptr;
  const T* q = static_cast<const T*>(a.q.data) + t * a.q.token_stride;
  T* q_out = static_cast<T*>(a.q_out) + t * a.heads * a.dim;
  for (int64_t h = 0; h < a.heads; h++) {
    take_head(q + h * a.q.head_stride, a.dim, a.q_norm, a.eps, head);
    if (cos_sin) rotate(head, cos_sin, a.rotary_dim, a.interleaved);
    for (int64_t j = 0; j < a.dim; j += 16)
      store_some(q_out + h * a.dim + j, load(head + j),
                 a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16);
  }
  const int64_t slot = a.slots[t];
  if (slot < 0) return;
  const int64_t block = slot / a.block_size, offset = slot % a.block_size;
  const T* key = static_cast<const T*>(a.k.data) + t * a.k.token_stride;
  const T* value = static_cast<const T*>(a.v.data) + t * a.v.token_stride;
  const int64_t head_size = a.block_size * a.padded_dim;
  for (int64_t h = 0; h < a.kv_heads; h++) {
    take_head(key + h * a.k.head_stride, a.dim, a.k_norm, a.eps, head);
    if (cos_sin) rotate(head, cos_sin, a.rotary_dim, a.interleaved);
    // [P/16, D/v, 16, v]
    T* kc = static_cast<T*>(a.key_cache) + (block * a.kv_heads + h) * head_size +
            offset / 16 * a.padded_dim * 16 + offset % 16 * v;
    for (int64_t j = 0; j < a.dim; j++) from_float(head[j], kc[j / v * 16 * v + j % v]);
    for (int64_t j = a.dim; j < a.padded_dim; j++) from_float(0.0f, kc[j / v * 16 * v + j % v]);
    // [D/16, P/v, 16, v]
    T* vc = static_cast<T*>(a.value_cache) + (block * a.kv_heads + h) * head_size +
            offset / v * 16 * v + offset % v;
    const T* vh = value + h * a.v.head_stride;
    for (int64_t j = 0; j < a.dim; j++) vc[j / 16 * a.block_size * 16 + j % 16 * v] = vh[j];
    for (int64_t j = a.dim; j < a.padded_dim; j++)
      from_float(0.0f, vc[j / 16 * a.block_size * 16 + j % 16 * v]);
  }
}

}  // namespace

void rotary_cache(const RotaryCacheArgs& a) {
  const int64_t work = a.tokens * (a.heads + 2 * a.kv_heads) * a.dim;
#pragma omp parallel num_threads(a.threads) if (work > 16 * 1024)
  {
    const FlushDenormals flush;
    float* head = static_cast<float*>(
        scratch(Scratch::partials, static_cast<size_t>(a.dim + 16) * sizeof(float)));
    const Range mine = share(a.tokens);
    for (int64_t t = mine.first; t < mine.last; t++) {
      if (a.dtype == DType::bf16)
        one_token<bf16>(a, t, head);
      else
        one_token<float>(a, t, head);
    }
  }
}

}  // namespace penstock::PENSTOCK_ISA
