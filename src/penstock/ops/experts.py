"""A mixture of experts as one operator: router, the experts that it chooses, and their sum."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.grouped_linear import combine, grouped_linear
from penstock.ops.linear import linear
from penstock.ops.ranks import gather_columns
from penstock.ops.registry import define_op
from penstock.ops.route import route, sort_tokens


def _fake(
    x: Tensor,
    router: Tensor,
    router_bias: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    up_zero: Tensor | None,
    up_outer: Tensor | None,
    up_input_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_zero: Tensor | None,
    down_outer: Tensor | None,
    down_input_scale: Tensor | None,
    down_bias: Tensor | None,
    k: int,
    normalize: bool,
    intermediate: int,
    out_features: int,
    activation: int,
    up_row_codes: int = 0,
    up_levels: int = 0,
    down_row_codes: int = 0,
    down_levels: int = 0,
    correction: Tensor | None = None,
    sigmoid: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    meeting: Tensor | None = None,
    up_bounds: Tensor | None = None,
    down_bounds: Tensor | None = None,
    expert_bounds: Tensor | None = None,
    rank: int = 0,
    eps: float = 1e-20,
    gated: bool = True,
    asked: Tensor | None = None,
    each: Tensor | None = None,
) -> Tensor:
    columns = out_features if down_bounds is None else int(down_bounds[-1])
    return x.new_empty((x.shape[0], columns))


@define_op(
    "experts(Tensor x, Tensor router, Tensor? router_bias, Tensor up, Tensor? up_scale, "
    "Tensor? up_zero, Tensor? up_outer, Tensor? up_input_scale, Tensor? up_bias, Tensor down, "
    "Tensor? down_scale, Tensor? down_zero, Tensor? down_outer, Tensor? down_input_scale, "
    "Tensor? down_bias, int k, bool normalize, SymInt intermediate, SymInt out_features, "
    "int activation, int up_row_codes=0, int up_levels=0, int down_row_codes=0, "
    "int down_levels=0, Tensor? correction=None, bool sigmoid=False, int groups=1, "
    "int top_groups=1, float scale=1.0, Tensor(a!)? meeting=None, Tensor? up_bounds=None, "
    "Tensor? down_bounds=None, Tensor? expert_bounds=None, int rank=0, "
    "float eps=1e-20, bool gated=True, Tensor? asked=None, Tensor? each=None) -> Tensor",
    fake=_fake,
)
def experts(
    x: Tensor,
    router: Tensor,
    router_bias: Tensor | None,
    up: Tensor,
    up_scale: Tensor | None,
    up_zero: Tensor | None,
    up_outer: Tensor | None,
    up_input_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_zero: Tensor | None,
    down_outer: Tensor | None,
    down_input_scale: Tensor | None,
    down_bias: Tensor | None,
    k: int,
    normalize: bool,
    intermediate: int,
    out_features: int,
    activation: int,
    up_row_codes: int = 0,
    up_levels: int = 0,
    down_row_codes: int = 0,
    down_levels: int = 0,
    correction: Tensor | None = None,
    sigmoid: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    meeting: Tensor | None = None,
    up_bounds: Tensor | None = None,
    down_bounds: Tensor | None = None,
    expert_bounds: Tensor | None = None,
    rank: int = 0,
    eps: float = 1e-20,
    gated: bool = True,
    asked: Tensor | None = None,
    each: Tensor | None = None,
) -> Tensor:
    """out[t] = Σⱼ w[t, j] · down[e] · (act(gate[e] · x[t]) ∘ (up[e] · x[t])), e = chosen[t, j].

    x [T, K], rows may be strided; router: of x.dtype, a dense weight of `linear` [E, K]; up: gate
    above up, [2·I, K], and down [N, I] of E experts, each tensor of a format with E first (`ops.
    grouped_linear`); biases float32 [E], [E, 2·I] and [E, N]. Returns [T, N] in x.dtype.
    The k experts of a token and their weights w are `route`'s of the router's products in float32,
    chosen and weighed as its last arguments say. asked: rows of x.dtype that the
    router reads in x's place; they may have another width.
    What lies between two products is rounded to x.dtype; the sum is taken in float32, in the order
    of j, and rounded once. A token's bits depend on no other token. gated=False: up is [I, K] of
    each, and act(up[e] · x[t]) lies between.
    Where ranks share a mixture (`ops.ranks`), `meeting` and `rank` are this process's, and the
    result is all ranks'. up_bounds and down_bounds [R + 1] int32: its matrices are its columns, of
    gate, up and down, in all experts, of intermediate and out_features so many; what lies between
    both and the result are put together. expert_bounds: it has whole experts, those of its bounds,
    and products are put together before they are summed.
    Cost: T·k·(4·I·K + 2·N·I) operations and the router's; the bytes of the experts that any token
    chose, read once; memory-bound for few tokens an expert.
    Raises RuntimeError for a k beyond 1 to E or what groups hold, and for banks that don't fit
    together.
    Source: Shazeer et al. 2017, arXiv:1701.06538; Jiang et al. 2024, arXiv:2401.04088 (Mixtral).
    """
    count = up.shape[0] if expert_bounds is None else int(expert_bounds[-1])
    read = x if asked is None else asked
    logits = linear(read, router, None, None, router_bias, count, out_dtype=torch.float32)
    weights, chosen = route(
        logits, k, normalize, correction, sigmoid, groups, top_groups, scale, eps, each
    )
    rows, starts, places = sort_tokens(chosen, count)
    ends = starts
    if expert_bounds is not None:  # rows of its own experts
        ends = starts[int(expert_bounds[rank]) : int(expert_bounds[rank + 1]) + 1]
        rows, ends = rows[int(ends[0]) : int(ends[-1])], ends - ends[0]
    hidden = grouped_linear(
        x, up, up_scale, up_zero, up_bias, rows, ends, intermediate, up_row_codes, activation,
        gated, None, up_levels, up_outer, up_input_scale,
    )  # fmt: skip
    if meeting is not None and up_bounds is not None:
        hidden = gather_columns(hidden, meeting, up_bounds, rank)
    y = grouped_linear(
        hidden, down, down_scale, down_zero, down_bias, None, ends, out_features,
        down_row_codes, 0, False, None, down_levels, down_outer, down_input_scale,
    )  # fmt: skip
    if meeting is not None and expert_bounds is not None:
        y = gather_columns(y.t(), meeting, starts[expert_bounds.long()], rank).t()
    out = combine(y, places, weights)
    if meeting is None or down_bounds is None:
        return out
    return gather_columns(out, meeting, down_bounds, rank)
