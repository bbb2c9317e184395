// The short convolution, bound to torch; and made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

ShortConvArgs short_conv_args(Form x, const Tensor& conv, Optional bias, const Tensor& inputs) {
  ShortConvArgs a = {};
  STD_TORCH_CHECK(conv.dim() == 2 && conv.size(0) > 1 && conv.size(0) <= 16,
                  "short_conv: conv must be [2 to 16, channels]");
  a.width = conv.size(0);
  a.dim = conv.size(1);
  a.conv = floats(conv, conv.numel(), "short_conv: conv");
  if (bias) a.bias = floats(*bias, a.dim, "short_conv: bias");
  a.dtype = x.dtype;
  STD_TORCH_CHECK(x.columns == 3 * a.dim, "short_conv: mixed has ", x.columns, " columns, ", a.dim,
                  " channels need three times as many");
  STD_TORCH_CHECK(inputs.dim() == 3 && inputs.size(1) == a.width - 1 && inputs.size(2) == a.dim &&
                      dtype_of(inputs, "short_conv: inputs") == a.dtype,
                  "short_conv: inputs must be [slots, ", a.width - 1, ", ", a.dim,
                  "] of the rows' dtype");
  a.slots = inputs.size(0);
  a.inputs = inputs.data_ptr();
  a.inputs_pitch = pitch_of(inputs, "short_conv: inputs");
  return a;
}

Tensor short_conv(const Tensor& mixed, const Tensor& conv, Optional bias, const Tensor& query_start,
                  const Tensor& context_len, Optional states, Optional kept, const Tensor& inputs) {
  ShortConvArgs a = short_conv_args(form_of(mixed, "short_conv: mixed"), conv, bias, inputs);
  a.tokens = mixed.size(0);
  const Sequences s = sequences_of_states(query_start, context_len, a.tokens, "short_conv");
  a.kept_count = check_states(s, states, kept, a.slots, "short_conv");
  if (states) a.states = static_cast<const int32_t*>(states->data_ptr());
  if (a.kept_count > 0) a.kept = static_cast<const int32_t*>(kept->data_ptr());
  Tensor y = torch::stable::new_empty(mixed, {a.tokens, a.dim});
  a.x = mixed.data_ptr();
  a.x_stride = mixed.stride(0);
  a.query_start = s.query_start;
  a.sequences = s.count;
  a.y = y.data_ptr();
  a.threads = threads();
  kernels().short_conv(a);
  return y;
}

namespace {

int64_t program_short_conv(int64_t id, int64_t mixed, const Tensor& conv, Optional bias,
                           const Tensor& inputs) {
  const auto p = held(id);
  p->check_all_rows(mixed, "short_conv");
  const ShortConvArgs a = short_conv_args(p->form(mixed), conv, bias, inputs);
  p->take_slots(a.slots);
  p->keep_all(conv, bias, inputs);
  const int64_t y = p->result({a.dtype, a.dim}, mixed);
  p->program.add({a, static_cast<int>(mixed), static_cast<int>(y), Ids::tokens});
  return y;
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_short_conv(int program, int mixed, Tensor conv, Tensor? bias, Tensor inputs) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("short_conv", TORCH_BOX(&short_conv)); }

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_short_conv", TORCH_BOX(&program_short_conv));
}
