// Checks of tensors that all operators share; rows may be strided, what lies in one row may not.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "kernels.h"

namespace penstock::shim {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline int threads() { return static_cast<int>(torch::stable::get_num_threads()); }

inline DType dtype_of(const Tensor& t, const char* what) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, what,
                  " must be float32 or bfloat16");
  return type == ScalarType::Float ? DType::f32 : DType::bf16;
}

inline void same_dtype(const Tensor& a, const Tensor& b, const char* what) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), what, " must have the same dtype");
}

// Rows may be strided; what lies in one row may not.
inline void check_rows(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1), what,
                  " must be [rows, columns] with contiguous rows, dim ", t.dim());
}

inline const float* floats(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous float32, has ", t.numel());
  return static_cast<const float*>(t.data_ptr());
}

inline const float* floats(const std::optional<Tensor>& t, int64_t count, const char* what) {
  return t ? floats(*t, count, what) : nullptr;
}

inline const int32_t* integers(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous int32, has ", t.numel());
  return static_cast<const int32_t*>(t.data_ptr());
}

Tensor rotary_cache(const Tensor& qkv, int64_t heads, std::optional<Tensor> q_norm,
                    std::optional<Tensor> k_norm, double eps, std::optional<Tensor> cos_sin,
                    bool interleaved, const Tensor& positions, const Tensor& slots,
                    const Tensor& key_cache, const Tensor& value_cache,
                    std::optional<Tensor> key_scale, std::optional<Tensor> value_scale);

Tensor paged_attention(const Tensor& q, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, double scale, int64_t window, double softcap,
                       std::optional<Tensor> sinks, std::optional<Tensor> key_scale,
                       std::optional<Tensor> value_scale);

}  // namespace penstock::shim
