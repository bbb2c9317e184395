// Binds the torch-free core to torch's dispatcher through the stable ABI: one library for every
// Python and every torch ≥ 2.11.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

#include "kernels.h"

namespace {

using penstock::DType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int threads() { return static_cast<int>(torch::stable::get_num_threads()); }

DType dtype_of(const Tensor& t, const char* what) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, what,
                  " must be float32 or bfloat16");
  return type == ScalarType::Float ? DType::f32 : DType::bf16;
}

void same_dtype(const Tensor& a, const Tensor& b, const char* what) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), what, " must have the same dtype");
}

// Rows may be strided; what lies in one row may not.
void check_rows(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1), what,
                  " must be [rows, columns] with contiguous rows, dim ", t.dim());
}

const float* floats(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous float32, has ", t.numel());
  return static_cast<const float*>(t.data_ptr());
}

const float* floats(const std::optional<Tensor>& t, int64_t count, const char* what) {
  return t ? floats(*t, count, what) : nullptr;
}

const int32_t* integers(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous int32, has ", t.numel());
  return static_cast<const int32_t*>(t.data_ptr());
}

// What a weight is stored as, and whether its tensors fit together. ops/panels.py has the shapes.
struct Stored {
  penstock::Weight kind;
  int64_t panels, padded_k, groups;
  const void* scale;
  bool half_scale;
  const uint8_t* zero;
};

Stored stored(const Tensor& weight, const std::optional<Tensor>& scale,
              const std::optional<Tensor>& zero, const char* what) {
  STD_TORCH_CHECK(weight.dim() == 4 && weight.is_contiguous() && weight.size(2) == 16, what,
                  ": weight isn't packed panels [N/16, K/v, 16, v]");
  const ScalarType type = weight.scalar_type();
  const int64_t v = weight.size(3);
  Stored s = {};
  s.panels = weight.size(0);
  if (type == ScalarType::Float || type == ScalarType::BFloat16) {
    STD_TORCH_CHECK(v == (type == ScalarType::Float ? 1 : 2) && !scale && !zero, what,
                    ": a float weight has v = 4 / itemsize and neither scale nor zero");
    s.padded_k = weight.size(1) * v;
    s.groups = 1;
    return s;
  }
  STD_TORCH_CHECK((type == ScalarType::Char || type == ScalarType::Byte) && v == 4 && scale, what,
                  ": weight must be float, or int8 or uint8 (two int4) with a scale");
  s.kind = type == ScalarType::Char ? penstock::Weight::int8 : penstock::Weight::int4;
  s.padded_k = weight.size(1) * (type == ScalarType::Char ? 4 : 8);
  s.half_scale = scale->scalar_type() == ScalarType::Half;
  STD_TORCH_CHECK((s.half_scale || scale->scalar_type() == ScalarType::Float) &&
                      scale->is_contiguous() && scale->dim() == 3 &&
                      scale->size(0) == s.panels && scale->size(2) == 16,
                  what, ": scale must be float16 or float32 [", s.panels, ", groups, 16]");
  s.groups = scale->size(1);
  s.scale = scale->data_ptr();
  STD_TORCH_CHECK(s.groups > 0 && s.padded_k % s.groups == 0 && s.padded_k / s.groups % 32 == 0,
                  what, ": ", s.padded_k, " values of K don't split into ", s.groups,
                  " groups of a multiple of 32");
  if (zero) {
    STD_TORCH_CHECK(s.kind == penstock::Weight::int4 && zero->scalar_type() == ScalarType::Byte &&
                        zero->is_contiguous() && zero->numel() == scale->numel(),
                    what, ": zero must be uint8 in the shape of scale, for int4 only");
    s.zero = static_cast<const uint8_t*>(zero->data_ptr());
  }
  return s;
}

// The arguments that both forms of `linear` share.
penstock::LinearArgs linear_args(const Tensor& x, const Tensor& weight,
                                 const std::optional<Tensor>& scale,
                                 const std::optional<Tensor>& zero,
                                 const std::optional<Tensor>& bias, int64_t out_features,
                                 bool int8_rows, int64_t activation, bool gated) {
  check_rows(x, "linear: x");
  penstock::LinearArgs a = {};
  const Stored s = stored(weight, scale, zero, "linear");
  a.dtype = dtype_of(x, "linear: x");
  a.rows = x.size(0);
  a.k = x.size(1);
  a.n = out_features;
  if (s.kind == penstock::Weight::dense) {
    same_dtype(x, weight, "linear: x and weight");
    STD_TORCH_CHECK(!int8_rows, "linear: int8 rows need a quantized weight");
  } else {
    STD_TORCH_CHECK(a.dtype == DType::bf16, "linear: quantized weights take bfloat16 rows");
  }
  STD_TORCH_CHECK(activation >= 0 && activation <= 3 && (activation > 0 || !gated),
                  "linear: activation ", activation, " isn't 0 (none), 1, 2 or 3");
  const int64_t panels = (out_features + 15) / 16 * (gated ? 2 : 1);
  STD_TORCH_CHECK(a.k > 0 && s.panels == panels && s.padded_k >= a.k &&
                      s.padded_k < a.k + (s.kind == penstock::Weight::dense ? 32 : 192),
                  "linear: a weight of ", s.panels, " panels of ", s.padded_k,
                  " isn't the packed form of [", out_features, ", ", a.k, "]",
                  gated ? " with a gate" : "");
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.int8_rows = int8_rows;
  a.kind = s.kind;
  a.weight = weight.data_ptr();
  a.padded_k = s.padded_k;
  a.scale = s.scale;
  a.half_scale = s.half_scale;
  a.zero = s.zero;
  a.groups = s.groups;
  a.bias = floats(bias, out_features * (gated ? 2 : 1), "linear: bias");
  a.activation = static_cast<penstock::Activation>(activation);
  a.gated = gated;
  a.threads = threads();
  return a;
}

Tensor linear(const Tensor& x, const Tensor& weight, std::optional<Tensor> scale,
              std::optional<Tensor> zero, std::optional<Tensor> bias, int64_t out_features,
              bool int8_rows, std::optional<Tensor> norm, double eps, int64_t activation,
              bool gated, std::optional<ScalarType> out_dtype) {
  penstock::LinearArgs a = linear_args(x, weight, scale, zero, bias, out_features, int8_rows,
                                       activation, gated);
  Tensor y = torch::stable::new_empty(x, {a.rows, a.n}, out_dtype);
  a.norm = floats(norm, a.k, "linear: norm");
  a.eps = static_cast<float>(eps);
  a.y = y.data_ptr();
  a.out_dtype = dtype_of(y, "linear: out_dtype");
  if (a.rows > 0) penstock::kernels().linear(a);
  return y;
}

void linear_add_(const Tensor& residual, const Tensor& x, const Tensor& weight,
                 std::optional<Tensor> scale, std::optional<Tensor> zero,
                 std::optional<Tensor> bias, bool int8_rows) {
  check_rows(residual, "linear_add_: residual");
  same_dtype(residual, x, "linear_add_: residual and x");
  penstock::LinearArgs a = linear_args(x, weight, scale, zero, bias, residual.size(1), int8_rows,
                                       0, false);
  STD_TORCH_CHECK(residual.size(0) == a.rows, "linear_add_: residual has ", residual.size(0),
                  " rows, x has ", a.rows);
  a.residual = residual.data_ptr();
  a.residual_stride = residual.stride(0);
  a.out_dtype = a.dtype;
  if (a.rows > 0) penstock::kernels().linear(a);
}

Tensor embedding(const Tensor& tokens, const Tensor& weight, int64_t dim, double scale,
                 std::optional<Tensor> weight_scale, std::optional<Tensor> zero) {
  penstock::EmbeddingArgs a = {};
  a.count = tokens.numel();
  a.tokens = integers(tokens, a.count, "embedding: tokens");
  const bool packed = weight.dim() == 4;
  if (packed) {
    const Stored s = stored(weight, weight_scale, zero, "embedding");
    a.kind = s.kind;
    a.panel_k = s.padded_k;
    a.quantized_scale = s.scale;
    a.half_scale = s.half_scale;
    a.zero = s.zero;
    a.groups = s.groups;
  }
  const bool dense = a.kind == penstock::Weight::dense;
  STD_TORCH_CHECK(weight.is_contiguous() && (packed || weight.dim() == 2),
                  "embedding: weight must be [V, D] or panels, contiguous");
  a.dtype = dense ? dtype_of(weight, "embedding: weight") : DType::bf16;
  a.vocab = packed ? weight.size(0) * 16 : weight.size(0);
  STD_TORCH_CHECK(packed ? dim <= a.panel_k : dim == weight.size(1), "embedding: dim ", dim,
                  " isn't the table's");
  for (int64_t i = 0; i < a.count; i++)
    STD_TORCH_CHECK(a.tokens[i] >= 0 && a.tokens[i] < a.vocab, "embedding: token ", a.tokens[i],
                    " is outside the table of ", a.vocab);
  Tensor out = torch::stable::new_empty(
      weight, {a.count, dim}, dense ? weight.scalar_type() : ScalarType::BFloat16);
  a.weight = weight.data_ptr();
  a.out = out.data_ptr();
  a.dim = dim;
  a.scale = static_cast<float>(scale);
  a.threads = threads();
  penstock::kernels().embedding(a);
  return out;
}

Tensor run_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                double eps, bool centre) {
  check_rows(x, "norm: x");
  penstock::NormArgs a = {};
  a.dtype = dtype_of(x, "norm: x");
  a.rows = x.size(0);
  a.dim = x.size(1);
  Tensor out = torch::stable::new_empty(x, {a.rows, a.dim});
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.weight = floats(weight, a.dim, "norm: weight");
  a.bias = floats(bias, a.dim, "norm: bias");
  a.out = out.data_ptr();
  a.eps = static_cast<float>(eps);
  a.centre = centre;
  a.threads = threads();
  penstock::kernels().norm(a);
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return run_norm(x, weight, std::nullopt, eps, false);
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, double eps) {
  return run_norm(x, weight, bias, eps, true);
}

void softcap_(const Tensor& x, double cap) {
  penstock::SoftcapArgs a = {};
  a.count = x.numel();
  a.x = const_cast<float*>(floats(x, a.count, "softcap_: x"));
  a.cap = static_cast<float>(cap);
  a.threads = threads();
  penstock::kernels().softcap(a);
}

penstock::HeadsView heads_view(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.dim() == 3 && (t.stride(2) == 1 || t.size(2) == 1), what,
                  " must be [tokens, heads, dim] with contiguous heads");
  return {t.data_ptr(), t.stride(0), t.stride(1)};
}

struct CacheShape {
  int64_t blocks, kv_heads, block_size, padded_dim;
};

CacheShape cache_shape(const Tensor& keys, const Tensor& values, int64_t dim) {
  const bool bf16 = dtype_of(keys, "key_cache") == DType::bf16;
  const int64_t v = bf16 ? 2 : 1;
  same_dtype(keys, values, "key_cache and value_cache");
  STD_TORCH_CHECK(keys.dim() == 6 && values.dim() == 6 && keys.is_contiguous() &&
                      values.is_contiguous(),
                  "caches must be contiguous, with 6 dimensions");
  const CacheShape s = {keys.size(0), keys.size(1), keys.size(2) * 16, keys.size(3) * v};
  STD_TORCH_CHECK(keys.size(4) == 16 && keys.size(5) == v && values.size(0) == s.blocks &&
                      values.size(1) == s.kv_heads && values.size(2) * 16 == s.padded_dim &&
                      values.size(3) * v == s.block_size && values.size(4) == 16 &&
                      values.size(5) == v && s.padded_dim == (dim + 15) / 16 * 16 &&
                      s.block_size % 32 == 0,
                  "key_cache and value_cache don't have the layout of ops.rotary_cache for heads "
                  "of ",
                  dim);
  return s;
}

Tensor rotary_cache(const Tensor& q, const Tensor& k, const Tensor& v,
                    std::optional<Tensor> q_norm, std::optional<Tensor> k_norm, double eps,
                    std::optional<Tensor> cos_sin, bool interleaved, const Tensor& positions,
                    const Tensor& slots, const Tensor& key_cache, const Tensor& value_cache) {
  penstock::RotaryCacheArgs a = {};
  a.q = heads_view(q, "rotary_cache: q");
  a.k = heads_view(k, "rotary_cache: k");
  a.v = heads_view(v, "rotary_cache: v");
  a.tokens = q.size(0);
  a.heads = q.size(1);
  a.dim = q.size(2);
  a.kv_heads = k.size(1);
  a.dtype = dtype_of(q, "rotary_cache: q");
  same_dtype(q, k, "rotary_cache: q and k");
  same_dtype(q, v, "rotary_cache: q and v");
  same_dtype(q, key_cache, "rotary_cache: q and key_cache");
  const CacheShape shape = cache_shape(key_cache, value_cache, a.dim);
  STD_TORCH_CHECK(k.size(0) == a.tokens && v.size(0) == a.tokens && k.size(2) == a.dim &&
                      v.size(2) == a.dim && v.size(1) == a.kv_heads &&
                      shape.kv_heads == a.kv_heads,
                  "rotary_cache: q, k, v and the caches disagree");
  a.block_size = shape.block_size;
  a.padded_dim = shape.padded_dim;
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
  Tensor out = torch::stable::new_empty(q, {a.tokens, a.heads, a.dim});
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
                       std::optional<Tensor> sinks) {
  STD_TORCH_CHECK(q.dim() == 3 && q.is_contiguous(),
                  "paged_attention: q must be [tokens, heads, dim], contiguous");
  penstock::AttentionArgs a = {};
  a.heads = q.size(1);
  a.dim = q.size(2);
  a.dtype = dtype_of(q, "paged_attention: q");
  same_dtype(q, key_cache, "paged_attention: q and key_cache");
  const CacheShape shape = cache_shape(key_cache, value_cache, a.dim);
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

struct Logits {
  const float* data;
  int64_t stride, rows, size;
};

Logits logits_of(const Tensor& t, const char* what) {
  check_rows(t, what);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float, what, " must be float32");
  STD_TORCH_CHECK(t.size(1) > 0 && t.size(1) <= INT32_MAX, what, " must have a vocabulary, has ",
                  t.size(1), " columns");
  return {static_cast<const float*>(t.data_ptr()), t.stride(0), t.size(0), t.size(1)};
}

const double* fractions(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Double && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous float64, has ", t.numel());
  return static_cast<const double*>(t.data_ptr());
}

std::tuple<Tensor, Tensor> argmax(const Tensor& logits) {
  const Logits x = logits_of(logits, "argmax: logits");
  Tensor ids = torch::stable::new_empty(logits, {x.rows}, ScalarType::Long);
  Tensor values = torch::stable::new_empty(logits, {x.rows});
  penstock::kernels().argmax({x.data, x.stride, static_cast<int64_t*>(ids.data_ptr()),
                              static_cast<float*>(values.data_ptr()), x.rows, x.size, threads()});
  return {ids, values};
}

penstock::TopKArgs top_k_args(const Tensor& logits, int64_t k, Tensor& values, Tensor& ids) {
  const Logits x = logits_of(logits, "top_k: logits");
  STD_TORCH_CHECK(k > 0, "top_k: k must be at least 1, is ", k);
  penstock::TopKArgs a = {};
  a.logits = x.data;
  a.stride = x.stride;
  a.rows = x.rows;
  a.size = x.size;
  a.k = k < x.size ? k : x.size;
  a.threads = threads();
  values = torch::stable::new_empty(logits, {a.rows, a.k});
  ids = torch::stable::new_empty(logits, {a.rows, a.k}, ScalarType::Long);
  a.values = static_cast<float*>(values.data_ptr());
  a.ids = static_cast<int64_t*>(ids.data_ptr());
  return a;
}

std::tuple<Tensor, Tensor> top_k(const Tensor& logits, int64_t k) {
  Tensor values, ids;
  penstock::kernels().top_k(top_k_args(logits, k, values, ids));
  return {values, ids};
}

std::tuple<Tensor, Tensor, Tensor> softmax_top_k(const Tensor& logits, const Tensor& temperature,
                                                 int64_t k) {
  Tensor values, ids;
  penstock::TopKArgs a = top_k_args(logits, k, values, ids);
  Tensor weights = torch::stable::new_empty(logits, {a.rows, a.k});
  a.temperature = floats(temperature, a.rows, "softmax_top_k: temperature");
  a.weights = static_cast<float*>(weights.data_ptr());
  penstock::kernels().top_k(a);
  return {values, ids, weights};
}

std::tuple<Tensor, Tensor> draw_plain(const Tensor& logits, const Tensor& temperature,
                                      const Tensor& u) {
  const Logits x = logits_of(logits, "draw_plain: logits");
  Tensor ids = torch::stable::new_empty(logits, {x.rows}, ScalarType::Long);
  Tensor peaks = torch::stable::new_empty(logits, {x.rows});
  penstock::DrawPlainArgs a = {};
  a.logits = x.data;
  a.stride = x.stride;
  a.temperature = floats(temperature, x.rows, "draw_plain: temperature");
  a.u = fractions(u, x.rows, "draw_plain: u");
  a.ids = static_cast<int64_t*>(ids.data_ptr());
  a.peaks = static_cast<float*>(peaks.data_ptr());
  a.rows = x.rows;
  a.size = x.size;
  a.threads = threads();
  penstock::kernels().draw_plain(a);
  return {ids, peaks};
}

Tensor draw_from(const Tensor& ids, const Tensor& weights, const Tensor& u) {
  STD_TORCH_CHECK(ids.dim() == 2 && ids.is_contiguous() && ids.scalar_type() == ScalarType::Long,
                  "draw_from: ids must be contiguous int64 [rows, candidates], dim ", ids.dim());
  penstock::DrawFromArgs a = {};
  a.rows = ids.size(0);
  a.count = ids.size(1);
  STD_TORCH_CHECK(weights.dim() == 2 && weights.size(0) == a.rows && weights.size(1) == a.count,
                  "draw_from: weights must be [", a.rows, ", ", a.count, "] as ids are");
  a.weights = floats(weights, a.rows * a.count, "draw_from: weights");
  a.u = fractions(u, a.rows, "draw_from: u");
  Tensor out = torch::stable::new_empty(ids, {a.rows});
  a.ids = static_cast<const int64_t*>(ids.data_ptr());
  a.out = static_cast<int64_t*>(out.data_ptr());
  a.threads = threads();
  penstock::kernels().draw_from(a);
  return out;
}

// What `quantize_int8` (group 0) and `quantize_int4` share; the caller adds scale and zero.
penstock::QuantizeArgs quantize_args(const Tensor& weight, int64_t group, bool gated) {
  check_rows(weight, "quantize: weight");
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half,
                  "quantize: weight must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(!gated || weight.size(0) % 2 == 0, "quantize: a weight with a gate has two "
                  "halves, this one ", weight.size(0), " rows");
  penstock::QuantizeArgs a = {};
  a.dtype = type == ScalarType::Float      ? penstock::Float::f32
            : type == ScalarType::BFloat16 ? penstock::Float::bf16
                                           : penstock::Float::f16;
  a.weight = weight.data_ptr();
  a.stride = weight.stride(0);
  a.gated = gated;
  a.n = gated ? weight.size(0) / 2 : weight.size(0);
  a.k = weight.size(1);
  a.group = group;
  const int64_t multiple = group > 64 ? group : 64;
  a.padded_k = (a.k + multiple - 1) / multiple * multiple;
  a.threads = threads();
  return a;
}

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& weight, bool gated) {
  penstock::QuantizeArgs a = quantize_args(weight, 0, gated);
  const int64_t panels = (a.n + 15) / 16 * (gated ? 2 : 1);
  Tensor q = torch::stable::new_empty(weight, {panels, a.padded_k / 4, 16, 4}, ScalarType::Char);
  Tensor scale = torch::stable::new_empty(weight, {panels, 1, 16}, ScalarType::Float);
  a.panels = q.data_ptr();
  a.scale = scale.data_ptr();
  penstock::kernels().quantize(a);
  return {q, scale};
}

std::tuple<Tensor, Tensor, Tensor> quantize_int4(const Tensor& weight, int64_t group,
                                                 bool symmetric, bool gated) {
  STD_TORCH_CHECK(group == 32 || group == 64 || group == 128, "quantize_int4: group ", group,
                  " isn't 32, 64 or 128");
  penstock::QuantizeArgs a = quantize_args(weight, group, gated);
  const int64_t panels = (a.n + 15) / 16 * (gated ? 2 : 1), groups = a.padded_k / group;
  Tensor q = torch::stable::new_empty(weight, {panels, a.padded_k / 8, 16, 4}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(weight, {panels, groups, 16}, ScalarType::Half);
  Tensor zero = torch::stable::new_empty(weight, {symmetric ? 0 : panels, groups, 16},
                                         ScalarType::Byte);
  a.symmetric = symmetric;
  a.panels = q.data_ptr();
  a.scale = scale.data_ptr();
  a.zero = static_cast<uint8_t*>(zero.data_ptr());
  penstock::kernels().quantize(a);
  return {q, scale, zero};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_add_", TORCH_BOX(&linear_add_));
  m.impl("embedding", TORCH_BOX(&embedding));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("softcap_", TORCH_BOX(&softcap_));
  m.impl("rotary_cache", TORCH_BOX(&rotary_cache));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("top_k", TORCH_BOX(&top_k));
  m.impl("softmax_top_k", TORCH_BOX(&softmax_top_k));
  m.impl("draw_plain", TORCH_BOX(&draw_plain));
  m.impl("draw_from", TORCH_BOX(&draw_from));
  m.impl("quantize_int8", TORCH_BOX(&quantize_int8));
  m.impl("quantize_int4", TORCH_BOX(&quantize_int4));
}
