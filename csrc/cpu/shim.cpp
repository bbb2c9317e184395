// Binds the torch-free core to torch's dispatcher through the stable ABI: one library for every
// Python and every torch ≥ 2.11.
#include "shim.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

namespace {

using namespace penstock::shim;
using penstock::DType;

// What a weight is stored as, and whether its tensors fit together. ops/panels.py has the shapes.
struct Matrix {
  penstock::Weight kind;
  int64_t panels, padded_k, groups;
  const void* scale;
  bool half_scale;
  const uint8_t* zero;
};

Matrix matrix(const Tensor& weight, const std::optional<Tensor>& scale,
              const std::optional<Tensor>& zero, const char* what) {
  STD_TORCH_CHECK(weight.dim() == 4 && weight.is_contiguous() && weight.size(2) == 16, what,
                  ": weight isn't packed panels [N/16, K/v, 16, v]");
  const ScalarType type = weight.scalar_type();
  const int64_t v = weight.size(3);
  Matrix s = {};
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
  const Matrix s = matrix(weight, scale, zero, "linear");
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
    const Matrix s = matrix(weight, weight_scale, zero, "embedding");
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
