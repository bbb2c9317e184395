// Between the projection and attention: normalise heads, rotate, write keys and values.
#include <type_traits>

#include "linear.h"
#include "nibbles.h"
#include "rotary.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// x [dim] as floats, times `scale`, and its weights where there are any; `out` has room for a
// multiple of 16.
template <typename T>
void take_head(const T* x, int64_t dim, const float* weight, F16 scale, float* out) {
  for (int64_t j = 0; j < dim; j += 16) {
    const int c = dim - j < 16 ? static_cast<int>(dim - j) : 16;
    const F16 v = load_some(x + j, c);
    store(out + j, weight ? v * scale * load_first(weight + j, c) : v * scale);
  }
}

// body(h, head as floats) for each of `heads` heads of `dim` in a row at x, normalised where there is a
// `norm`, or `normed` without weights.
template <typename T, typename Body>
void each_head(const RotaryCacheArgs& a, const T* x, int64_t heads, int64_t dim, const float* norm,
               bool normed, float* head, Body body) {
  F16 scale = set1(1.0f);
  const bool weighs = norm && !a.weighs_turned;
  if (norm && a.norm_all) scale = inverse_deviation(x, heads * dim, 0.0f, a.eps);
  for (int64_t h = 0; h < heads; h++) {
    const T* from = x + h * dim;
    if (normed || (norm && !a.norm_all)) scale = inverse_deviation(from, dim, 0.0f, a.eps);
    take_head(from, dim, weighs ? norm + (a.norm_all ? h * dim : 0) : nullptr, scale, head);
    body(h);
  }
}

// A head in its basis, or as it is where there is none. side: 0 of queries, 1 of keys; `more` has room
// for what is kept. Sums run over the head's dimensions in order.
float* in_basis(const RotaryCacheArgs& a, int64_t side, int64_t kv_head, float* head,
                float* more) {
  if (!a.bases) return head;
  const float* basis = a.bases + (side * a.kv_heads + kv_head) * a.dim * a.kept;
  const auto columns = [&](int64_t first, auto count) {
    F16 sums[count];
    for (F16& sum : sums) sum = zero();
    for (int64_t d = 0; d < a.dim; d++) {
      const F16 x = set1(head[d]);
      for (int64_t i = 0; i < count; i++)
        sums[i] = fma(x, load(basis + d * a.kept + first + 16 * i), sums[i]);
    }
    for (int64_t i = 0; i < count; i++) store(more + first + 16 * i, sums[i]);
  };
  int64_t first = 0;
  for (; a.kept - first >= 64; first += 64) columns(first, std::integral_constant<int64_t, 4>{});
  for (; first < a.kept; first += 16) columns(first, std::integral_constant<int64_t, 1>{});
  return more;
}

// Where value j of a head at `offset` of a block lies, in units of one value.
struct Key {  // [P/16, D/v, 16, v]; of four bits [P/16, D/2, 16]
  static int64_t place(const RotaryCacheArgs& a, int64_t offset, int64_t j, int64_t v) {
    return key_place(a.padded_dim, offset, j, v);
  }
  // Sixteen values from j on.
  static void put(const RotaryCacheArgs& a, int64_t offset, int64_t j, F16 values, bf16* out) {
    bf16 words[16];
    store(words, values);
    bf16* to = out + place(a, offset, j, 2);
    for (int64_t i = 0; i < 16; i += 2) __builtin_memcpy(to + i * 16, words + i, 4);
  }
  static void* cache(const RotaryCacheArgs& a) { return a.key_cache; }
  static Scales scale(const RotaryCacheArgs& a) { return a.key_scale; }
};
struct Value {  // [D/16, P/v, 16, v]
  static int64_t place(const RotaryCacheArgs& a, int64_t offset, int64_t j, int64_t v) {
    return offset / v * 16 * v + offset % v + j / 16 * a.block_size * 16 + j % 16 * v;
  }
  static void put(const RotaryCacheArgs& a, int64_t offset, int64_t j, F16 values, bf16* out) {
    store_apart(out + place(a, offset, j, 2), values);
  }
  static void* cache(const RotaryCacheArgs& a) { return a.value_cache; }
  static Scales scale(const RotaryCacheArgs& a) { return a.value_scale; }
};

// A head's place in a block.
struct Spot {
  int64_t block, head, offset;
};

// A block's head, of `bytes`.
void* head_at(void* cache, const RotaryCacheArgs& a, int64_t block, int64_t head, int64_t bytes) {
  return static_cast<char*>(cache) + block * a.pitch + head * bytes;
}
// A block's head's scales, `count` of them.
uint16_t* scales_at(const Scales& scale, int64_t block, int64_t head, int64_t count) {
  return scale.data + block * scale.pitch + head * count;
}

template <typename Side, typename S>
void put_head(const RotaryCacheArgs& a, const float* head, const Spot& at, int64_t v) {
  const int64_t bytes = a.block_size * a.padded_dim * static_cast<int64_t>(sizeof(S));
  S* out = static_cast<S*>(head_at(Side::cache(a), a, at.block, at.head, bytes));
  const int64_t offset = at.offset;
  int64_t from = 0;
  if constexpr (std::is_same_v<S, bf16>)
    for (; a.kept - from >= 16; from += 16) Side::put(a, offset, from, load(head + from), out);
  for (int64_t j = from; j < a.padded_dim; j++)
    from_float(j < a.kept ? head[j] : 0.0f, out[Side::place(a, offset, j, v)]);
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

// Where the two of a head's dimensions that share a byte lie: of 16 from `base` on, byte j has
// `first(j)` and `first(j)` + kApart.
struct KeyBytes {  // [P/16, D/2, 16]
  static constexpr int64_t kApart = 1;
  static int64_t first(int64_t j) { return 2 * j; }
  static int64_t place(const RotaryCacheArgs& a, int64_t offset, int64_t base, int64_t j) {
    return offset / 16 * a.padded_dim * 8 + (base / 2 + j) * 16 + offset % 16;
  }
};
struct ValueBytes {  // [D/16, P/2, 2, 8]
  static constexpr int64_t kApart = 8;
  static int64_t first(int64_t j) { return j; }
  static int64_t place(const RotaryCacheArgs& a, int64_t offset, int64_t base, int64_t j) {
    return base / 16 * a.block_size * 8 + offset * 8 + j;
  }
};
template <typename Side>
using BytesOf = std::conditional_t<std::is_same_v<Side, Key>, KeyBytes, ValueBytes>;

// Head to four bits, in groups of its dimensions.
template <typename Side>
void put_nibbles(const RotaryCacheArgs& a, const float* head, const Spot& at) {
  using Bytes = BytesOf<Side>;
  const int64_t bytes = a.block_size * a.padded_dim / 2, offset = at.offset;
  auto* out = static_cast<uint8_t*>(head_at(Side::cache(a), a, at.block, at.head, bytes));
  const int64_t groups = (a.padded_dim + kCacheGroup - 1) / kCacheGroup;
  uint16_t* scales =
      scales_at(Side::scale(a), at.block, at.head, groups * 2 * a.block_size) + offset;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t from = g * kCacheGroup;
    const int64_t count = a.kept - from < kCacheGroup ? a.kept - from : kCacheGroup;
    F16 low = set1(__builtin_inff()), high = set1(-__builtin_inff()), bad = zero();
    for (int64_t j = 0; j < count; j += 16) {
      const int c = count - j < 16 ? static_cast<int>(count - j) : 16;
      const F16 x = load(head + from + j);
      low = min(low, keep_first(x, c, __builtin_inff()));
      high = max(high, keep_first(x, c, -__builtin_inff()));
      bad = fma(keep_first(x, c, 0.0f), zero(), bad);
    }
    uint16_t* scale = scales + g * 2 * a.block_size;
    choose_step(-reduce_max(zero() - low), reduce_max(high), reduce_add(bad), scale[0],
                scale[a.block_size]);
    const F16 step = set1(_cvtsh_ss(scale[0])), minimum = set1(_cvtsh_ss(scale[a.block_size]));
    for (int64_t base = from; base < from + kCacheGroup && base < a.padded_dim; base += 16) {
      float codes[16];
      store(codes, keep_first(to_codes(load(head + base), step, minimum),
                              a.kept - base < 16 ? static_cast<int>(a.kept - base) : 16, 0.0f));
      for (int64_t j = 0; j < 8; j++) {
        const auto first = static_cast<unsigned>(codes[Bytes::first(j)]);
        const auto second = static_cast<unsigned>(codes[Bytes::first(j) + Bytes::kApart]);
        out[Bytes::place(a, offset, base, j)] = static_cast<uint8_t>(first | second << 4);
      }
    }
  }
}

template <typename T, typename Side>
void write_head(const RotaryCacheArgs& a, float* head, Side, const Spot& at) {
  constexpr int64_t v = 4 / static_cast<int64_t>(sizeof(T));
  if (a.stored == Stored::same) return put_head<Side, T>(a, head, at, v);
  for (int64_t j = 0; j < a.kept; j += 16) store(head + j, round_to<T>(load(head + j)));
  if (a.stored == Stored::fp8) return put_head<Side, fp8>(a, head, at, v);
  if (a.stored == Stored::int4) return put_nibbles<Side>(a, head, at);
  scales_at(Side::scale(a), at.block, at.head, a.block_size)[at.offset] = round_head(head, a.kept);
  put_head<Side, int8_t>(a, head, at, v);
}

// Beside a window: the head as it is, for as long as somebody sees it so.
template <typename Side>
void keep_head(const RotaryCacheArgs& a, const float* head, bf16* pool, int64_t h, int64_t slot) {
  const int64_t block = a.recent.slots[slot / a.block_size], offset = slot % a.block_size;
  bf16* out = pool + (block * a.kv_heads + h) * a.block_size * a.padded_dim;
  for (int64_t j = 0; j < a.padded_dim; j++)
    from_float(j < a.kept ? head[j] : 0.0f, out[Side::place(a, offset, j, 2)]);
}

// Step, minimum and codes of one dimension over 32 positions, 16 in each half.
void round_channel(F16 (&half)[2], uint16_t& step, uint16_t& minimum) {
  const F16 low = min(half[0], half[1]), high = max(half[0], half[1]);
  const F16 bad = fma(half[0], zero(), half[1] * zero());
  choose_step(-reduce_max(zero() - low), reduce_max(high), reduce_add(bad), step, minimum);
  for (F16& x : half) x = to_codes(x, set1(_cvtsh_ss(step)), set1(_cvtsh_ss(minimum)));
}

// The keys of one head at the 32 positions that end with `slot`, from the window to four bits.
void round_keys(const RotaryCacheArgs& a, int64_t h, int64_t slot) {
  const int64_t block = slot / a.block_size, first = slot % a.block_size / kKeyGroup * kKeyGroup;
  const int64_t head_size = a.block_size * a.padded_dim, panel = a.padded_dim * kColumns;
  const bf16* keys = a.recent.keys + (a.recent.slots[block] * a.kv_heads + h) * head_size +
                     first * a.padded_dim;
  uint8_t* out = static_cast<uint8_t*>(head_at(a.key_cache, a, block, h, head_size / 2)) +
                 first * a.padded_dim / 2;
  const int64_t groups = a.block_size / kKeyGroup, count = 2 * a.padded_dim;
  uint16_t* scale =
      scales_at(a.key_scale, block, h, groups * count) + first / kKeyGroup * count;
  for (int64_t d = 0; d < a.padded_dim; d += 2) {
    F16 even[2], odd[2];
    for (int64_t i = 0; i < 2; i++) {
      even[i] = load_even(keys + i * panel + d * kColumns);
      odd[i] = load_odd(keys + i * panel + d * kColumns);
    }
    round_channel(even, scale[d], scale[a.padded_dim + d]);
    round_channel(odd, scale[d + 1], scale[a.padded_dim + d + 1]);
    for (int64_t i = 0; i < 2; i++) {
      float first_code[16], second_code[16];
      store(first_code, even[i]);
      store(second_code, odd[i]);
      uint8_t* line = out + (i * panel + d * kColumns) / 2;
      for (int64_t c = 0; c < kColumns; c++)
        line[c] = static_cast<uint8_t>(static_cast<unsigned>(first_code[c]) |
                                       static_cast<unsigned>(second_code[c]) << 4);
    }
  }
}

// Beside a window, after all tokens were written: the groups of keys that are now whole.
void round_full_groups(const RotaryCacheArgs& a, int threads) {
  over_rows(threads, a.tokens, [&](int64_t t) {
    const int64_t slot = a.slots[t];
    if (slot < 0 || slot % kKeyGroup != kKeyGroup - 1) return;
    for (int64_t h = 0; h < a.kv_heads; h++) round_keys(a, h, slot);
  });
}

// A head, normalised: rotated, and weighed where that comes after.
void turn_head(const RotaryCacheArgs& a, const float* cos_sin, const float* norm, float* head) {
  if (cos_sin) rotate_head(head, cos_sin, a.rotary_dim, a.interleaved);
  if (!norm || !a.weighs_turned) return;
  for (int64_t j = 0; j < a.dim; j += 16) {
    const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
    store(head + j, load(head + j) * load_first(norm + j, c));
  }
}

// The angles of a position.
const float* angles(const RotaryCacheArgs& a, int64_t position) {
  return a.cos_sin ? a.cos_sin + position * a.rotary_dim : nullptr;
}

// Whether queries are turned as they are, halves of whole registers.
bool turns_only(const RotaryCacheArgs& a) {
  return a.cos_sin && !a.q_norm && !a.bases && !a.interleaved && a.rotary_dim == a.dim &&
         a.dim % 32 == 0;
}

// `heads` heads of `dim`, as turn_head does it.
template <typename T>
void turn_heads(const T* q, int64_t heads, int64_t dim, const float* cos_sin, T* out) {
  const int64_t half = dim / 2;
  for (int64_t j = 0; j < half; j += 16) {
    const F16 c = load(cos_sin + j), s = load(cos_sin + half + j);
    for (int64_t at = j; at < heads * dim; at += dim) {
      const F16 x = load(q + at), y = load(q + at + half);
      store(out + at, x * c - y * s);
      store(out + at + half, y * c + x * s);
    }
  }
}

// The queries of token t, turned as at `position`.
template <typename T>
void turn_queries(const RotaryCacheArgs& a, int64_t t, int64_t position, T* out, float* head) {
  const float* cos_sin = angles(a, position);
  const T* q = static_cast<const T*>(a.q) + t * a.stride;
  if (turns_only(a)) return turn_heads(q, a.heads, a.dim, cos_sin, out);
  const int64_t group = a.heads / a.kv_heads;
  each_head(a, q, a.heads, a.dim, a.q_norm, false, head, [&](int64_t h) {
    turn_head(a, cos_sin, a.q_norm, head);
    const float* from = in_basis(a, 0, h / group, head, head + a.dim + 16);
    for (int64_t j = 0; j < a.kept; j += 16)
      store_some(out + h * a.kept + j, load(from + j),
                 a.kept - j < 16 ? static_cast<int>(a.kept - j) : 16);
  });
}

template <typename T>
void one_query(const RotaryCacheArgs& a, int64_t t, float* head) {
  const int64_t position = a.positions[t], size = a.heads * a.kept;
  T* out = static_cast<T*>(a.q_out) + t * size * (a.sink_reach > 0 ? 2 : 1);
  turn_queries(a, t, position, out, head);
  if (a.sink_reach > 0)
    turn_queries(a, t, position < a.sink_reach ? position : a.sink_reach - 1, out + size, head);
}

// The key and value of token t, into a slot.
template <typename T>
void one_slot(const RotaryCacheArgs& a, int64_t t, int64_t slot, float* head) {
  if (slot < 0 || a.parts == 1) return;
  const float* cos_sin = angles(a, a.positions[t]);
  const int64_t block = slot / a.block_size, offset = slot % a.block_size;
  const T* key = static_cast<const T*>(a.k) + t * a.stride;
  each_head(a, key, a.kv_heads, a.dim, a.k_norm, false, head, [&](int64_t h) {
    turn_head(a, cos_sin, a.k_norm, head);
    float* own = in_basis(a, 1, h, head, head + a.dim + 16);
    if (a.recent.slots) return keep_head<Key>(a, own, a.recent.keys, h, slot);
    write_head<T>(a, own, Key{}, {block, h, offset});
  });
  const T* value = static_cast<const T*>(a.v) + t * a.stride;
  each_head(a, value, a.kv_heads, a.kept, nullptr, a.norm_values, head, [&](int64_t h) {
    if (a.recent.slots) keep_head<Value>(a, head, a.recent.values, h, slot);
    write_head<T>(a, head, Value{}, {block, h, offset});
  });
}

// Tokens first, then the copies.
template <typename T>
void one_row(const RotaryCacheArgs& a, int64_t row) {
  float* head = static_cast<float*>(
      scratch(Scratch::partials, static_cast<size_t>(a.dim + a.kept + 32) * sizeof(float)));
  if (row < a.tokens) {
    one_query<T>(a, row, head);
    one_slot<T>(a, row, a.slots[row], head);
  } else {
    const int32_t* copy = a.copies + 2 * (row - a.tokens);
    one_slot<T>(a, copy[0], copy[1], head);
  }
}

}  // namespace

void rotary_cache(const RotaryCacheArgs& a) {
  const int64_t work = a.tokens * (a.heads + 2 * a.kv_heads) * a.dim;
  const int threads = work > 16 * 1024 ? a.threads : 1;
  over_rows(threads, a.tokens + a.copied, [&](int64_t row) {
    a.dtype == DType::bf16 ? one_row<bf16>(a, row) : one_row<float>(a, row);
  });
  if (a.recent.slots && a.parts > 1) round_full_groups(a, threads);
}

}  // namespace penstock::PENSTOCK_ISA
