// The operators that write and read the paged cache, bound to torch.
#include "shim.h"

namespace penstock::shim {
namespace {

struct CacheShape {
  int64_t blocks, kv_heads, block_size, padded_dim;
  penstock::Stored stored;
  uint16_t* key_scale;
  uint16_t* value_scale;
};

// `dtype` is that of the queries; one-byte caches go with bfloat16.
CacheShape cache_shape(const Tensor& keys, const Tensor& values,
                       const std::optional<Tensor>& key_scale,
                       const std::optional<Tensor>& value_scale, DType dtype, int64_t dim) {
  using penstock::Stored;
  const ScalarType type = keys.scalar_type();
  const bool float8 = type == ScalarType::Float8_e4m3fn;
  const Stored kind = type == ScalarType::Char ? Stored::int8 : float8 ? Stored::fp8 : Stored::same;
  if (kind == Stored::same) {
    STD_TORCH_CHECK(dtype_of(keys, "key_cache") == dtype, "q and key_cache must have one dtype");
  } else {
    STD_TORCH_CHECK(dtype == DType::bf16, "an int8 or fp8 cache goes with bfloat16");
  }
  const int64_t v = dtype == DType::bf16 ? 2 : 1;
  same_dtype(keys, values, "key_cache and value_cache");
  STD_TORCH_CHECK(keys.dim() == 6 && values.dim() == 6 && keys.is_contiguous() &&
                      values.is_contiguous(),
                  "caches must be contiguous, with 6 dimensions");
  CacheShape s = {keys.size(0), keys.size(1), keys.size(2) * 16, keys.size(3) * v, kind, {}, {}};
  STD_TORCH_CHECK(keys.size(4) == 16 && keys.size(5) == v && values.size(0) == s.blocks &&
                      values.size(1) == s.kv_heads && values.size(2) * 16 == s.padded_dim &&
                      values.size(3) * v == s.block_size && values.size(4) == 16 &&
                      values.size(5) == v && s.padded_dim == (dim + 15) / 16 * 16 &&
                      s.block_size % 32 == 0,
                  "key_cache and value_cache don't have the layout of ops.rotary_cache for heads "
                  "of ",
                  dim);
  const bool scaled = kind == Stored::int8;
  STD_TORCH_CHECK(scaled == key_scale.has_value() && scaled == value_scale.has_value(),
                  "an int8 cache, and only that, has scales");
  if (scaled) {
    for (const Tensor& scale : {*key_scale, *value_scale})
      STD_TORCH_CHECK(scale.scalar_type() == ScalarType::Half && scale.is_contiguous() &&
                          scale.numel() == s.blocks * s.kv_heads * s.block_size,
                      "scales must be float16 [", s.blocks, ", ", s.kv_heads, ", ", s.block_size,
                      "]");
    s.key_scale = static_cast<uint16_t*>(key_scale->data_ptr());
    s.value_scale = static_cast<uint16_t*>(value_scale->data_ptr());
  }
  return s;
}

}  // namespace

Tensor rotary_cache(const Tensor& qkv, int64_t heads, std::optional<Tensor> q_norm,
                    std::optional<Tensor> k_norm, double eps, std::optional<Tensor> cos_sin,
                    bool interleaved, const Tensor& positions, const Tensor& slots,
                    const Tensor& key_cache, const Tensor& value_cache,
                    std::optional<Tensor> key_scale, std::optional<Tensor> value_scale) {
  check_rows(qkv, "rotary_cache: qkv");
  penstock::RotaryCacheArgs a = {};
  a.dtype = dtype_of(qkv, "rotary_cache: qkv");
  a.tokens = qkv.size(0);
  a.heads = heads;
  STD_TORCH_CHECK(key_cache.dim() == 6 && heads > 0,
                  "rotary_cache: key_cache must have 6 dimensions, has ", key_cache.dim());
  a.kv_heads = key_cache.size(1);
  const int64_t all = heads + 2 * a.kv_heads;
  a.dim = qkv.size(1) / all;
  STD_TORCH_CHECK(a.dim > 0 && qkv.size(1) == a.dim * all, "rotary_cache: ", qkv.size(1),
                  " columns aren't ", heads, " + 2 · ", a.kv_heads, " heads");
  const CacheShape shape =
      cache_shape(key_cache, value_cache, key_scale, value_scale, a.dtype, a.dim);
  const char* data = static_cast<const char*>(qkv.data_ptr());
  const int64_t head_bytes = a.dim * (a.dtype == DType::bf16 ? 2 : 4);
  a.q = {data, qkv.stride(0), a.dim};
  a.k = {data + heads * head_bytes, qkv.stride(0), a.dim};
  a.v = {data + (heads + a.kv_heads) * head_bytes, qkv.stride(0), a.dim};
  a.block_size = shape.block_size;
  a.padded_dim = shape.padded_dim;
  a.stored = shape.stored;
  a.key_scale = shape.key_scale;
  a.value_scale = shape.value_scale;
  a.q_norm = floats(q_norm, a.dim, "rotary_cache: q_norm");
  a.k_norm = floats(k_norm, a.dim, "rotary_cache: k_norm");
  a.eps = static_cast<float>(eps);
  a.positions = integers(positions, a.tokens, "rotary_cache: positions");
  a.slots = integers(slots, a.tokens, "rotary_cache: slots");
  if (cos_sin) {
    a.cos_sin = floats(*cos_sin, cos_sin->numel(), "rotary_cache: cos_sin");
    a.num_positions = cos_sin->size(0);
    a.rotary_dim = cos_sin->size(1);
    STD_TORCH_CHECK(a.rotary_dim <= a.dim && a.rotary_dim % 2 == 0, "rotary_cache: rotary dim ",
                    a.rotary_dim, " of heads of ", a.dim);
  }
  a.interleaved = interleaved;
  for (int64_t t = 0; t < a.tokens; t++) {
    STD_TORCH_CHECK(!a.cos_sin || (a.positions[t] >= 0 && a.positions[t] < a.num_positions),
                    "rotary_cache: position ", a.positions[t], " is beyond the table of ",
                    a.num_positions);
    STD_TORCH_CHECK(a.slots[t] < shape.blocks * shape.block_size, "rotary_cache: slot ",
                    a.slots[t], " is beyond the cache of ", shape.blocks * shape.block_size);
  }
  Tensor out = torch::stable::new_empty(qkv, {a.tokens, a.heads, a.dim});
  a.key_cache = key_cache.data_ptr();
  a.value_cache = value_cache.data_ptr();
  a.q_out = out.data_ptr();
  a.threads = threads();
  penstock::kernels().rotary_cache(a);
  return out;
}

Tensor paged_attention(const Tensor& q, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, double scale, int64_t window, double softcap,
                       std::optional<Tensor> sinks, std::optional<Tensor> key_scale,
                       std::optional<Tensor> value_scale) {
  STD_TORCH_CHECK(q.dim() == 3 && q.is_contiguous(),
                  "paged_attention: q must be [tokens, heads, dim], contiguous");
  penstock::AttentionArgs a = {};
  a.heads = q.size(1);
  a.dim = q.size(2);
  a.dtype = dtype_of(q, "paged_attention: q");
  const CacheShape shape =
      cache_shape(key_cache, value_cache, key_scale, value_scale, a.dtype, a.dim);
  a.stored = shape.stored;
  a.key_scale = shape.key_scale;
  a.value_scale = shape.value_scale;
  a.kv_heads = shape.kv_heads;
  a.block_size = shape.block_size;
  a.padded_dim = shape.padded_dim;
  STD_TORCH_CHECK(a.heads % a.kv_heads == 0, "paged_attention: ", a.heads,
                  " heads aren't a multiple of ", a.kv_heads, " key-value heads");
  a.sequences = context_len.numel();
  a.context_len = integers(context_len, a.sequences, "paged_attention: context_len");
  a.query_start = integers(query_start, a.sequences + 1, "paged_attention: query_start");
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.size(0) == a.sequences &&
                      block_table.scalar_type() == ScalarType::Int &&
                      (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                  "paged_attention: block_table must be int32 [sequences, blocks]");
  a.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  a.table_stride = block_table.stride(0);
  for (int64_t b = 0; b < a.sequences; b++) {
    const int64_t count = a.query_start[b + 1] - a.query_start[b];
    const int64_t need = (a.context_len[b] + a.block_size - 1) / a.block_size;
    STD_TORCH_CHECK(count >= 0 && count <= a.context_len[b] && need <= block_table.size(1),
                    "paged_attention: sequence ", b, " has ", count, " queries, a context of ",
                    a.context_len[b], " and ", block_table.size(1), " blocks");
    for (int64_t i = 0; i < need; i++) {
      const int64_t block = a.block_table[b * a.table_stride + i];
      STD_TORCH_CHECK(block >= 0 && block < shape.blocks, "paged_attention: block ", block,
                      " is outside the cache of ", shape.blocks);
    }
  }
  STD_TORCH_CHECK(a.query_start[0] == 0 && a.query_start[a.sequences] == q.size(0),
                  "paged_attention: query_start doesn't cover the ", q.size(0), " queries");
  Tensor out = torch::stable::new_empty(q, {q.size(0), a.heads * a.dim});
  a.q = q.data_ptr();
  a.key_cache = key_cache.data_ptr();
  a.value_cache = value_cache.data_ptr();
  a.out = out.data_ptr();
  a.scale = static_cast<float>(scale);
  a.window = window;
  a.softcap = static_cast<float>(softcap);
  a.sinks = floats(sinks, a.heads, "paged_attention: sinks");
  a.threads = threads();
  penstock::kernels().attention(a);
  return out;
}

}  // namespace penstock::shim
