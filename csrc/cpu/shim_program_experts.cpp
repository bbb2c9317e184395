// Mixtures of experts, made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace {

using namespace penstock;
using namespace penstock::shim;

int64_t program_experts(int64_t id, int64_t x, const Tensor& router, Optional router_bias,
                        const Tensor& up, Optional up_scale, Optional up_zero, Optional up_outer,
                        Optional up_input_scale, Optional up_bias, const Tensor& down,
                        Optional down_scale, Optional down_zero, Optional down_outer,
                        Optional down_input_scale, Optional down_bias, int64_t k, bool normalize,
                        int64_t intermediate, int64_t out_features, int64_t activation,
                        int64_t up_row_codes, int64_t up_levels, int64_t down_row_codes,
                        int64_t down_levels, Optional correction, bool sigmoid, int64_t groups,
                        int64_t top_groups, double scale, Optional meeting, Optional up_bounds,
                        Optional down_bounds, Optional expert_bounds, int64_t rank,
                        double eps, bool gated, std::optional<int64_t> asked, Optional each) {
  const auto p = held(id);
  const ExpertsArgs a = experts_args(
      p->form(x), p->form(asked ? *asked : x), router, router_bias,
      {up, up_scale, up_zero, up_outer, up_input_scale, up_bias, up_row_codes, up_levels},
      {down, down_scale, down_zero, down_outer, down_input_scale, down_bias, down_row_codes,
       down_levels},
      {k, normalize, correction, sigmoid, groups, top_groups, scale, eps, each}, intermediate, out_features,
      activation, gated, {meeting, up_bounds, down_bounds, expert_bounds, rank});
  p->keep_all(router, router_bias, up, up_scale, up_zero, up_outer, up_input_scale, up_bias, down,
              down_scale, down_zero, down_outer, down_input_scale, down_bias,
              correction, meeting, up_bounds, down_bounds, expert_bounds, each);
  const int64_t y = p->result({p->form(x).dtype, columns_of(a)}, x);
  if (asked) {
    check_asked(p->form(*asked), p->form(x));
    p->check_like(*asked, x, "experts: asked");
  }
  p->program.add({a, static_cast<int>(x), static_cast<int>(y), Ids::tokens,
                  asked ? static_cast<int>(*asked) : -1});
  return y;
}

void program_gate_rows_(int64_t id, int64_t y, int64_t x, const Tensor& weight) {
  const auto p = held(id);
  p->check_like(y, x, "gate_rows_");
  p->keep_all(weight);
  p->add(gate_rows_args(p->form(y), p->form(x), weight), x, y);
}

// Of the last run, all layers together.
int64_t program_experts_used(int64_t id) { return held(id)->program.experts_used(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_experts(int program, int x, Tensor router, Tensor? router_bias, Tensor up, "
      "Tensor? up_scale, Tensor? up_zero, Tensor? up_outer, Tensor? up_input_scale, "
      "Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_zero, Tensor? down_outer, "
      "Tensor? down_input_scale, Tensor? down_bias, int k, bool normalize, int intermediate, "
      "int out_features, int activation, int up_row_codes, int up_levels, int down_row_codes, "
      "int down_levels, Tensor? correction, bool sigmoid, int groups, int top_groups, "
      "float scale, Tensor? meeting=None, Tensor? up_bounds=None, Tensor? down_bounds=None, "
      "Tensor? expert_bounds=None, int rank=0, float eps=1e-20, bool gated=True, int? asked=None, "
      "Tensor? each=None) -> int");
  m.def("program_gate_rows_(int program, int y, int x, Tensor weight) -> ()");
  m.def("program_experts_used(int program) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_experts", TORCH_BOX(&program_experts));
  m.impl("program_gate_rows_", TORCH_BOX(&program_gate_rows_));
  m.impl("program_experts_used", TORCH_BOX(&program_experts_used));
}
