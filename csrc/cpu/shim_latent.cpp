// Attention over latents, bound to torch.
#include "shim.h"

namespace penstock::shim {
namespace {

Angles angles_of(const Tensor& cos_sin, bool interleaved, const char* what) {
  STD_TORCH_CHECK(cos_sin.dim() == 2 && cos_sin.size(1) > 0 && cos_sin.size(1) % 2 == 0, what,
                  ": cos_sin must be [positions, an even dimension]");
  Angles a = {};
  a.cos_sin = floats(cos_sin, cos_sin.numel(), what);
  a.count = cos_sin.size(0);
  a.dim = cos_sin.size(1);
  a.interleaved = interleaved;
  return a;
}

struct LatentShape {
  int64_t blocks, block_size, padded_dim, pitch;
};

LatentShape latent_shape(const Tensor& cache, DType dtype, int64_t dim, const char* what) {
  const int64_t v = dtype == DType::bf16 ? 2 : 1;
  STD_TORCH_CHECK(dtype_of(cache, what) == dtype, what, ": the cache must have the rows' dtype");
  STD_TORCH_CHECK(cache.dim() == 6 && cache.size(1) == 1 && cache.size(4) == 16 &&
                      cache.size(5) == v && cache.size(3) * v == (dim + 15) / 16 * 16 &&
                      cache.size(2) % 2 == 0 && cache.size(2) > 0,
                  what, ": the cache doesn't have the layout of ops.mla for keys of ", dim);
  const int64_t pitch = pitch_of(cache, what) * static_cast<int64_t>(cache.element_size());
  return {cache.size(0), cache.size(2) * 16, cache.size(3) * v, pitch};
}

}  // namespace

// How many matrices there are.
static int64_t heads_of(const Tensor& weight, const char* what) {
  STD_TORCH_CHECK(weight.dim() == 5 && weight.size(0) > 0 && weight.is_contiguous(), what,
                  ": weights must be contiguous panels [heads, N/16, K/v, 16, v]");
  return weight.size(0);
}

HeadsArgs heads_args(Form x, const Tensor& weight, int64_t in, int64_t x_head, int64_t out,
                     int64_t y_head) {
  HeadsArgs a = {};
  a.heads = weight.size(0);
  a.first = linear_args({x.dtype, in}, torch::stable::select(weight, 0, 0), {}, {}, {}, out, 0,
                        false, 0, {}, {});
  a.weight_pitch = weight.numel() / a.heads * static_cast<int64_t>(weight.element_size());
  a.x_head = x_head;
  a.y_head = y_head;
  a.y_stride = a.heads * y_head;
  return a;
}

HeadsArgs head_linear_args(Form x, const Tensor& weight, int64_t out_features) {
  const int64_t heads = heads_of(weight, "head_linear");
  STD_TORCH_CHECK(x.columns % heads == 0, "head_linear: ", x.columns,
                  " columns aren't those of ", heads, " heads");
  return heads_args(x, weight, x.columns / heads, x.columns / heads, out_features, out_features);
}

Tensor head_linear(const Tensor& x, const Tensor& weight, int64_t out_features) {
  HeadsArgs a = head_linear_args(form_of(x, "head_linear: x"), weight, out_features);
  Tensor y = torch::stable::new_empty(x, {x.size(0), a.heads * out_features});
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.y = y.data_ptr();
  a.rows = x.size(0);
  a.threads = threads();
  head_linear(a);
  return y;
}

LatentQueryArgs latent_query_args(Form q, const Tensor& key_up, const Tensor& cos_sin,
                                  bool interleaved, int64_t rank, int64_t sink_reach) {
  const int64_t heads = heads_of(key_up, "mla_query");
  LatentQueryArgs a = {};
  STD_TORCH_CHECK(sink_reach >= 0, "mla_query: sink_reach is negative: ", sink_reach);
  a.sink_reach = sink_reach;
  a.angles = angles_of(cos_sin, interleaved, "mla_query: cos_sin");
  STD_TORCH_CHECK(q.columns % heads == 0 && q.columns / heads > a.angles.dim,
                  "mla_query: ", q.columns, " columns aren't those of ", heads,
                  " heads of more than ", a.angles.dim);
  const int64_t dim = q.columns / heads;
  a.heads = heads_args(q, key_up, dim - a.angles.dim, dim, rank, rank + a.angles.dim);
  if (sink_reach > 0) a.heads.y_stride *= 2;
  return a;
}

Tensor mla_query(const Tensor& q, const Tensor& key_up, const Tensor& cos_sin, bool interleaved,
                 const Tensor& positions, int64_t rank, int64_t sink_reach) {
  LatentQueryArgs a = latent_query_args(form_of(q, "mla_query: q"), key_up, cos_sin, interleaved,
                                        rank, sink_reach);
  const int64_t tokens = q.size(0), heads = a.heads.heads;
  a.angles.positions = integers(positions, tokens, "mla_query: positions");
  for (int64_t t = 0; t < tokens; t++)
    STD_TORCH_CHECK(a.angles.positions[t] >= 0 && a.angles.positions[t] < a.angles.count,
                    "mla_query: position ", a.angles.positions[t], " is beyond the table of ",
                    a.angles.count);
  Tensor y = torch::stable::new_empty(
      q, {tokens, heads * (sink_reach > 0 ? 2 : 1), rank + a.angles.dim});
  a.heads.x = q.data_ptr();
  a.heads.x_stride = q.stride(0);
  a.heads.y = y.data_ptr();
  a.heads.rows = tokens;
  a.threads = threads();
  latent_query(a);
  return y;
}

LatentCacheArgs latent_cache_args(Form kv, const Tensor& norm, double eps, const Tensor& cos_sin,
                                  bool interleaved, const Tensor& cache) {
  LatentCacheArgs a = {};
  a.angles = angles_of(cos_sin, interleaved, "mla_cache: cos_sin");
  a.dtype = kv.dtype;
  a.rank = kv.columns - a.angles.dim;
  STD_TORCH_CHECK(a.rank > 0, "mla_cache: ", kv.columns, " columns of which ", a.angles.dim,
                  " are rotated leave no latent");
  a.norm = floats(norm, a.rank, "mla_cache: norm");
  a.eps = static_cast<float>(eps);
  const LatentShape s = latent_shape(cache, a.dtype, kv.columns, "mla_cache");
  a.blocks = s.blocks;
  a.block_size = s.block_size;
  a.padded_dim = s.padded_dim;
  a.pitch = s.pitch;
  a.cache = cache.data_ptr();
  return a;
}

void mla_cache(const Tensor& kv, const Tensor& norm, double eps, const Tensor& cos_sin,
               bool interleaved, const Tensor& positions, const Tensor& slots,
               const Tensor& cache, Optional copies) {
  LatentCacheArgs a =
      latent_cache_args(form_of(kv, "mla_cache: kv"), norm, eps, cos_sin, interleaved, cache);
  a.tokens = kv.size(0);
  a.angles.positions = integers(positions, a.tokens, "mla_cache: positions");
  a.slots = integers(slots, a.tokens, "mla_cache: slots");
  check_places(a.angles.positions, a.slots, a.tokens, a.angles.count, a.blocks * a.block_size,
               "mla_cache");
  a.copied = check_copies(copies, a.tokens, a.blocks * a.block_size, "mla_cache");
  if (a.copied > 0) a.copies = static_cast<const int32_t*>(copies->data_ptr());
  a.x = kv.data_ptr();
  a.stride = kv.stride(0);
  a.threads = threads();
  kernels().latent_cache(a);
}

AttentionArgs latent_attention_args(DType dtype, int64_t heads, int64_t dim, const Tensor& cache,
                                    double scale, int64_t rank, int64_t window,
                                    int64_t sink_tokens) {
  STD_TORCH_CHECK(heads > 0 && rank > 0 && rank <= dim, "mla_attention: latents of ", rank, " of ",
                  dim, " values and ", heads, " heads");
  const LatentShape s = latent_shape(cache, dtype, dim, "mla_attention");
  AttentionArgs a = {};
  a.dtype = dtype;
  a.heads = heads;
  a.kv_heads = 1;
  a.dim = dim;
  a.padded_dim = s.padded_dim;
  a.value_dim = rank;
  a.padded_values = (rank + 15) / 16 * 16;
  a.latent = true;
  a.blocks = s.blocks;
  a.block_size = s.block_size;
  a.table_tokens = s.block_size;
  a.pitch = s.pitch;
  a.key_cache = cache.data_ptr();
  a.stored = Stored::same;
  a.scale = static_cast<float>(scale);
  see_sinks(a, window, sink_tokens, "mla_attention");
  return a;
}

Tensor mla_attention(const Tensor& q, const Tensor& cache, const Tensor& query_start,
                     const Tensor& context_len, const Tensor& block_table, double scale,
                     int64_t rank, int64_t window, int64_t sink_tokens) {
  STD_TORCH_CHECK(q.dim() == 3 && q.is_contiguous(),
                  "mla_attention: q must be [tokens, heads, dim], contiguous");
  STD_TORCH_CHECK(sink_tokens == 0 || q.size(1) % 2 == 0,
                  "mla_attention: beside sink_tokens q has the heads of a token twice, not ",
                  q.size(1), " of them");
  AttentionArgs a = latent_attention_args(dtype_of(q, "mla_attention: q"),
                                          q.size(1) / (sink_tokens > 0 ? 2 : 1), q.size(2), cache,
                                          scale, rank, window, sink_tokens);
  const Sequences s = sequences_of(query_start, context_len, block_table, "mla_attention");
  check_sequences(s, q.size(0), a.blocks, a.block_size, "mla_attention");
  a.query_start = s.query_start;
  a.context_len = s.context_len;
  a.block_table = s.block_table;
  a.table_stride = s.table_stride;
  a.sequences = s.count;
  Tensor out = torch::stable::new_empty(q, {q.size(0), a.heads * rank});
  a.q = q.data_ptr();
  a.out = out.data_ptr();
  a.out_stride = a.heads * rank;
  a.threads = threads();
  kernels().attention(a);
  return out;
}

}  // namespace penstock::shim
