// Low-rank adapters, bound to torch.
#include "shim.h"

namespace penstock::shim {

// down and up are panels of each adapter, one more dimension than a weight has.
LoraArgs lora_args(Form x, Form y, const Tensor& down, const Tensor& up, const Tensor& scaling) {
  STD_TORCH_CHECK(down.dim() == 5 && up.dim() == 5 && down.is_contiguous() && up.is_contiguous() &&
                      down.size(0) > 0 && down.size(0) == up.size(0),
                  "lora_add_: down and up must be packed panels of the same adapters, "
                  "[A, N/16, K/v, 16, v]");
  STD_TORCH_CHECK(x.dtype == y.dtype || y.dtype == DType::f32,
                  "lora_add_: y must have the dtype of x, or float32");
  LoraArgs a = {};
  a.count = down.size(0);
  const int64_t rank = down.size(1) * 16;
  a.down = linear_args(x, torch::stable::select(down, 0, 0), {}, {}, {}, rank, 0, false, 0, {}, {});
  a.up = linear_args({x.dtype, rank}, torch::stable::select(up, 0, 0), {}, {}, {}, y.columns, 0,
                     false, 0, {}, {});
  a.up.out_dtype = DType::f32;
  a.down_bytes = down.numel() / a.count * static_cast<int64_t>(down.element_size());
  a.up_bytes = up.numel() / a.count * static_cast<int64_t>(up.element_size());
  a.scaling = floats(scaling, a.count, "lora_add_: scaling");
  a.y_dtype = y.dtype;
  return a;
}

const int32_t* check_adapters(const Tensor& adapters, int64_t rows, int64_t count) {
  const int32_t* found = integers(adapters, rows, "adapters");
  for (int64_t i = 0; i < rows; i++)
    STD_TORCH_CHECK(found[i] < count, "lora_add_: there is no adapter ", found[i], " of ", count);
  return found;
}

void lora_add_(const Tensor& y, const Tensor& x, const Tensor& down, const Tensor& up,
               const Tensor& adapters, const Tensor& scaling) {
  STD_TORCH_CHECK(y.size(0) == x.size(0), "lora_add_: y has ", y.size(0), " rows, x has ",
                  x.size(0));
  LoraArgs a =
      lora_args(form_of(x, "lora_add_: x"), form_of(y, "lora_add_: y"), down, up, scaling);
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.y = y.data_ptr();
  a.y_stride = y.stride(0);
  a.rows = x.size(0);
  a.adapters = check_adapters(adapters, a.rows, a.count);
  a.threads = threads();
  lora_add(a);
}

}  // namespace penstock::shim
