// Choosing tokens, bound to torch.
#include "shim.h"

namespace penstock::shim {
namespace {

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

const int64_t* longs(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous int64, has ", t.numel());
  return static_cast<const int64_t*>(t.data_ptr());
}

template <typename Args>
Args leading_args(const Tensor& logits, int64_t k, const char* what) {
  const Logits x = logits_of(logits, what);
  STD_TORCH_CHECK(k > 0, what, ": k must be at least 1, is ", k);
  Args a = {};
  a.logits = x.data;
  a.stride = x.stride;
  a.rows = x.rows;
  a.size = x.size;
  a.k = k < x.size ? k : x.size;
  a.threads = threads();
  return a;
}

TopKArgs top_k_args(const Tensor& logits, int64_t k, Tensor& values, Tensor& ids) {
  TopKArgs a = leading_args<TopKArgs>(logits, k, "top_k: logits");
  values = torch::stable::new_empty(logits, {a.rows, a.k});
  ids = torch::stable::new_empty(logits, {a.rows, a.k}, ScalarType::Long);
  a.values = static_cast<float*>(values.data_ptr());
  a.ids = static_cast<int64_t*>(ids.data_ptr());
  return a;
}

}  // namespace

std::tuple<Tensor, Tensor> argmax(const Tensor& logits) {
  const Logits x = logits_of(logits, "argmax: logits");
  Tensor ids = torch::stable::new_empty(logits, {x.rows}, ScalarType::Long);
  Tensor values = torch::stable::new_empty(logits, {x.rows});
  kernels().argmax({x.data, x.stride, static_cast<int64_t*>(ids.data_ptr()),
                              static_cast<float*>(values.data_ptr()), x.rows, x.size, threads()});
  return {ids, values};
}

void mask_(const Tensor& logits, const Tensor& rows, const Tensor& bits) {
  const Logits x = logits_of(logits, "mask_: logits");
  STD_TORCH_CHECK(rows.dim() == 1 && rows.is_contiguous() &&
                      rows.scalar_type() == ScalarType::Long,
                  "mask_: rows must be contiguous int64 [R], has ", rows.dim(), " dimensions");
  MaskArgs a = {};
  a.count = rows.size(0);
  a.words = (x.size + 31) / 32;
  STD_TORCH_CHECK(bits.dim() == 2 && bits.is_contiguous() &&
                      bits.scalar_type() == ScalarType::Int && bits.size(0) == a.count &&
                      bits.size(1) == a.words,
                  "mask_: bits must be contiguous int32 [", a.count, ", ", a.words, "]");
  a.rows = static_cast<const int64_t*>(rows.data_ptr());
  for (int64_t i = 0; i < a.count; i++)
    STD_TORCH_CHECK(a.rows[i] >= 0 && a.rows[i] < x.rows, "mask_: row ", a.rows[i],
                    " isn't one of ", x.rows);
  a.logits = const_cast<float*>(x.data);
  a.stride = x.stride;
  a.bits = static_cast<const uint32_t*>(bits.data_ptr());
  a.size = x.size;
  a.threads = threads();
  kernels().mask(a);
}

std::tuple<Tensor, Tensor> top_k(const Tensor& logits, int64_t k) {
  Tensor values, ids;
  kernels().top_k(top_k_args(logits, k, values, ids));
  return {values, ids};
}

std::tuple<Tensor, Tensor, Tensor> softmax_top_k(const Tensor& logits, const Tensor& temperature,
                                                 int64_t k) {
  Tensor values, ids;
  TopKArgs a = top_k_args(logits, k, values, ids);
  Tensor weights = torch::stable::new_empty(logits, {a.rows, a.k});
  a.temperature = floats(temperature, a.rows, "softmax_top_k: temperature");
  a.weights = static_cast<float*>(weights.data_ptr());
  kernels().top_k(a);
  return {values, ids, weights};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> scaled_top_k(const Tensor& logits,
                                                        const Tensor& temperature,
                                                        const Tensor& top_k,
                                                        const Tensor& log_min_p, int64_t k) {
  ScaledTopKArgs a = leading_args<ScaledTopKArgs>(logits, k, "scaled_top_k: logits");
  a.temperature = floats(temperature, a.rows, "scaled_top_k: temperature");
  a.top_k = longs(top_k, a.rows, "scaled_top_k: top_k");
  a.log_min_p = floats(log_min_p, a.rows, "scaled_top_k: log_min_p");
  Tensor scaled = torch::stable::new_empty(logits, {a.rows, a.k});
  Tensor ids = torch::stable::new_empty(logits, {a.rows, a.k}, ScalarType::Long);
  Tensor peaks = torch::stable::new_empty(logits, {a.rows});
  Tensor more = torch::stable::new_empty(logits, {a.rows}, ScalarType::Bool);
  a.scaled = static_cast<float*>(scaled.data_ptr());
  a.ids = static_cast<int64_t*>(ids.data_ptr());
  a.peaks = static_cast<float*>(peaks.data_ptr());
  a.more = static_cast<bool*>(more.data_ptr());
  kernels().scaled_top_k(a);
  return {scaled, ids, peaks, more};
}

std::tuple<Tensor, Tensor> draw_nucleus(const Tensor& logits, const Tensor& temperature,
                                        const Tensor& top_p, const Tensor& u, int64_t narrow,
                                        int64_t wide) {
  STD_TORCH_CHECK(narrow <= wide, "draw_nucleus: narrow is ", narrow, ", above wide, ", wide);
  DrawNucleusArgs a = leading_args<DrawNucleusArgs>(logits, narrow, "draw_nucleus: logits");
  a.wide = wide < a.size ? wide : a.size;
  a.temperature = floats(temperature, a.rows, "draw_nucleus: temperature");
  a.top_p = floats(top_p, a.rows, "draw_nucleus: top_p");
  a.u = fractions(u, a.rows, "draw_nucleus: u");
  Tensor out = torch::stable::new_empty(logits, {a.rows}, ScalarType::Long);
  Tensor peaks = torch::stable::new_empty(logits, {a.rows});
  a.out = static_cast<int64_t*>(out.data_ptr());
  a.peaks = static_cast<float*>(peaks.data_ptr());
  kernels().draw_nucleus(a);
  return {out, peaks};
}

std::tuple<Tensor, Tensor> draw_plain(const Tensor& logits, const Tensor& temperature,
                                      const Tensor& u) {
  const Logits x = logits_of(logits, "draw_plain: logits");
  Tensor ids = torch::stable::new_empty(logits, {x.rows}, ScalarType::Long);
  Tensor peaks = torch::stable::new_empty(logits, {x.rows});
  DrawPlainArgs a = {};
  a.logits = x.data;
  a.stride = x.stride;
  a.temperature = floats(temperature, x.rows, "draw_plain: temperature");
  a.u = fractions(u, x.rows, "draw_plain: u");
  a.ids = static_cast<int64_t*>(ids.data_ptr());
  a.peaks = static_cast<float*>(peaks.data_ptr());
  a.rows = x.rows;
  a.size = x.size;
  a.threads = threads();
  kernels().draw_plain(a);
  return {ids, peaks};
}

Tensor draw_from(const Tensor& ids, const Tensor& weights, const Tensor& u, Optional top_p) {
  STD_TORCH_CHECK(ids.dim() == 2 && ids.is_contiguous() && ids.scalar_type() == ScalarType::Long,
                  "draw_from: ids must be contiguous int64 [rows, candidates], dim ", ids.dim());
  DrawFromArgs a = {};
  a.rows = ids.size(0);
  a.count = ids.size(1);
  STD_TORCH_CHECK(a.count > 0, "draw_from: there are no candidates to draw from");
  STD_TORCH_CHECK(weights.dim() == 2 && weights.size(0) == a.rows && weights.size(1) == a.count,
                  "draw_from: weights must be [", a.rows, ", ", a.count, "] as ids are");
  a.weights = floats(weights, a.rows * a.count, "draw_from: weights");
  a.u = fractions(u, a.rows, "draw_from: u");
  a.top_p = floats(top_p, a.rows, "draw_from: top_p");
  Tensor out = torch::stable::new_empty(ids, {a.rows});
  a.ids = static_cast<const int64_t*>(ids.data_ptr());
  a.out = static_cast<int64_t*>(out.data_ptr());
  a.threads = threads();
  kernels().draw_from(a);
  return out;
}

Tensor uniforms(const Tensor& seeds, const Tensor& samples, const Tensor& positions, int64_t use) {
  UniformsArgs a = {};
  a.count = seeds.numel();
  a.seeds = longs(seeds, a.count, "uniforms: seeds");
  a.samples = longs(samples, a.count, "uniforms: samples");
  a.positions = longs(positions, a.count, "uniforms: positions");
  STD_TORCH_CHECK(use >= 0 && use <= UINT32_MAX, "uniforms: use must have 32 bits, is ", use);
  a.use = static_cast<uint32_t>(use);
  Tensor out = torch::stable::new_empty(seeds, {a.count}, ScalarType::Double);
  a.out = static_cast<double*>(out.data_ptr());
  kernels().uniforms(a);
  return out;
}

}  // namespace penstock::shim
