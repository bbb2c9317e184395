// The short convolution, bound to torch; and made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

static ShortConvArgs short_conv_args(Form x, const Tensor& conv, const Optional& bias, const Tensor& inputs) {
  ShortConvArgs a = {};
  STD_TORCH_CHECK(x.columns % 3 == 0, "short_conv: mixed has ", x.columns,
                  " columns, which aren't three times the channels");
  a.turned = x.columns / 3;
  a.dtype = x.dtype;
  a.slots = inputs.dim() > 0 ? inputs.size(0) : 0;
  take_convolution(a, conv, bias, inputs, "short_conv");
  return a;
}

Tensor short_conv(const Tensor& mixed, const Tensor& conv, Optional bias, const Tensor& query_start,
                  const Tensor& context_len, Optional states, Optional kept, const Tensor& inputs) {
  ShortConvArgs a = short_conv_args(form_of(mixed, "short_conv: mixed"), conv, bias, inputs);
  const Tensor y = take_step(a, mixed, a.turned, query_start, context_len, states, kept, "short_conv");
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
  const int64_t y = p->result({a.dtype, a.turned}, mixed);
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
