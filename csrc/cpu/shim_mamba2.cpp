// Mamba 2, bound to torch; and made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

static MambaArgs mamba_args(Form x, Form steps, const Tensor& conv, const Optional& bias,
                            const Tensor& rates, const Tensor& shift, const Tensor& skip,
                            const Tensor& norm, double eps, const Tensor& state, const Tensor& inputs) {
  MambaArgs a = {};
  take_states(a, x, steps, 1, "steps", state, "mamba2");
  a.turned_from = a.inner();
  take_rates(a, rates, shift, norm, a.inner(), eps, "mamba2");
  a.skip = floats(skip, a.heads, "mamba2: skip");
  take_convolution(a, conv, bias, inputs, "mamba2");
  return a;
}

Tensor mamba2(const Tensor& mixed, const Tensor& steps, const Tensor& conv, Optional bias,
              const Tensor& rates, const Tensor& shift, const Tensor& skip, const Tensor& norm,
              double eps, const Tensor& query_start, const Tensor& context_len, Optional states,
              Optional kept, const Tensor& state, const Tensor& inputs) {
  MambaArgs a = mamba_args(form_of(mixed, "mamba2: mixed"), form_of(steps, "mamba2: steps"), conv, bias,
                           rates, shift, skip, norm, eps, state, inputs);
  const Tensor y = take_step(a, mixed, a.inner(), query_start, context_len, states, kept, "mamba2");
  take_gates(a, steps, "steps", "mamba2");
  kernels().mamba2(a);
  return y;
}

namespace {

int64_t program_mamba2(int64_t id, int64_t mixed, int64_t steps, const Tensor& conv, Optional bias,
                       const Tensor& rates, const Tensor& shift, const Tensor& skip,
                       const Tensor& norm, double eps, const Tensor& state, const Tensor& inputs) {
  const auto p = held(id);
  p->check_all_rows(mixed, "mamba2");
  p->check_all_rows(steps, "mamba2");
  const MambaArgs a = mamba_args(p->form(mixed), p->form(steps), conv, bias, rates, shift, skip, norm,
                                 eps, state, inputs);
  p->take_slots(a.slots);
  p->keep_all(conv, bias, rates, shift, skip, norm, state, inputs);
  const int64_t y = p->result({a.dtype, a.inner()}, mixed);
  p->program.add({a, static_cast<int>(mixed), static_cast<int>(y), Ids::tokens,
                  static_cast<int>(steps)});
  return y;
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_mamba2(int program, int mixed, int steps, Tensor conv, Tensor? bias, Tensor rates, "
      "Tensor shift, Tensor skip, Tensor norm, float eps, Tensor state, Tensor inputs) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("mamba2", TORCH_BOX(&mamba2)); }

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_mamba2", TORCH_BOX(&program_mamba2));
}
