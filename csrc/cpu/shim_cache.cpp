// The operators that write and read the paged cache, bound to torch.
#include "program.h"
#include "shim.h"

namespace penstock::shim {

int64_t pitch_of(const Tensor& part, const char* what) {
  int64_t size = 1;
  for (int64_t i = part.dim() - 1; i > 0; size *= part.size(i--))
    STD_TORCH_CHECK(part.size(i) == 1 || part.stride(i) == size, what,
                    ": the blocks of a cache must be contiguous, each by itself");
  if (part.size(0) < 2) return size;
  STD_TORCH_CHECK(part.stride(0) >= size, what, ": the blocks of a cache lie on each other");
  return part.stride(0);
}

namespace {

struct CacheShape {
  int64_t blocks, kv_heads, block_size, padded_dim;
  int64_t pitch;  // bytes
  Stored stored;
  Scales key_scale, value_scale;
  Recent recent;
};

Stored stored_as(ScalarType type) {
  switch (type) {
    case ScalarType::Char:
      return Stored::int8;
    case ScalarType::Byte:
      return Stored::int4;
    case ScalarType::Float8_e4m3fn:
      return Stored::fp8;
    default:
      return Stored::same;
  }
}

// The dimensions of a cache's blocks, for the last two of its keys and values.
void check_blocks(const Tensor& keys, const Tensor& values, const CacheShape& s, int64_t dim) {
  const int64_t v = s.stored == Stored::same && keys.scalar_type() == ScalarType::Float ? 1 : 2;
  const bool half = s.stored == Stored::int4;
  STD_TORCH_CHECK(keys.size(4) == 16 && keys.size(5) == (half ? 1 : v) &&
                      values.size(0) == s.blocks && values.size(1) == s.kv_heads &&
                      values.size(2) * 16 == s.padded_dim && values.size(3) * v == s.block_size &&
                      values.size(4) == (half ? 2 : 16) && values.size(5) == (half ? 8 : v) &&
                      s.padded_dim == (dim + 15) / 16 * 16 && s.block_size % 32 == 0,
                  "key_cache and value_cache don't have the layout of ops.rotary_cache for heads "
                  "of ",
                  dim);
  STD_TORCH_CHECK(s.kv_heads > 0, "key_cache has no heads");
}

Scales scales(const Tensor& scale, int64_t blocks, int64_t count, const char* shape) {
  STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Half && scale.dim() > 1 &&
                      scale.size(0) == blocks && scale.numel() == count,
                  "scales must be float16 ", shape, ": ", count, " of them");
  return {static_cast<uint16_t*>(scale.data_ptr()), pitch_of(scale, "scales")};
}

// What lies beside int4 keys and values where there is a window.
Recent recent_of(const CacheTensors& c, const CacheShape& s) {
  const int given = c.recent_keys.has_value() + c.recent_values.has_value() +
                    c.recent_slots.has_value() + c.recent_window.has_value();
  if (given == 0) return {};
  STD_TORCH_CHECK(given == 4 && s.stored == Stored::int4,
                  "a window has recent_keys, recent_values, recent_slots and recent_window, beside "
                  "an int4 cache");
  const int64_t count = c.recent_keys->size(0);
  for (const Tensor& pool : {*c.recent_keys, *c.recent_values})
    STD_TORCH_CHECK(pool.scalar_type() == ScalarType::BFloat16 && pool.is_contiguous() &&
                        pool.size(0) == count &&
                        pool.numel() == count * s.kv_heads * s.block_size * s.padded_dim,
                    "recent_keys and recent_values must be bfloat16 panels of the same blocks");
  STD_TORCH_CHECK(c.recent_window->scalar_type() == ScalarType::Int &&
                      c.recent_window->numel() == 1,
                  "recent_window must be one int32");
  const int64_t window = *static_cast<const int32_t*>(c.recent_window->data_ptr());
  STD_TORCH_CHECK(window > 0, "recent_window must be positive, not ", window);
  return {static_cast<bf16*>(c.recent_keys->data_ptr()),
          static_cast<bf16*>(c.recent_values->data_ptr()),
          integers(*c.recent_slots, s.blocks, "recent_slots"), count, window};
}

// `dtype` is that of the queries; caches of a byte or less go with bfloat16.
CacheShape cache_shape(const CacheTensors& c, DType dtype, int64_t dim) {
  const Tensor &keys = c.keys, &values = c.values;
  const Stored kind = stored_as(keys.scalar_type());
  if (kind == Stored::same) {
    STD_TORCH_CHECK(dtype_of(keys, "key_cache") == dtype, "q and key_cache must have one dtype");
  } else {
    STD_TORCH_CHECK(dtype == DType::bf16, "an int8, fp8 or int4 cache goes with bfloat16");
  }
  const int64_t v = dtype == DType::bf16 ? 2 : 1;
  STD_TORCH_CHECK(keys.scalar_type() == values.scalar_type(),
                  "key_cache and value_cache must have the same dtype");
  STD_TORCH_CHECK(keys.dim() == 6 && values.dim() == 6, "caches must have 6 dimensions");
  CacheShape s = {};
  s.blocks = keys.size(0);
  s.kv_heads = keys.size(1);
  s.block_size = keys.size(2) * 16;
  s.padded_dim = keys.size(3) * v;
  s.stored = kind;
  check_blocks(keys, values, s, dim);
  const int64_t pitch = pitch_of(keys, "key_cache");
  STD_TORCH_CHECK(pitch == pitch_of(values, "value_cache"),
                  "the blocks of key_cache and of value_cache must be equally far apart");
  s.pitch = pitch * static_cast<int64_t>(keys.element_size());
  const bool scaled = kind == Stored::int8 || kind == Stored::int4;
  STD_TORCH_CHECK(scaled == c.key_scale.has_value() && scaled == c.value_scale.has_value(),
                  "an int8 or int4 cache, and only that, has scales");
  s.recent = recent_of(c, s);
  const int64_t heads = s.blocks * s.kv_heads;
  if (kind == Stored::int8) {
    const int64_t count = heads * s.block_size;
    s.key_scale = scales(*c.key_scale, s.blocks, count, "[blocks, heads, block size]");
    s.value_scale = scales(*c.value_scale, s.blocks, count, "[blocks, heads, block size]");
  } else if (scaled) {
    const int64_t groups = (s.padded_dim + kCacheGroup - 1) / kCacheGroup;
    const int64_t count = heads * groups * 2 * s.block_size;
    s.value_scale =
        scales(*c.value_scale, s.blocks, count, "[blocks, heads, groups, 2, block size]");
    s.key_scale =
        s.recent.slots
            ? scales(*c.key_scale, s.blocks,
                     heads * (s.block_size / kKeyGroup) * 2 * s.padded_dim,
                     "[blocks, heads, block size / 32, 2, padded dim]")
            : scales(*c.key_scale, s.blocks, count, "[blocks, heads, groups, 2, block size]");
  }
  return s;
}

template <typename Args>
void take_shape(const CacheShape& shape, Args& a) {
  a.kv_heads = shape.kv_heads;
  a.stored = shape.stored;
  a.blocks = shape.blocks;
  a.block_size = shape.block_size;
  a.padded_dim = shape.padded_dim;
  a.pitch = shape.pitch;
  a.key_scale = shape.key_scale;
  a.value_scale = shape.value_scale;
  a.recent = shape.recent;
}

// Dimensions of a head, of queries and of what is kept, from those of all of them.
void take_widths(RotaryCacheArgs& a, int64_t columns, const Optional& bases) {
  const int64_t all = a.heads + (a.parts - 1) * a.kv_heads;
  if (!bases) {
    a.dim = a.kept = columns / all;
    STD_TORCH_CHECK(a.dim > 0 && columns == a.dim * all, "rotary_cache: ", columns,
                    " columns aren't ", a.heads, " + ", a.parts - 1, " · ", a.kv_heads, " heads");
    return;
  }
  STD_TORCH_CHECK(a.parts == 3, "rotary_cache: bases are of queries and keys beside values");
  STD_TORCH_CHECK(bases->dim() == 4 && bases->size(0) == 2 && bases->size(1) == a.kv_heads &&
                      a.heads % a.kv_heads == 0,
                  "rotary_cache: bases must be [2, ", a.kv_heads, ", dim, kept]");
  a.dim = bases->size(2);
  a.kept = bases->size(3);
  STD_TORCH_CHECK(a.kept > 0 && a.kept % 16 == 0 && a.kept <= a.dim, "rotary_cache: ", a.kept,
                  " dimensions that are kept of ", a.dim, " aren't a multiple of 16 of them");
  const int64_t expected = (a.heads + a.kv_heads) * a.dim + a.kv_heads * a.kept;
  STD_TORCH_CHECK(columns == expected, "rotary_cache: ", columns, " columns aren't the ", expected,
                  " of ", a.heads, " and ", a.kv_heads, " heads of ", a.dim, ", and values of ",
                  a.kept);
  a.bases = floats(*bases, bases->numel(), "rotary_cache: bases");
}

}  // namespace

RotaryCacheArgs rotary_cache_args(Form qkv, int64_t heads, const Optional& q_norm,
                                  const Optional& k_norm, double eps, const Optional& cos_sin,
                                  bool interleaved, const CacheTensors& cache,
                                  int64_t sink_reach, const Optional& bases, bool norm_values,
                                  int64_t parts) {
  RotaryCacheArgs a = {};
  a.dtype = qkv.dtype;
  a.norm_values = norm_values;
  a.parts = parts;
  a.heads = heads;
  a.sink_reach = sink_reach;
  STD_TORCH_CHECK(sink_reach >= 0, "rotary_cache: sink_reach is negative: ", sink_reach);
  STD_TORCH_CHECK(parts >= 1 && parts <= 3, "rotary_cache: parts are 1 to 3, not ", parts);
  STD_TORCH_CHECK(cache.keys.dim() == 6 && heads > 0,
                  "rotary_cache: key_cache must have 6 dimensions, has ", cache.keys.dim());
  a.kv_heads = cache.keys.size(1);
  take_widths(a, qkv.columns, bases);
  take_shape(cache_shape(cache, a.dtype, a.kept), a);
  a.norm_all = q_norm && q_norm->numel() != a.dim;
  a.q_norm = floats(q_norm, a.norm_all ? heads * a.dim : a.dim, "rotary_cache: q_norm");
  a.k_norm = floats(k_norm, a.norm_all ? a.kv_heads * a.dim : a.dim, "rotary_cache: k_norm");
  a.weighs_turned = q_norm && q_norm->dim() == 2;
  STD_TORCH_CHECK(parts == 1 || (k_norm && k_norm->dim() == 2) == a.weighs_turned,
                  "rotary_cache: q_norm and k_norm have weights at different places");
  a.eps = static_cast<float>(eps);
  if (cos_sin) {
    a.cos_sin = floats(*cos_sin, cos_sin->numel(), "rotary_cache: cos_sin");
    a.num_positions = cos_sin->size(0);
    a.rotary_dim = cos_sin->size(1);
    STD_TORCH_CHECK(a.rotary_dim <= a.dim && a.rotary_dim % 2 == 0, "rotary_cache: rotary dim ",
                    a.rotary_dim, " of heads of ", a.dim);
  }
  a.interleaved = interleaved;
  a.key_cache = cache.keys.data_ptr();
  a.value_cache = cache.values.data_ptr();
  return a;
}

void check_places(const int32_t* positions, const int32_t* slots, int64_t count, int64_t table,
                  int64_t places, const char* what) {
  for (int64_t t = 0; t < count; t++) {
    STD_TORCH_CHECK(positions[t] >= 0 && positions[t] < table, what, ": position ",
                    positions[t], " is beyond the table of ", table);
    STD_TORCH_CHECK(slots[t] < places, what, ": slot ", slots[t],
                    " is beyond the cache of ", places);
  }
}

int64_t check_copies(const Optional& copies, int64_t count, int64_t places, const char* what) {
  if (!copies) return 0;
  STD_TORCH_CHECK(copies->dim() == 2 && copies->size(1) == 2, "copies must be [copied, 2]");
  const int32_t* pair = integers(*copies, copies->numel(), "copies");
  for (int64_t i = 0; i < copies->size(0); i++, pair += 2)
    STD_TORCH_CHECK(pair[0] >= 0 && pair[0] < count && pair[1] >= 0 && pair[1] < places,
                    what, ": a copy of token ", pair[0], " of ", count, " to slot ", pair[1],
                    " of ", places);
  return copies->size(0);
}

Tensor rotary_cache(const Tensor& qkv, int64_t heads, Optional q_norm, Optional k_norm, double eps,
                    Optional cos_sin, bool interleaved, const Tensor& positions,
                    const Tensor& slots, const Tensor& key_cache, const Tensor& value_cache,
                    Optional key_scale, Optional value_scale, Optional recent_keys,
                    Optional recent_values, Optional recent_slots, Optional recent_window,
                    Optional copies, int64_t sink_reach, Optional bases, bool norm_values,
                    int64_t parts) {
  RotaryCacheArgs a = rotary_cache_args(
      form_of(qkv, "rotary_cache: qkv"), heads, q_norm, k_norm, eps, cos_sin, interleaved,
      {key_cache, value_cache, key_scale, value_scale, recent_keys, recent_values, recent_slots,
       recent_window},
      sink_reach, bases, norm_values, parts);
  a.tokens = qkv.size(0);
  a.positions = integers(positions, a.tokens, "rotary_cache: positions");
  a.slots = integers(slots, a.tokens, "rotary_cache: slots");
  check_places(a.positions, a.slots, a.tokens, a.cos_sin ? a.num_positions : INT64_MAX,
               a.blocks * a.block_size);
  check_recent(a.recent, a.slots, a.tokens, a.block_size);
  a.copied = check_copies(copies, a.tokens, a.blocks * a.block_size);
  STD_TORCH_CHECK(a.copied == 0 || !a.recent.slots, "rotary_cache: no copies beside a window");
  if (a.copied > 0) a.copies = static_cast<const int32_t*>(copies->data_ptr());
  place_heads(a, qkv.data_ptr(), qkv.stride(0));
  Tensor out =
      torch::stable::new_empty(qkv, {a.tokens, a.heads * (sink_reach > 0 ? 2 : 1), a.kept});
  a.q_out = out.data_ptr();
  a.threads = threads();
  kernels().rotary_cache(a);
  return out;
}

void see_sinks(AttentionArgs& a, int64_t window, int64_t sink_tokens, const char* what) {
  STD_TORCH_CHECK(sink_tokens >= 0 && sink_tokens <= 256 && (sink_tokens == 0 || window > 0), what,
                  ": sink_tokens are 0 to 256 and beside a window; these are ", sink_tokens,
                  " beside a window of ", window);
  a.window = window;
  a.sink_tokens = sink_tokens;
}

AttentionArgs attention_args(DType dtype, int64_t heads, int64_t dim, const CacheTensors& cache,
                             double scale, int64_t window, double softcap, const Optional& sinks,
                             bool causal, int64_t sink_tokens) {
  AttentionArgs a = {};
  a.heads = heads;
  a.dim = dim;
  a.dtype = dtype;
  take_shape(cache_shape(cache, a.dtype, a.dim), a);
  STD_TORCH_CHECK(a.heads % a.kv_heads == 0, "paged_attention: ", a.heads,
                  " heads aren't a multiple of ", a.kv_heads, " key-value heads");
  a.table_tokens = a.block_size;
  a.key_cache = cache.keys.data_ptr();
  a.value_cache = cache.values.data_ptr();
  a.value_dim = a.dim;
  a.padded_values = a.padded_dim;
  a.scale = static_cast<float>(scale);
  a.softcap = static_cast<float>(softcap);
  a.sinks = floats(sinks, a.heads, "paged_attention: sinks");
  a.whole = !causal;
  STD_TORCH_CHECK(causal || (sink_tokens == 0 && !a.recent.slots),
                  "paged_attention: what isn't causal has no sink_tokens, and a cache without a "
                  "window");
  see_sinks(a, window, sink_tokens, "paged_attention");
  STD_TORCH_CHECK(sink_tokens == 0 || !a.recent.slots,
                  "paged_attention: a cache with a window has no sink_tokens");
  return a;
}

Sequences sequences_of(const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, const char* what) {
  Sequences s = {};
  s.count = context_len.numel();
  s.context_len = integers(context_len, s.count, what);
  s.query_start = integers(query_start, s.count + 1, what);
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == s.count &&
                      block_table.scalar_type() == ScalarType::Int &&
                      (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                  what, ": block_table must be int32 [sequences, blocks]");
  s.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  s.table_stride = block_table.stride(0);
  s.width = block_table.size(1);
  return s;
}

void check_sequences(const Sequences& s, int64_t tokens, int64_t blocks, int64_t block_size,
                     const char* what) {
  for (int64_t b = 0; b < s.count; b++) {
    const int64_t count = s.query_start[b + 1] - s.query_start[b];
    const int64_t need = (s.context_len[b] + block_size - 1) / block_size;
    STD_TORCH_CHECK(count >= 0 && count <= s.context_len[b] && need <= s.width,
                    what, ": sequence ", b, " has ", count, " queries, a context of ",
                    s.context_len[b], " and ", s.width, " blocks");
    for (int64_t i = 0; i < need; i++) {
      const int64_t block = s.block_table[b * s.table_stride + i];
      STD_TORCH_CHECK(block >= 0 && block < blocks, what, ": block ", block,
                      " is outside the cache of ", blocks);
    }
  }
  STD_TORCH_CHECK(s.query_start[0] == 0 && s.query_start[s.count] == tokens,
                  what, ": query_start doesn't cover the ", tokens, " queries");
}

void check_recent(const Recent& recent, const int32_t* slots, int64_t count, int64_t block_size) {
  for (int64_t t = 0; recent.slots && t < count; t++) {
    const int64_t place = slots[t] < 0 ? 0 : recent.slots[slots[t] / block_size];
    STD_TORCH_CHECK(slots[t] < 0 || (place >= 0 && place < recent.count),
                    "rotary_cache: block ", slots[t] / block_size, " has place ", place, " of ",
                    recent.count, " in the window");
  }
}

void check_recent(const Recent& recent, const Sequences& s, int64_t block_size) {
  for (int64_t b = 0; recent.slots && b < s.count; b++) {
    const int64_t length = s.context_len[b];
    const int64_t first = length - (s.query_start[b + 1] - s.query_start[b]);
    if (first == length) continue;
    const int64_t from = recent_from(first, recent.window) / block_size;
    for (int64_t i = from; i * block_size < length; i++) {
      const int64_t block = s.block_table[b * s.table_stride + i];
      STD_TORCH_CHECK(recent.slots[block] >= 0 && recent.slots[block] < recent.count,
                      "paged_attention: block ", block, " of sequence ", b, " has place ",
                      recent.slots[block], " of ", recent.count, " in the window");
    }
  }
}

Tensor paged_attention(const Tensor& q, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, double scale, int64_t window, double softcap,
                       Optional sinks, Optional key_scale, Optional value_scale,
                       Optional recent_keys, Optional recent_values, Optional recent_slots,
                       Optional recent_window, bool causal, int64_t sink_tokens) {
  STD_TORCH_CHECK(q.dim() == 3 && q.is_contiguous(),
                  "paged_attention: q must be [tokens, heads, dim], contiguous");
  STD_TORCH_CHECK(sink_tokens == 0 || q.size(1) % 2 == 0,
                  "paged_attention: beside sink_tokens q has the heads of a token twice, not ",
                  q.size(1), " of them");
  AttentionArgs a = attention_args(
      dtype_of(q, "paged_attention: q"), q.size(1) / (sink_tokens > 0 ? 2 : 1), q.size(2),
      {key_cache, value_cache, key_scale, value_scale, recent_keys, recent_values, recent_slots,
       recent_window},
      scale, window, softcap, sinks, causal, sink_tokens);
  const Sequences s = sequences_of(query_start, context_len, block_table);
  check_sequences(s, q.size(0), a.blocks, a.block_size);
  check_recent(a.recent, s, a.block_size);
  a.query_start = s.query_start;
  a.context_len = s.context_len;
  a.block_table = s.block_table;
  a.table_stride = s.table_stride;
  a.sequences = s.count;
  Tensor out = torch::stable::new_empty(q, {q.size(0), a.heads * a.dim});
  a.q = q.data_ptr();
  a.out = out.data_ptr();
  a.out_stride = a.heads * a.value_dim;
  a.threads = threads();
  kernels().attention(a);
  return out;
}

}  // namespace penstock::shim
