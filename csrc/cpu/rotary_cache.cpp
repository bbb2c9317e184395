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

// Where value j of a head at `offset` of a block lies, in units of one value.
struct Key {  // [P/16, D/v, 16, v]
  static int64_t place(const RotaryCacheArgs& a, int64_t offset, int64_t j, int64_t v) {
    return offset / 16 * a.padded_dim * 16 + offset % 16 * v + j / v * 16 * v + j % v;
  }
  static void* cache(const RotaryCacheArgs& a) { return a.key_cache; }
  static uint16_t* scale(const RotaryCacheArgs& a) { return a.key_scale; }
};
struct Value {  // [D/16, P/v, 16, v]
  static int64_t place(const RotaryCacheArgs& a, int64_t offset, int64_t j, int64_t v) {
    return offset / v * 16 * v + offset % v + j / 16 * a.block_size * 16 + j % 16 * v;
  }
  static void* cache(const RotaryCacheArgs& a) { return a.value_cache; }
  static uint16_t* scale(const RotaryCacheArgs& a) { return a.value_scale; }
};

template <typename Side, typename S>
void put_head(const RotaryCacheArgs& a, const float* head, int64_t at, int64_t offset, int64_t v) {
  S* out = static_cast<S*>(Side::cache(a)) + at * a.block_size * a.padded_dim;
  for (int64_t j = 0; j < a.padded_dim; j++)
    from_float(j < a.dim ? head[j] : 0.0f, out[Side::place(a, offset, j, v)]);
}

// Head to int8 in place, as floats; returns the scale that they were divided by, as float16.
uint16_t round_head(float* head, int64_t dim) {
  F16 top = zero(), bad = zero();
  for (int64_t j = 0; j < dim; j += 16) {
    const F16 v = keep_first(load(head + j), dim - j < 16 ? static_cast<int>(dim - j) : 16, 0.0f);
    top = max(top, abs(v));
    bad = fma(v, zero(), bad);
  }
  const float least = 5.9604645e-8f;  // float16's
  float scale = reduce_max(top) / 127.0f + reduce_add(bad);
  scale = scale < least ? least : scale;
  const uint16_t half = _cvtss_sh(scale, _MM_FROUND_TO_NEAREST_INT);
  const F16 by = set1(_cvtsh_ss(half));
  for (int64_t j = 0; j < dim; j += 16)
    store(head + j, max(min(round_even(load(head + j) / by), set1(127.0f)), set1(-127.0f)));
  return half;
}

template <typename T, typename Side>
void write_head(const RotaryCacheArgs& a, float* head, Side, int64_t at, int64_t offset) {
  constexpr int64_t v = 4 / static_cast<int64_t>(sizeof(T));
  if (a.stored == Stored::same) return put_head<Side, T>(a, head, at, offset, v);
  for (int64_t j = 0; j < a.dim; j += 16) store(head + j, round_to<T>(load(head + j)));
  if (a.stored == Stored::fp8) return put_head<Side, fp8>(a, head, at, offset, v);
  Side::scale(a)[at * a.block_size + offset] = round_head(head, a.dim);
  put_head<Side, int8_t>(a, head, at, offset, v);
}

template <typename T>
void one_token(const RotaryCacheArgs& a, int64_t t, float* head) {
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
  for (int64_t h = 0; h < a.kv_heads; h++) {
    const int64_t at = block * a.kv_heads + h;
    take_head(key + h * a.k.head_stride, a.dim, a.k_norm, a.eps, head);
    if (cos_sin) rotate(head, cos_sin, a.rotary_dim, a.interleaved);
    write_head<T>(a, head, Key{}, at, offset);
    take_head(value + h * a.v.head_stride, a.dim, nullptr, 0.0f, head);
    write_head<T>(a, head, Value{}, at, offset);
  }
}

}  // namespace

void rotary_cache(const RotaryCacheArgs& a) {
  const int64_t work = a.tokens * (a.heads + 2 * a.kv_heads) * a.dim;
  over_rows(work > 16 * 1024 ? a.threads : 1, a.tokens, [&](int64_t t) {
    float* head = static_cast<float*>(
        scratch(Scratch::partials, static_cast<size_t>(a.dim + 16) * sizeof(float)));
    a.dtype == DType::bf16 ? one_token<bf16>(a, t, head) : one_token<float>(a, t, head);
  });
}

}  // namespace penstock::PENSTOCK_ISA
