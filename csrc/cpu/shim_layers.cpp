// Products, embeddings, norms: bound to torch.
#include "shim.h"

namespace penstock::shim {
namespace {

// What a weight is stored as, and whether its tensors fit together. ops/panels.py has the shapes.
struct Matrix {
  Weight kind;
  int64_t panels, padded_k, groups;
  const void* scale;
  bool half_scale;
  const uint8_t* zero;
};

Matrix matrix(const Tensor& weight, const Optional& scale,
              const Optional& zero, const char* what) {
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
    STD_TORCH_CHECK(s.padded_k % 32 == 0, what, ": a panel of ", s.padded_k,
                    " values of K, which must be a multiple of 32");
    return s;
  }
  STD_TORCH_CHECK((type == ScalarType::Char || type == ScalarType::Byte) && v == 4 && scale, what,
                  ": weight must be float, or int8 or uint8 (two int4) with a scale");
  s.kind = type == ScalarType::Char ? Weight::int8 : Weight::int4;
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
    STD_TORCH_CHECK(s.kind == Weight::int4 && zero->scalar_type() == ScalarType::Byte &&
                        zero->is_contiguous() && zero->numel() == scale->numel(),
                    what, ": zero must be uint8 in the shape of scale, for int4 only");
    s.zero = static_cast<const uint8_t*>(zero->data_ptr());
  }
  return s;
}

}  // namespace

LinearArgs linear_args(Form x, const Tensor& weight, const Optional& scale, const Optional& zero,
                       const Optional& bias, int64_t n, bool int8_rows, bool gated) {
  LinearArgs a = {};
  const Matrix s = matrix(weight, scale, zero, "linear");
  a.dtype = x.dtype;
  a.k = x.columns;
  a.n = n;
  if (s.kind == Weight::dense) {
    STD_TORCH_CHECK(dtype_of(weight, "linear: weight") == x.dtype,
                    "linear: x and weight must have the same dtype");
    STD_TORCH_CHECK(!int8_rows, "linear: int8 rows need a quantized weight");
  } else {
    STD_TORCH_CHECK(a.dtype == DType::bf16, "linear: quantized weights take bfloat16 rows");
  }
  const int64_t panels = (n + 15) / 16 * (gated ? 2 : 1);
  STD_TORCH_CHECK(a.k > 0 && s.panels == panels && s.padded_k >= a.k &&
                      s.padded_k < a.k + (s.kind == Weight::dense ? 32 : 192),
                  "linear: a weight of ", s.panels, " panels of ", s.padded_k,
                  " isn't the packed form of [", n, ", ", a.k, "]", gated ? " with a gate" : "");
  a.int8_rows = int8_rows;
  a.kind = s.kind;
  a.weight = weight.data_ptr();
  a.padded_k = s.padded_k;
  a.scale = s.scale;
  a.half_scale = s.half_scale;
  a.zero = s.zero;
  a.groups = s.groups;
  a.bias = floats(bias, n * (gated ? 2 : 1), "linear: bias");
  a.gated = gated;
  a.out_dtype = a.dtype;
  return a;
}

void with_norm_and_activation(LinearArgs& a, const Optional& norm, double eps,
                              int64_t activation) {
  STD_TORCH_CHECK(activation >= 0 && activation <= 3 && (activation > 0 || !a.gated),
                  "linear: activation ", activation, " isn't 0 (none), 1, 2 or 3");
  a.norm = floats(norm, a.k, "linear: norm");
  a.eps = static_cast<float>(eps);
  a.activation = static_cast<Activation>(activation);
}

Tensor linear(const Tensor& x, const Tensor& weight, Optional scale, Optional zero, Optional bias,
              int64_t out_features, bool int8_rows, Optional norm, double eps, int64_t activation,
              bool gated, std::optional<ScalarType> out_dtype) {
  LinearArgs a = linear_args(form_of(x, "linear: x"), weight, scale, zero, bias, out_features,
                             int8_rows, gated);
  with_norm_and_activation(a, norm, eps, activation);
  Tensor y = torch::stable::new_empty(x, {x.size(0), a.n}, out_dtype);
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.rows = x.size(0);
  a.y = y.data_ptr();
  a.out_dtype = dtype_of(y, "linear: out_dtype");
  a.threads = threads();
  if (a.rows > 0) kernels().linear(a);
  return y;
}

void linear_add_(const Tensor& residual, const Tensor& x, const Tensor& weight, Optional scale,
                 Optional zero, Optional bias, bool int8_rows) {
  const Form form = form_of(x, "linear_add_: x"), sum = form_of(residual, "linear_add_: residual");
  STD_TORCH_CHECK(sum.dtype == form.dtype && residual.size(0) == x.size(0),
                  "linear_add_: residual has ", residual.size(0), " rows, x has ", x.size(0),
                  ", and they must have the same dtype");
  LinearArgs a = linear_args(form, weight, scale, zero, bias, sum.columns, int8_rows, false);
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.rows = x.size(0);
  a.adds = true;
  a.residual = residual.data_ptr();
  a.residual_stride = residual.stride(0);
  a.threads = threads();
  if (a.rows > 0) kernels().linear(a);
}

EmbeddingArgs embedding_args(const Tensor& weight, int64_t dim, double scale,
                             const Optional& weight_scale, const Optional& zero) {
  EmbeddingArgs a = {};
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
  STD_TORCH_CHECK(weight.is_contiguous() && (packed || weight.dim() == 2),
                  "embedding: weight must be [V, D] or panels, contiguous");
  a.dtype = a.kind == Weight::dense ? dtype_of(weight, "embedding: weight") : DType::bf16;
  a.vocab = packed ? weight.size(0) * 16 : weight.size(0);
  STD_TORCH_CHECK(packed ? dim <= a.panel_k : dim == weight.size(1), "embedding: dim ", dim,
                  " isn't the table's");
  a.weight = weight.data_ptr();
  a.dim = dim;
  a.scale = static_cast<float>(scale);
  return a;
}

void check_ids(const int32_t* ids, int64_t count, int64_t vocab, const char* what) {
  for (int64_t i = 0; i < count; i++)
    STD_TORCH_CHECK(ids[i] >= 0 && ids[i] < vocab, "embedding: ", what, " ", ids[i],
                    " is outside the table of ", vocab);
}

Tensor embedding(const Tensor& tokens, const Tensor& weight, int64_t dim, double scale,
                 Optional weight_scale, Optional zero) {
  EmbeddingArgs a = embedding_args(weight, dim, scale, weight_scale, zero);
  a.count = tokens.numel();
  a.tokens = integers(tokens, a.count, "embedding: tokens");
  check_ids(a.tokens, a.count, a.vocab, "token");
  Tensor out = torch::stable::new_empty(
      weight, {a.count, dim},
      a.kind == Weight::dense ? weight.scalar_type() : ScalarType::BFloat16);
  a.out = out.data_ptr();
  a.threads = threads();
  kernels().embedding(a);
  return out;
}

NormArgs norm_args(Form x, const Tensor& weight, const Optional& bias, double eps, bool centre) {
  NormArgs a = {};
  a.dtype = x.dtype;
  a.dim = x.columns;
  a.weight = floats(weight, a.dim, "norm: weight");
  a.bias = floats(bias, a.dim, "norm: bias");
  a.eps = static_cast<float>(eps);
  a.centre = centre;
  return a;
}

static Tensor run_norm(const Tensor& x, NormArgs a) {
  Tensor out = torch::stable::new_empty(x, {x.size(0), a.dim});
  a.rows = x.size(0);
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.out = out.data_ptr();
  a.threads = threads();
  kernels().norm(a);
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return run_norm(x, norm_args(form_of(x, "norm: x"), weight, std::nullopt, eps, false));
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, Optional bias, double eps) {
  return run_norm(x, norm_args(form_of(x, "norm: x"), weight, bias, eps, true));
}

void add_(const Tensor& residual, const Tensor& x) {
  const Form to = form_of(residual, "add_: residual"), from = form_of(x, "add_: x");
  STD_TORCH_CHECK(to.dtype == from.dtype && to.columns == from.columns &&
                      residual.size(0) == x.size(0),
                  "add_: residual [", residual.size(0), ", ", to.columns, "] and x [", x.size(0),
                  ", ", from.columns, "] must have one shape and dtype");
  kernels().add({x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), x.size(0),
                 to.columns, to.dtype, threads()});
}

void softcap_(const Tensor& x, double cap) {
  SoftcapArgs a = {};
  a.count = x.numel();
  a.x = const_cast<float*>(floats(x, a.count, "softcap_: x"));
  a.cap = static_cast<float>(cap);
  a.threads = threads();
  kernels().softcap(a);
}

GateArgs gate_args(Form x, int64_t activation, bool gated, int64_t columns,
                   std::optional<ScalarType> out_dtype) {
  STD_TORCH_CHECK(activation >= 1 && activation <= 3, "gate: activation ", activation,
                  " isn't 1, 2 or 3");
  STD_TORCH_CHECK(columns > 0 && x.columns == (gated ? (columns + 15) / 16 * 32 : columns),
                  "gate: ", x.columns, " columns don't give ", columns, gated ? " with a gate" : "");
  STD_TORCH_CHECK(!out_dtype || *out_dtype == ScalarType::Float ||
                      *out_dtype == ScalarType::BFloat16,
                  "gate: out_dtype must be float32 or bfloat16");
  GateArgs a = {};
  a.dim = columns;
  a.activation = static_cast<Activation>(activation);
  a.gated = gated;
  a.dtype = x.dtype;
  a.out_dtype = !out_dtype                         ? x.dtype
                : *out_dtype == ScalarType::Float ? DType::f32
                                                  : DType::bf16;
  return a;
}

Tensor gate(const Tensor& x, int64_t activation, bool gated, int64_t out_features,
            std::optional<ScalarType> out_dtype) {
  GateArgs a = gate_args(form_of(x, "gate: x"), activation, gated, out_features, out_dtype);
  Tensor out = torch::stable::new_empty(x, {x.size(0), a.dim}, out_dtype);
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.rows = x.size(0);
  a.out = out.data_ptr();
  a.threads = threads();
  kernels().gate(a);
  return out;
}

// Once for each matrix, when an engine is made: no kernel of its own.
Tensor alternate(const Tensor& bias) {
  const int64_t n = bias.numel() / 2, panels = (n + 15) / 16;
  const float* from = floats(bias, 2 * n, "alternate: bias");
  Tensor out = torch::stable::new_empty(bias, {panels * 32});
  float* to = static_cast<float*>(out.data_ptr());
  for (int64_t j = 0; j < panels * 16; j++)
    for (int64_t half = 0; half < 2; half++)
      to[j / 16 * 32 + half * 16 + j % 16] = j < n ? from[half * n + j] : 0.0f;
  return out;
}

}  // namespace penstock::shim
