// Products, embeddings, norms: bound to torch.
#include "records.h"
#include "shim.h"

namespace penstock::shim {
namespace {

// What the codes of four bits stand for, as bfloat16 holds it: ops/levels.py.
struct Tables {
  float nf4[16], e2m1[16];
};
constexpr Tables kTables = {
    {-1.0f, -0.6953125f, -0.5234375f, -0.39453125f, -0.28515625f, -0.1845703125f,
     -0.0908203125f, 0.0f, 0.07958984375f, 0.1611328125f, 0.24609375f, 0.337890625f, 0.44140625f,
     0.5625f, 0.72265625f, 1.0f},
    {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f,
     -4.0f, -6.0f}};

// What a weight is stored as, and whether its tensors fit together. ops/panels.py has the shapes.
struct Matrix {
  Weight kind;
  int64_t panels, padded_k, groups;
  const void* scale;
  Scale scale_type;
  const void* zero;
  const uint8_t* fine;
  const float* table;
};

Weight kind_of(ScalarType type, bool zero, int64_t levels, bool outer, const char* what) {
  switch (type) {
    case ScalarType::Char:
      return zero ? Weight::int8_zero : Weight::int8;
    case ScalarType::Byte:
      return levels == 0 ? Weight::int4 : outer ? Weight::nvfp4 : Weight::levels;
    case ScalarType::Float8_e4m3fn:
      return Weight::fp8_e4m3;
    case ScalarType::Float8_e5m2:
      return Weight::fp8_e5m2;
    default:
      STD_TORCH_CHECK(false, what, ": weight must be float, int8, uint8 (two of four bits) or "
                                   "float8, the last three with a scale");
  }
}

// The scale of each group [panels, groups, 16].
void take_scale(Matrix& s, const Tensor& scale, const char* what) {
  const ScalarType type = scale.scalar_type();
  const bool power = type == ScalarType::Byte && s.kind == Weight::levels;
  STD_TORCH_CHECK((type == ScalarType::Half || type == ScalarType::Float || power) &&
                      scale.is_contiguous() && scale.dim() == 3 && scale.size(0) == s.panels &&
                      scale.size(2) == 16,
                  what, ": scale must be float16 or float32, or of levels uint8, [", s.panels,
                  ", groups, 16]");
  s.groups = scale.size(1);
  s.scale = scale.data_ptr();
  s.scale_type = power ? Scale::e8m0 : type == ScalarType::Half ? Scale::f16 : Scale::f32;
  STD_TORCH_CHECK(s.groups > 0 && s.padded_k % s.groups == 0 && s.padded_k / s.groups % 32 == 0,
                  what, ": ", s.padded_k, " values of K don't split into ", s.groups,
                  " groups of a multiple of 32");
}

void take_zero(Matrix& s, const Tensor& zero, const char* what) {
  const ScalarType type = s.kind == Weight::int4 ? ScalarType::Byte : ScalarType::Char;
  STD_TORCH_CHECK((s.kind == Weight::int4 || s.kind == Weight::int8_zero) &&
                      zero.scalar_type() == type && zero.is_contiguous() &&
                      zero.numel() == s.panels * s.groups * 16,
                  what, ": zero must be in the shape of scale, uint8 for int4 or int8 for int8 only");
  s.zero = zero.data_ptr();
}

// nvfp4: `scale` is of each 16 values, and `outer` of rows.
void take_fine(Matrix& s, const Tensor& scale, const char* what) {
  STD_TORCH_CHECK(s.kind == Weight::nvfp4 && scale.scalar_type() == ScalarType::Float8_e4m3fn &&
                      scale.is_contiguous() && scale.numel() == s.panels * s.padded_k,
                  what, ": a weight with an outer scale must be levels with a scale in E4M3 [",
                  s.panels, ", ", s.padded_k / 16, ", 16]");
  s.fine = static_cast<const uint8_t*>(scale.data_ptr());
}

// K-quants [panels, records, lines, 64], which have all of it in themselves.
Matrix records(const Tensor& weight, bool alone, const char* what) {
  Matrix s = {};
  for (const Weight kind : {Weight::q4_k, Weight::q5_k, Weight::q6_k, Weight::mixed_k})
    if (weight.size(2) == record_lines(kind)) s.kind = kind;
  STD_TORCH_CHECK(s.kind != Weight::dense && weight.scalar_type() == ScalarType::Byte && alone, what,
                  ": records of K-quants are uint8 with 37, 45, 53 or 54 lines of 64, here ",
                  weight.size(2), ", and come without scales, zero points and levels");
  s.panels = weight.size(0);
  s.padded_k = weight.size(1) * kRecord;
  s.groups = 1;
  return s;
}

Matrix matrix(const Tensor& weight, const Optional& scale, const Optional& zero, int64_t levels,
              const Optional& outer, const char* what) {
  if (weight.dim() == 4 && weight.is_contiguous() && weight.size(3) == 64)
    return records(weight, !scale && !zero && !levels && !outer, what);
  STD_TORCH_CHECK(weight.dim() == 4 && weight.is_contiguous() && weight.size(2) == 16, what,
                  ": weight isn't packed panels [N/16, K/v, 16, v]");
  const ScalarType type = weight.scalar_type();
  const int64_t v = weight.size(3);
  Matrix s = {};
  s.panels = weight.size(0);
  if (type == ScalarType::Float || type == ScalarType::BFloat16) {
    STD_TORCH_CHECK(v == (type == ScalarType::Float ? 1 : 2) && !scale && !zero && !levels && !outer,
                    what, ": a float weight has v = 4 / itemsize, and neither scale nor zero nor levels");
    s.padded_k = weight.size(1) * v;
    s.groups = 1;
    STD_TORCH_CHECK(s.padded_k % 32 == 0, what, ": a panel of ", s.padded_k,
                    " values of K, which must be a multiple of 32");
    return s;
  }
  s.kind = kind_of(type, zero.has_value(), levels, outer.has_value(), what);
  STD_TORCH_CHECK(v == 4 && scale, what, ": a quantized weight has v = 4 and comes with a scale");
  s.padded_k = weight.size(1) * (type == ScalarType::Byte ? 8 : 4);
  STD_TORCH_CHECK(levels >= 0 && levels <= 2 && (levels == 0 || type == ScalarType::Byte), what,
                  ": levels ", levels, " isn't 0, or 1 (nf4) or 2 (E2M1) of a uint8 weight");
  if (levels) s.table = levels == 1 ? kTables.nf4 : kTables.e2m1;
  if (outer) take_fine(s, *scale, what);
  take_scale(s, outer ? *outer : *scale, what);
  if (zero) take_zero(s, *zero, what);
  return s;
}

}  // namespace

LinearArgs linear_args(Form x, const Tensor& weight, const Optional& scale, const Optional& zero,
                       const Optional& bias, int64_t n, int64_t row_codes, bool gated,
                       int64_t levels, const Optional& outer, const Optional& input_scale) {
  LinearArgs a = {};
  STD_TORCH_CHECK(row_codes >= 0 && row_codes <= 4, "linear: row_codes ", row_codes,
                  " isn't 0 (none), 1 (int8), 2 (E4M3), 3 (int8, rotated) or 4 (int8, in blocks)");
  const bool blocks = row_codes == static_cast<int64_t>(RowCodes::int8_blocks);
  a.rotated = row_codes == static_cast<int64_t>(RowCodes::int8_rotated);
  a.int8_rows = row_codes == static_cast<int64_t>(RowCodes::int8) || a.rotated || blocks;
  a.blocks = blocks;
  a.fp8_rows = row_codes == static_cast<int64_t>(RowCodes::e4m3);
  const Matrix s = matrix(weight, scale, zero, levels, outer, "linear");
  a.dtype = x.dtype;
  a.k = x.columns;
  a.n = n;
  if (s.kind == Weight::dense) {
    STD_TORCH_CHECK(dtype_of(weight, "linear: weight") == x.dtype,
                    "linear: x and weight must have the same dtype");
    STD_TORCH_CHECK(row_codes == 0, "linear: rows in codes need a quantized weight");
  } else {
    STD_TORCH_CHECK(a.dtype == DType::bf16, "linear: quantized weights take bfloat16 rows");
  }
  STD_TORCH_CHECK(!a.int8_rows || is_integer(s.kind) || (blocks && has_records(s.kind)),
                  "linear: int8 rows need weights of integers, or in blocks K-quants");
  STD_TORCH_CHECK(!blocks || !zero, "linear: rows in blocks don't go with zero points");
  STD_TORCH_CHECK(!a.fp8_rows || s.kind == Weight::fp8_e4m3,
                  "linear: rows in E4M3 need weights in E4M3");
  const int64_t most = s.kind == Weight::int8_zero ? 65536 : 131072;
  STD_TORCH_CHECK(!a.int8_rows || has_records(s.kind) || s.padded_k / s.groups <= most,
                  "linear: a sum of more than ", most, " products of 8 bits may not fit into 32");
  STD_TORCH_CHECK(!a.rotated || (s.padded_k % 64 == 0 && !input_scale),
                  "linear: rotated rows go with whole blocks of 64 values, here ", s.padded_k,
                  ", and with scales of their own");
  STD_TORCH_CHECK((row_codes && !blocks) || !input_scale,
                  "linear: only rows in codes have an input_scale, and not those in blocks");
  const int64_t panels = (n + 15) / 16 * (gated ? 2 : 1);
  STD_TORCH_CHECK(a.k > 0 && s.panels == panels && s.padded_k >= a.k &&
                      s.padded_k < a.k + (s.kind == Weight::dense ? 32 : has_records(s.kind) ? 256 : 192),
                  "linear: a weight of ", s.panels, " panels of ", s.padded_k,
                  " isn't the packed form of [", n, ", ", a.k, "]", gated ? " with a gate" : "");
  a.kind = s.kind;
  a.weight = weight.data_ptr();
  a.padded_k = s.padded_k;
  a.scale = s.scale;
  a.scale_type = s.scale_type;
  a.zero = s.zero;
  a.fine = s.fine;
  a.table = s.table;
  a.groups = s.groups;
  a.input_scale = floats(input_scale, 1, "linear: input_scale");
  a.bias = floats(bias, n * (gated ? 2 : 1), "linear: bias");
  a.gated = gated;
  a.out_dtype = a.dtype;
  return a;
}

static void check_activation(int64_t activation, bool gated, const char* what) {
  STD_TORCH_CHECK(activation >= 0 && activation <= 6, what, ": activation ", activation,
                  " isn't one of 0 (none) to 6");
  STD_TORCH_CHECK(activation != 4 || gated, what, ": activation 4 comes with a gate");
}

void with_norm_and_activation(LinearArgs& a, const Optional& norm, double eps,
                              int64_t activation) {
  check_activation(activation, a.gated, "linear");
  STD_TORCH_CHECK(activation > 0 || !a.gated, "linear: a gated product needs an activation");
  a.norm = floats(norm, a.k, "linear: norm");
  a.eps = static_cast<float>(eps);
  a.activation = static_cast<Activation>(activation);
}

Tensor linear(const Tensor& x, const Tensor& weight, Optional scale, Optional zero, Optional bias,
              int64_t out_features, int64_t row_codes, Optional norm, double eps,
              int64_t activation, bool gated, std::optional<ScalarType> out_dtype, int64_t levels,
              Optional outer, Optional input_scale) {
  LinearArgs a = linear_args(form_of(x, "linear: x"), weight, scale, zero, bias, out_features,
                             row_codes, gated, levels, outer, input_scale);
  with_norm_and_activation(a, norm, eps, activation);
  Tensor y = torch::stable::new_empty(x, {x.size(0), a.n}, out_dtype);
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.rows = x.size(0);
  a.y = y.data_ptr();
  a.y_stride = a.n;
  a.out_dtype = dtype_of(y, "linear: out_dtype");
  a.threads = threads();
  if (a.rows > 0) kernels().linear(a);
  return y;
}

void linear_add_(const Tensor& residual, const Tensor& x, const Tensor& weight, Optional scale,
                 Optional zero, Optional bias, int64_t row_codes, int64_t levels, Optional outer,
                 Optional input_scale) {
  const Form form = form_of(x, "linear_add_: x"), sum = form_of(residual, "linear_add_: residual");
  STD_TORCH_CHECK(sum.dtype == form.dtype && residual.size(0) == x.size(0),
                  "linear_add_: residual has ", residual.size(0), " rows, x has ", x.size(0),
                  ", and they must have the same dtype");
  LinearArgs a = linear_args(form, weight, scale, zero, bias, sum.columns, row_codes, false, levels,
                             outer, input_scale);
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
                             const Optional& weight_scale, const Optional& zero, int64_t levels,
                             const Optional& outer) {
  EmbeddingArgs a = {};
  const bool packed = weight.dim() == 4;
  if (packed) {
    const Matrix s = matrix(weight, weight_scale, zero, levels, outer, "embedding");
    a.kind = s.kind;
    a.panel_k = s.padded_k;
    a.quantized_scale = s.scale;
    a.scale_type = s.scale_type;
    a.zero = s.zero;
    a.fine = s.fine;
    a.table = s.table;
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
                 Optional weight_scale, Optional zero, int64_t levels, Optional outer) {
  EmbeddingArgs a = embedding_args(weight, dim, scale, weight_scale, zero, levels, outer);
  a.count = tokens.numel();
  a.tokens = integers(tokens, a.count, "embedding: tokens");
  check_ids(a.tokens, a.count, a.vocab, "token");
  Tensor out = torch::stable::new_empty(
      weight, {a.count, dim},
      a.kind == Weight::dense ? weight.scalar_type() : ScalarType::BFloat16);
  a.out = out.data_ptr();
  a.out_stride = dim;
  a.threads = threads();
  kernels().embedding(a);
  return out;
}

NormArgs norm_args(Form x, const Tensor& weight, const Optional& bias, double eps, bool centre) {
  NormArgs a = {};
  a.dtype = x.dtype;
  a.dim = centre ? x.columns : weight.numel();
  STD_TORCH_CHECK(a.dim > 0 && x.columns % a.dim == 0, "norm: ", x.columns,
                  " columns aren't groups of the ", a.dim, " that there are weights for");
  a.groups = x.columns / a.dim;
  a.weight = floats(weight, a.dim, "norm: weight");
  a.bias = floats(bias, a.dim, "norm: bias");
  a.eps = static_cast<float>(eps);
  a.centre = centre;
  return a;
}

static Tensor run_norm(const Tensor& x, NormArgs a) {
  STD_TORCH_CHECK(a.groups == 1 || x.is_contiguous(), "norm: rows of several groups lie side by side");
  Tensor out = torch::stable::new_empty(x, {x.size(0), x.size(1)});
  a.rows = x.size(0) * a.groups;
  a.x = x.data_ptr();
  a.x_stride = a.groups == 1 ? x.stride(0) : a.dim;
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

GateRowsArgs gate_rows_args(Form y, Form x, const Tensor& weight) {
  STD_TORCH_CHECK(y.dtype == x.dtype, "gate_rows_: y and x must have one dtype");
  GateRowsArgs a = {};
  a.columns = x.columns;
  a.weight = floats(weight, x.columns, "gate_rows_: weight");
  a.dim = y.columns;
  a.dtype = y.dtype;
  return a;
}

void gate_rows_(const Tensor& y, const Tensor& x, const Tensor& weight) {
  GateRowsArgs a =
      gate_rows_args(form_of(y, "gate_rows_: y"), form_of(x, "gate_rows_: x"), weight);
  STD_TORCH_CHECK(y.size(0) == x.size(0), "gate_rows_: y has ", y.size(0), " rows, x ", x.size(0));
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.y = y.data_ptr();
  a.y_stride = y.stride(0);
  a.rows = y.size(0);
  a.threads = threads();
  kernels().gate_rows(a);
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
  STD_TORCH_CHECK(activation > 0, "gate: there is no activation");
  check_activation(activation, gated, "gate");
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
