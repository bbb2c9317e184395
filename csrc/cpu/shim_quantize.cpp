// Rounding and packing weights, bound to torch.
#include "shim.h"

namespace penstock::shim {
namespace {

// What `quantize_int8` (group 0) and `quantize_int4` share; the caller adds scale and zero.
QuantizeArgs quantize_args(const Tensor& weight, int64_t group, bool gated) {
  check_rows(weight, "quantize: weight");
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half,
                  "quantize: weight must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(!gated || weight.size(0) % 2 == 0, "quantize: a weight with a gate has two "
                  "halves, this one ", weight.size(0), " rows");
  QuantizeArgs a = {};
  a.dtype = type == ScalarType::Float      ? Float::f32
            : type == ScalarType::BFloat16 ? Float::bf16
                                           : Float::f16;
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

}  // namespace

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& weight, bool gated) {
  QuantizeArgs a = quantize_args(weight, 0, gated);
  const int64_t panels = (a.n + 15) / 16 * (gated ? 2 : 1);
  Tensor q = torch::stable::new_empty(weight, {panels, a.padded_k / 4, 16, 4}, ScalarType::Char);
  Tensor scale = torch::stable::new_empty(weight, {panels, 1, 16}, ScalarType::Float);
  a.panels = q.data_ptr();
  a.scale = scale.data_ptr();
  kernels().quantize(a);
  return {q, scale};
}

std::tuple<Tensor, Tensor, Tensor> quantize_int4(const Tensor& weight, int64_t group,
                                                 bool symmetric, bool gated) {
  STD_TORCH_CHECK(group == 32 || group == 64 || group == 128, "quantize_int4: group ", group,
                  " isn't 32, 64 or 128");
  QuantizeArgs a = quantize_args(weight, group, gated);
  const int64_t panels = (a.n + 15) / 16 * (gated ? 2 : 1), groups = a.padded_k / group;
  Tensor q = torch::stable::new_empty(weight, {panels, a.padded_k / 8, 16, 4}, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(weight, {panels, groups, 16}, ScalarType::Half);
  Tensor zero = torch::stable::new_empty(weight, {symmetric ? 0 : panels, groups, 16},
                                         ScalarType::Byte);
  a.symmetric = symmetric;
  a.panels = q.data_ptr();
  a.scale = scale.data_ptr();
  a.zero = static_cast<uint8_t*>(zero.data_ptr());
  kernels().quantize(a);
  return {q, scale, zero};
}

}  // namespace penstock::shim
