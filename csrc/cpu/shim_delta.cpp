// The gated delta rule, the gate of attention and other factors, bound to torch; and made part of a
// program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

static DeltaArgs delta_args(Form x, Form gates, const Tensor& conv, const Tensor& rates, const Tensor& shift,
                            const Tensor& norm, double eps, const Tensor& state, const Tensor& inputs,
                            double strength) {
  DeltaArgs a = {};
  a.strength = static_cast<float>(strength);
  take_states(a, x, gates, 2, "gates", state, "delta_rule");
  take_rates(a, rates, shift, norm, a.value_dim, eps, "delta_rule");
  take_convolution(a, conv, std::nullopt, inputs, "delta_rule");
  return a;
}

Tensor delta_rule(const Tensor& mixed, const Tensor& gates, const Tensor& conv, const Tensor& rates,
                  const Tensor& shift, const Tensor& norm, double eps, const Tensor& query_start,
                  const Tensor& context_len, Optional states, Optional kept, const Tensor& state,
                  const Tensor& inputs, double strength) {
  DeltaArgs a = delta_args(form_of(mixed, "delta_rule: mixed"), form_of(gates, "delta_rule: gates"),
                           conv, rates, shift, norm, eps, state, inputs, strength);
  const Tensor y = take_step(a, mixed, a.inner(), query_start, context_len, states, kept, "delta_rule");
  take_gates(a, gates, "gates", "delta_rule");
  kernels().delta_rule(a);
  return y;
}

static GateByArgs gate_by_args(Form y, Form x) {
  STD_TORCH_CHECK(y.dtype == x.dtype && y.columns == x.columns, "gate_by_: y has ", y.columns,
                  " columns and x ", x.columns, ", which must be as many of one dtype");
  GateByArgs a = {};
  a.dim = x.columns;
  a.dtype = x.dtype;
  return a;
}

void gate_by_(const Tensor& y, const Tensor& x) {
  GateByArgs a = gate_by_args(form_of(y, "gate_by_: y"), form_of(x, "gate_by_: x"));
  STD_TORCH_CHECK(y.size(0) == x.size(0), "gate_by_: y has ", y.size(0), " rows, x ", x.size(0));
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.y = y.data_ptr();
  a.y_stride = y.stride(0);
  a.rows = y.size(0);
  a.threads = threads();
  kernels().gate_by(a);
}

static GateByArgs multiply_args(Form y, Form x, int64_t first) {
  STD_TORCH_CHECK(y.dtype == x.dtype && first >= 0 && first + y.columns <= x.columns,
                  "multiply_: y has ", y.columns, " columns, and x ", x.columns, " of which those from ",
                  first, " on are taken; both of one dtype");
  GateByArgs a = {};
  a.dim = y.columns;
  a.dtype = y.dtype;
  a.first = first;
  a.plain = true;
  return a;
}

void multiply_(const Tensor& y, const Tensor& x, int64_t first) {
  GateByArgs a = multiply_args(form_of(y, "multiply_: y"), form_of(x, "multiply_: x"), first);
  STD_TORCH_CHECK(y.size(0) == x.size(0), "multiply_: y has ", y.size(0), " rows, x ", x.size(0));
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.y = y.data_ptr();
  a.y_stride = y.stride(0);
  a.rows = y.size(0);
  a.threads = threads();
  kernels().gate_by(a);
}

static GateByArgs scale_args(Form y, const Tensor& number) {
  GateByArgs a = {};
  a.dim = y.columns;
  a.dtype = y.dtype;
  a.number = floats(number, 1, "scale_: number");
  return a;
}

void scale_(const Tensor& y, const Tensor& number) {
  GateByArgs a = scale_args(form_of(y, "scale_: y"), number);
  a.y = y.data_ptr();
  a.y_stride = y.stride(0);
  a.rows = y.size(0);
  a.threads = threads();
  kernels().gate_by(a);
}

namespace {

int64_t program_delta_rule(int64_t id, int64_t mixed, int64_t gates, const Tensor& conv,
                           const Tensor& rates, const Tensor& shift, const Tensor& norm, double eps,
                           const Tensor& state, const Tensor& inputs, double strength) {
  const auto p = held(id);
  p->check_all_rows(mixed, "delta_rule");
  p->check_all_rows(gates, "delta_rule");
  const DeltaArgs a = delta_args(p->form(mixed), p->form(gates), conv, rates, shift, norm, eps, state,
                                 inputs, strength);
  p->take_slots(a.slots);
  p->keep_all(conv, rates, shift, norm, state, inputs);
  const int64_t y = p->result({a.dtype, a.inner()}, mixed);
  p->program.add({a, static_cast<int>(mixed), static_cast<int>(y), Ids::tokens,
                  static_cast<int>(gates)});
  return y;
}

void program_gate_by_(int64_t id, int64_t y, int64_t x) {
  const auto p = held(id);
  p->check_like(y, x, "gate_by_");
  p->add(gate_by_args(p->form(y), p->form(x)), x, y);
}

void program_multiply_(int64_t id, int64_t y, int64_t x, int64_t first) {
  const auto p = held(id);
  p->check_like(y, x, "multiply_");
  p->add(multiply_args(p->form(y), p->form(x), first), x, y);
}

void program_scale_(int64_t id, int64_t y, const Tensor& number) {
  const auto p = held(id);
  p->keep(number);
  p->add(scale_args(p->form(y), number), -1, y);
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_delta_rule(int program, int mixed, int gates, Tensor conv, Tensor rates, Tensor shift, "
      "Tensor norm, float eps, Tensor state, Tensor inputs, float strength=1.0) -> int");
  m.def("program_gate_by_(int program, int y, int x) -> ()");
  m.def("program_multiply_(int program, int y, int x, int first=0) -> ()");
  m.def("program_scale_(int program, int y, Tensor number) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("delta_rule", TORCH_BOX(&delta_rule));
  m.impl("gate_by_", TORCH_BOX(&gate_by_));
  m.impl("multiply_", TORCH_BOX(&multiply_));
  m.impl("scale_", TORCH_BOX(&scale_));
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_delta_rule", TORCH_BOX(&program_delta_rule));
  m.impl("program_gate_by_", TORCH_BOX(&program_gate_by_));
  m.impl("program_multiply_", TORCH_BOX(&program_multiply_));
  m.impl("program_scale_", TORCH_BOX(&program_scale_));
}
