// Mixtures of experts, bound to torch.
#include <algorithm>

#include "shim.h"

namespace penstock::shim {
namespace {

// Of a tensor of E experts, the first one's.
Tensor first(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.dim() > 1 && t.size(0) == count && t.is_contiguous(), "experts: ", what,
                  " must be contiguous and of ", count, " experts");
  return torch::stable::select(t, 0, 0);
}

Optional first(const Optional& t, int64_t count, const char* what) {
  return t ? Optional(first(*t, count, what)) : std::nullopt;
}

int64_t pitch_of(const Optional& t, int64_t count) {
  return t ? t->numel() / count * static_cast<int64_t>(t->element_size()) : 0;
}

LinearArgs first_matrix(Form x, const ExpertMatrices& m, int64_t count, int64_t n, bool gated,
                        Pitch& pitch) {
  LinearArgs a = linear_args(x, first(m.weight, count, "weight"), first(m.scale, count, "scale"),
                             first(m.zero, count, "zero"), first(m.bias, count, "bias"), n,
                             m.row_codes, gated,
                             m.levels, first(m.outer, count, "outer"),
                             first(m.input_scale, count, "input_scale"));
  pitch.weight = pitch_of(m.weight, count);
  pitch.scale = pitch_of(m.outer ? m.outer : m.scale, count);
  pitch.zero = pitch_of(m.zero, count);
  pitch.bias = pitch_of(m.bias, count);
  pitch.fine = m.outer ? pitch_of(m.scale, count) : 0;
  return a;
}

SharedExperts shared_of(const SharedBy& by, const ExpertsArgs& a) {
  SharedExperts s = {};
  if (!by.meeting) return s;
  STD_TORCH_CHECK(by.expert_bounds ? !by.up_bounds && !by.down_bounds : by.up_bounds && by.down_bounds,
                  "experts: ranks share columns of both matrices, or experts");
  const Tensor& bounds = by.expert_bounds ? *by.expert_bounds : *by.up_bounds;
  s.at = meeting_of(*by.meeting, by.rank, bounds.numel() - 1);
  const auto own = [&](const int32_t* of) { return of[by.rank + 1] - of[by.rank]; };
  if (by.expert_bounds) {
    s.experts = bounds_of(bounds);
  } else {
    STD_TORCH_CHECK(by.down_bounds->numel() == bounds.numel(), "experts: bounds of other ranks");
    s.up = bounds_of(bounds);
    s.down = bounds_of(*by.down_bounds);
    STD_TORCH_CHECK(own(s.up) == a.up.n && own(s.down) == a.down.n, "experts: rank ", by.rank, " has ",
                    own(s.up), " and ", own(s.down), " columns, its matrices ", a.up.n, " and ",
                    a.down.n);
  }
  const int64_t wide = s.up ? std::max<int64_t>(a.by.k * s.up[s.at.size], s.down[s.at.size])
                            : a.by.k * a.down.n;
  check_room(s.at, wide * (a.up.dtype == DType::bf16 ? 2 : 4));
  return s;
}

}  // namespace

void check_asked(Form asked, Form x) {
  STD_TORCH_CHECK(asked.dtype == x.dtype, "experts: what the router reads has the dtype of x");
}

int64_t columns_of(const ExpertsArgs& a) {
  return a.shared.down ? a.shared.down[a.shared.at.size] : a.down.n;
}

ExpertsArgs experts_args(Form x, Form asked, const Tensor& router, const Optional& router_bias,
                         const ExpertMatrices& up, const ExpertMatrices& down, const Router& by,
                         int64_t intermediate, int64_t out_features, int64_t activation,
                         bool gated, const SharedBy& shared) {
  ExpertsArgs a = {};
  const int64_t own = up.weight.size(0);
  a.count = own;
  if (shared.meeting && shared.expert_bounds) {
    const Tensor& bounds = *shared.expert_bounds;
    const int32_t* ends = bounds_of(bounds);
    STD_TORCH_CHECK(shared.rank >= 0 && shared.rank + 1 < bounds.numel() &&
                        ends[shared.rank + 1] - ends[shared.rank] == own,
                    "experts: rank ", shared.rank, " has matrices of ", own, " experts");
    a.count = ends[bounds.numel() - 1];
  }
  STD_TORCH_CHECK(a.count > 0 && by.k >= 1 && by.k <= a.count, "experts: ", by.k,
                  " experts a token can't be chosen of ", a.count,
                  "; k must be from 1 to their number");
  STD_TORCH_CHECK(by.groups >= 1 && a.count % by.groups == 0 && by.top_groups >= 1 &&
                      by.top_groups <= by.groups &&
                      by.k <= a.count / by.groups * by.top_groups,
                  "experts: ", by.k, " experts a token can't be chosen from ", by.top_groups,
                  " of ", by.groups, " groups of ", a.count, " experts");
  a.by = {by.k, by.normalize, floats(by.correction, a.count, "experts: correction"), by.sigmoid,
          by.groups, by.top_groups, static_cast<float>(by.scale), static_cast<float>(by.eps),
          floats(by.each, a.count, "experts: each")};
  a.router = linear_args(asked, router, {}, {}, router_bias, a.count, 0, false, 0, {}, {});
  a.router.out_dtype = DType::f32;
  a.up = first_matrix(x, up, own, intermediate, gated, a.up_pitch);
  with_norm_and_activation(a.up, {}, 0.0, activation);
  int64_t hidden = intermediate;
  if (shared.meeting && shared.up_bounds)
    hidden = bounds_of(*shared.up_bounds)[shared.up_bounds->numel() - 1];
  a.down = first_matrix({x.dtype, hidden}, down, own, out_features, false, a.down_pitch);
  a.shared = shared_of(shared, a);
  return a;
}

Tensor experts(const Tensor& x, const Tensor& router, Optional router_bias, const Tensor& up,
               Optional up_scale, Optional up_zero, Optional up_outer, Optional up_input_scale,
               Optional up_bias, const Tensor& down, Optional down_scale, Optional down_zero,
               Optional down_outer, Optional down_input_scale, Optional down_bias,
               int64_t k, bool normalize, int64_t intermediate,
               int64_t out_features, int64_t activation, int64_t up_row_codes, int64_t up_levels,
               int64_t down_row_codes, int64_t down_levels, Optional correction, bool sigmoid,
               int64_t groups, int64_t top_groups, double scale, Optional meeting,
               Optional up_bounds, Optional down_bounds, Optional expert_bounds, int64_t rank,
               double eps, bool gated, Optional asked, Optional each) {
  ExpertsArgs a = experts_args(
      form_of(x, "experts: x"),
      asked ? form_of(*asked, "experts: asked") : form_of(x, "experts: x"), router, router_bias,
      {up, up_scale, up_zero, up_outer, up_input_scale, up_bias, up_row_codes, up_levels},
      {down, down_scale, down_zero, down_outer, down_input_scale, down_bias, down_row_codes,
       down_levels},
      {k, normalize, correction, sigmoid, groups, top_groups, scale, eps, each}, intermediate, out_features,
      activation, gated, {meeting, up_bounds, down_bounds, expert_bounds, rank});
  Tensor y = torch::stable::new_empty(x, {x.size(0), columns_of(a)});
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.rows = x.size(0);
  if (asked) {
    check_asked(form_of(*asked, "experts: asked"), form_of(x, "experts: x"));
    STD_TORCH_CHECK(asked->size(0) == a.rows, "experts: asked has ", asked->size(0), " rows, x ", a.rows);
    a.asked = asked->data_ptr();
    a.asked_stride = asked->stride(0);
  }
  a.y = y.data_ptr();
  a.y_stride = columns_of(a);
  a.threads = threads();
  experts(a);
  return y;
}

}  // namespace penstock::shim
