// Mamba 2, bound to torch; and made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

MambaArgs mamba_args(Form x, Form steps, const Tensor& conv, Optional bias, const Tensor& rates,
                     const Tensor& shift, const Tensor& skip, const Tensor& norm, double eps,
                     const Tensor& state, const Tensor& inputs) {
  MambaArgs a = {};
  STD_TORCH_CHECK(state.dim() == 5 && state.scalar_type() == ScalarType::Float && state.size(4) == 16,
                  "mamba2: state must be float32 [slots, heads, P/16, N, 16]");
  a.slots = state.size(0);
  a.heads = state.size(1);
  a.value_dim = state.size(2) * 16;
  a.key_dim = state.size(3);
  const int64_t keys = x.columns - 2 * a.inner();
  STD_TORCH_CHECK(a.key_dim > 0 && a.key_dim % 16 == 0 && keys > 0 && keys % (2 * a.key_dim) == 0,
                  "mamba2: ", x.columns, " columns aren't twice ", a.inner(),
                  " and, of each group, two times ", a.key_dim, ", which must be a multiple of 16");
  a.groups = keys / (2 * a.key_dim);
  STD_TORCH_CHECK(a.heads % a.groups == 0, "mamba2: ", a.heads, " heads in ", a.groups, " groups");
  STD_TORCH_CHECK(steps.dtype == DType::f32 && steps.columns == a.heads,
                  "mamba2: steps must be float32 of ", a.heads, " columns, has ", steps.columns);
  if (bias) a.bias = floats(*bias, a.turned(), "mamba2: bias");
  a.rates = floats(rates, a.heads, "mamba2: rates");
  a.shift = floats(shift, a.heads, "mamba2: shift");
  a.skip = floats(skip, a.heads, "mamba2: skip");
  a.norm = floats(norm, a.inner(), "mamba2: norm");
  a.eps = static_cast<float>(eps);
  a.dtype = x.dtype;
  take_convolution(a, conv, inputs, "mamba2");
  a.state = static_cast<float*>(state.data_ptr());
  a.state_pitch = pitch_of(state, "mamba2: state");
  return a;
}

Tensor mamba2(const Tensor& mixed, const Tensor& steps, const Tensor& conv, Optional bias,
              const Tensor& rates, const Tensor& shift, const Tensor& skip, const Tensor& norm,
              double eps, const Tensor& query_start, const Tensor& context_len, Optional states,
              Optional kept, const Tensor& state, const Tensor& inputs) {
  MambaArgs a = mamba_args(form_of(mixed, "mamba2: mixed"), form_of(steps, "mamba2: steps"), conv, bias,
                           rates, shift, skip, norm, eps, state, inputs);
  a.tokens = mixed.size(0);
  STD_TORCH_CHECK(steps.size(0) == a.tokens, "mamba2: steps has ", steps.size(0), " rows, mixed ",
                  a.tokens);
  const Sequences s = sequences_of_states(query_start, context_len, a.tokens, "mamba2");
  a.kept_count = check_states(s, states, kept, a.slots, "mamba2");
  if (states) a.states = static_cast<const int32_t*>(states->data_ptr());
  if (a.kept_count > 0) a.kept = static_cast<const int32_t*>(kept->data_ptr());
  Tensor y = torch::stable::new_empty(mixed, {a.tokens, a.inner()});
  a.x = mixed.data_ptr();
  a.x_stride = mixed.stride(0);
  a.steps = static_cast<const float*>(steps.data_ptr());
  a.steps_stride = steps.stride(0);
  a.query_start = s.query_start;
  a.sequences = s.count;
  a.y = y.data_ptr();
  a.threads = threads();
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
