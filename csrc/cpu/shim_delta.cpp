// The gated delta rule and the gate of attention, bound to torch; and made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

DeltaArgs delta_args(Form x, Form gates, const Tensor& conv, const Tensor& rates,
                     const Tensor& shift, const Tensor& norm, double eps, const Tensor& state, const Tensor& inputs) {
  DeltaArgs a = {};
  STD_TORCH_CHECK(state.dim() == 5 && state.scalar_type() == ScalarType::Float && state.size(4) == 16,
                  "delta_rule: state must be float32 [slots, heads, Dv/16, Dk, 16]");
  a.slots = state.size(0);
  a.heads = state.size(1);
  a.value_dim = state.size(2) * 16;
  a.key_dim = state.size(3);
  const int64_t values = a.heads * a.value_dim, keys = x.columns - 2 * values;
  STD_TORCH_CHECK(a.key_dim > 0 && a.key_dim % 16 == 0 && keys > 0 && keys % (2 * a.key_dim) == 0,
                  "delta_rule: ", x.columns, " columns aren't queries and keys of a multiple of 16, here ",
                  a.key_dim, ", and twice ", values, " values");
  a.key_heads = keys / (2 * a.key_dim);
  STD_TORCH_CHECK(a.heads % a.key_heads == 0, "delta_rule: ", a.heads, " heads of values and ",
                  a.key_heads, " of keys");
  STD_TORCH_CHECK(gates.dtype == DType::f32 && gates.columns == 2 * a.heads,
                  "delta_rule: gates must be float32 of ", 2 * a.heads, " columns, has ",
                  gates.columns);
  a.rates = floats(rates, a.heads, "delta_rule: rates");
  a.shift = floats(shift, a.heads, "delta_rule: shift");
  a.norm = floats(norm, a.value_dim, "delta_rule: norm");
  a.eps = static_cast<float>(eps);
  a.dtype = x.dtype;
  take_convolution(a, conv, inputs, "delta_rule");
  a.state = static_cast<float*>(state.data_ptr());
  a.state_pitch = pitch_of(state, "delta_rule: state");
  return a;
}

Sequences sequences_of_states(const Tensor& query_start, const Tensor& context_len, int64_t tokens,
                              const char* what) {
  Sequences s = {};
  s.count = context_len.numel();
  s.query_start = integers(query_start, s.count + 1, "query_start");
  s.context_len = integers(context_len, s.count, "context_len");
  STD_TORCH_CHECK(s.query_start[0] == 0 && s.query_start[s.count] == tokens, what,
                  ": query_start must go from 0 to ", tokens);
  for (int64_t b = 0; b < s.count; b++)
    STD_TORCH_CHECK(s.query_start[b] <= s.query_start[b + 1], what, ": query_start falls");
  return s;
}

int64_t check_states(const Sequences& s, const Optional& states, const Optional& kept, int64_t slots,
                     const char* what) {
  if (!states) {
    for (int64_t b = 0; b < s.count; b++)
      STD_TORCH_CHECK(s.context_len[b] == s.query_start[b + 1] - s.query_start[b], what,
                      ": sequence ", b, " has ", s.context_len[b], " tokens, ",
                      s.query_start[b + 1] - s.query_start[b],
                      " of them in this step, and no state to go on from");
  } else {
    const int32_t* slot = integers(*states, s.count, "states");
    for (int64_t b = 0; b < s.count; b++)
      STD_TORCH_CHECK(slot[b] < slots, what, ": state ", slot[b], " is outside of ", slots);
  }
  if (!kept) return 0;
  STD_TORCH_CHECK(kept->dim() == 2 && kept->size(1) == 2, what, ": kept must be [n, 2]");
  const int64_t count = kept->size(0), tokens = s.query_start[s.count];
  const int32_t* pair = integers(*kept, 2 * count, "kept");
  const auto* read = states ? static_cast<const int32_t*>(states->data_ptr()) : nullptr;
  for (int64_t i = 0; i < count; i++) {
    STD_TORCH_CHECK(pair[2 * i] >= 0 && pair[2 * i] < tokens && pair[2 * i + 1] >= 0 &&
                        pair[2 * i + 1] < slots,
                    what, ": row ", pair[2 * i], " of ", tokens, " is kept in state ",
                    pair[2 * i + 1], " of ", slots);
    STD_TORCH_CHECK(i == 0 || pair[2 * i - 2] <= pair[2 * i], what, ": kept rows must rise");
    STD_TORCH_CHECK(!read || std::find(read, read + s.count, pair[2 * i + 1]) == read + s.count, what,
                    ": state ", pair[2 * i + 1], " is both read and written");
  }
  return count;
}

Tensor delta_rule(const Tensor& mixed, const Tensor& gates, const Tensor& conv, const Tensor& rates,
                  const Tensor& shift, const Tensor& norm, double eps, const Tensor& query_start,
                  const Tensor& context_len, Optional states, Optional kept, const Tensor& state,
                  const Tensor& inputs) {
  DeltaArgs a = delta_args(form_of(mixed, "delta_rule: mixed"), form_of(gates, "delta_rule: gates"),
                           conv, rates, shift, norm, eps, state, inputs);
  a.tokens = mixed.size(0);
  STD_TORCH_CHECK(gates.size(0) == a.tokens, "delta_rule: gates has ", gates.size(0), " rows, mixed ",
                  a.tokens);
  const Sequences s = sequences_of_states(query_start, context_len, a.tokens, "delta_rule");
  a.kept_count = check_states(s, states, kept, a.slots, "delta_rule");
  if (states) a.states = static_cast<const int32_t*>(states->data_ptr());
  if (a.kept_count > 0) a.kept = static_cast<const int32_t*>(kept->data_ptr());
  Tensor y = torch::stable::new_empty(mixed, {a.tokens, a.heads * a.value_dim});
  a.x = mixed.data_ptr();
  a.x_stride = mixed.stride(0);
  a.gates = static_cast<const float*>(gates.data_ptr());
  a.gates_stride = gates.stride(0);
  a.query_start = s.query_start;
  a.sequences = s.count;
  a.y = y.data_ptr();
  a.threads = threads();
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

namespace {

int64_t program_delta_rule(int64_t id, int64_t mixed, int64_t gates, const Tensor& conv,
                           const Tensor& rates, const Tensor& shift, const Tensor& norm, double eps,
                           const Tensor& state, const Tensor& inputs) {
  const auto p = held(id);
  p->check_all_rows(mixed, "delta_rule");
  p->check_all_rows(gates, "delta_rule");
  const DeltaArgs a =
      delta_args(p->form(mixed), p->form(gates), conv, rates, shift, norm, eps, state, inputs);
  p->take_slots(a.slots);
  p->keep_all(conv, rates, shift, norm, state, inputs);
  const int64_t y = p->result({a.dtype, a.heads * a.value_dim}, mixed);
  p->program.add({a, static_cast<int>(mixed), static_cast<int>(y), Ids::tokens,
                  static_cast<int>(gates)});
  return y;
}

void program_gate_by_(int64_t id, int64_t y, int64_t x) {
  const auto p = held(id);
  p->check_like(y, x, "gate_by_");
  p->add(gate_by_args(p->form(y), p->form(x)), x, y);
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_delta_rule(int program, int mixed, int gates, Tensor conv, Tensor rates, Tensor shift, "
      "Tensor norm, float eps, Tensor state, Tensor inputs) -> int");
  m.def("program_gate_by_(int program, int y, int x) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("delta_rule", TORCH_BOX(&delta_rule));
  m.impl("gate_by_", TORCH_BOX(&gate_by_));
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_delta_rule", TORCH_BOX(&program_delta_rule));
  m.impl("program_gate_by_", TORCH_BOX(&program_gate_by_));
}
