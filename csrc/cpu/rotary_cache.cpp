// Between the projection and attention: normalise heads, rotate, write keys and values.
#include "linear.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// x [dim] as floats, times `scale` and its weights where there are any; `out` has room for a
// multiple of 16.
template <typename T>
void take_head(const T* x, int64_t dim, const float* weight, F16 scale, float* out) {
  for (int64_t j = 0; j < dim; j += 16) {
    const int c = dim - j < 16 ? static_cast<int>(dim - j) : 16;
    const F16 v = load_some(x + j, c);
    store(out + j, weight ? v * scale * load_first(weight + j, c) : v);
  }
}

// body(h, head as floats) for each of `heads` heads in a row at x, normalised where asked.
template <typename T, typename Body>
void each_head(const RotaryCacheArgs& a, const T* x, int64_t heads, const float* norm, float* head,
               Body body) {
  F16 scale = zero();
  if (norm && a.norm_all) scale = inverse_deviation(x, heads * a.dim, 0.0f, a.eps);
  for (int64_t h = 0; h < heads; h++) {
    const T* from = x + h * a.dim;
    if (norm && !a.norm_all) scale = inverse_deviation(from, a.dim, 0.0f, a.eps);
    take_head(from, a.dim, norm ? norm + (a.norm_all ? h * a.dim : 0) : nullptr, scale, head);
    body(h);
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
  const auto turn = [&] {
    if (cos_sin) rotate(head, cos_sin, a.rotary_dim, a.interleaved);
  };
  const T* q = static_cast<const T*>(a.q) + t * a.stride;
  T* q_out = static_cast<T*>(a.q_out) + t * a.heads * a.dim;
  each_head(a, q, a.heads, a.q_norm, head, [&](int64_t h) {
    turn();
    for (int64_t j = 0; j < a.dim; j += 16)
      store_some(q_out + h * a.dim + j, load(head + j),
                 a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16);
  });
  const int64_t slot = a.slots[t];
  if (slot < 0) return;
  const int64_t first = slot / a.block_size * a.kv_heads, offset = slot % a.block_size;
  const T* key = static_cast<const T*>(a.k) + t * a.stride;
  each_head(a, key, a.kv_heads, a.k_norm, head, [&](int64_t h) {
    turn();
    write_head<T>(a, head, Key{}, first + h, offset);
  });
  const T* value = static_cast<const T*>(a.v) + t * a.stride;
  each_head(a, value, a.kv_heads, nullptr, head,
            [&](int64_t h) { write_head<T>(a, head, Value{}, first + h, offset); });
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
