// What layers with states have in common when they are bound: their convolution, their states, and what a
// step says of both.
#include "shim.h"

namespace penstock::shim {

void take_convolution(StatesArgs& a, const Tensor& conv, const Optional& bias, const Tensor& inputs,
                      const std::string& what) {
  STD_TORCH_CHECK(conv.dim() == 2 && conv.size(0) > 1 && conv.size(0) <= 16 && conv.size(1) == a.turned,
                  what, ": conv must be [2 to 16, ", a.turned, "]");
  a.width = conv.size(0);
  a.conv = floats(conv, conv.numel(), (what + ": conv").c_str());
  if (bias) a.bias = floats(*bias, a.turned, (what + ": bias").c_str());
  const std::string name = what + ": inputs";
  STD_TORCH_CHECK(inputs.dim() == 3 && inputs.size(0) == a.slots && inputs.size(1) == a.width - 1 &&
                      inputs.size(2) == a.turned && dtype_of(inputs, name.c_str()) == a.dtype,
                  name, " must be [", a.slots, ", ", a.width - 1, ", ", a.turned,
                  "] of the rows' dtype");
  a.inputs = inputs.data_ptr();
  a.inputs_pitch = pitch_of(inputs, name.c_str());
}

void take_states(RecurrentArgs& a, Form x, Form gates, int64_t each, const std::string& name,
                 const Tensor& state, const std::string& what) {
  STD_TORCH_CHECK(state.dim() == 5 && state.scalar_type() == ScalarType::Float && state.size(4) == 16,
                  what, ": state must be float32 [slots, heads, values/16, keys, 16]");
  a.slots = state.size(0);
  a.heads = state.size(1);
  a.value_dim = state.size(2) * 16;
  a.key_dim = state.size(3);
  const int64_t keys = x.columns - 2 * a.inner();
  STD_TORCH_CHECK(a.key_dim > 0 && a.key_dim % 16 == 0 && keys > 0 && keys % (2 * a.key_dim) == 0, what,
                  ": ", x.columns, " columns aren't twice ", a.inner(), " values, and queries and keys of ",
                  a.key_dim, " each, which must be a multiple of 16");
  a.key_heads = keys / (2 * a.key_dim);
  STD_TORCH_CHECK(a.heads % a.key_heads == 0, what, ": ", a.heads, " heads of values and ", a.key_heads,
                  " of keys");
  a.turned = keys + a.inner();
  STD_TORCH_CHECK(gates.dtype == DType::f32 && gates.columns == each * a.heads, what, ": ", name,
                  " must be float32 of ", each * a.heads, " columns, has ", gates.columns);
  a.dtype = x.dtype;
  a.state = static_cast<float*>(state.data_ptr());
  a.state_pitch = pitch_of(state, (what + ": state").c_str());
}

void take_rates(RecurrentArgs& a, const Tensor& rates, const Tensor& shift, const Tensor& norm,
                int64_t normed, double eps, const std::string& what) {
  a.rates = floats(rates, a.heads, (what + ": rates").c_str());
  a.shift = floats(shift, a.heads, (what + ": shift").c_str());
  a.norm = floats(norm, normed, (what + ": norm").c_str());
  a.eps = static_cast<float>(eps);
}

Tensor take_step(StatesArgs& a, const Tensor& mixed, int64_t columns, const Tensor& query_start,
                 const Tensor& context_len, const Optional& states, const Optional& kept,
                 const char* what) {
  a.tokens = mixed.size(0);
  a.x = mixed.data_ptr();
  a.x_stride = mixed.stride(0);
  const Sequences s = sequences_of_states(query_start, context_len, a.tokens, what);
  a.query_start = s.query_start;
  a.sequences = s.count;
  a.kept_count = check_states(s, states, kept, a.slots, what);
  if (states) a.states = static_cast<const int32_t*>(states->data_ptr());
  if (a.kept_count > 0) a.kept = static_cast<const int32_t*>(kept->data_ptr());
  a.threads = threads();
  Tensor y = torch::stable::new_empty(mixed, {a.tokens, columns});
  a.y = y.data_ptr();
  return y;
}

void take_gates(RecurrentArgs& a, const Tensor& gates, const std::string& name, const char* what) {
  STD_TORCH_CHECK(gates.size(0) == a.tokens, what, ": ", name, " has ", gates.size(0), " rows, mixed ",
                  a.tokens);
  a.gates = static_cast<const float*>(gates.data_ptr());
  a.gates_stride = gates.stride(0);
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

}  // namespace penstock::shim
