"""Products of a mixture of experts: each row with its own expert's matrix, and their sum by token.

A layer of experts is `route` and `sort_tokens` (`ops.route`), then

    hidden = grouped_linear(x, gate_up, …, rows, starts, …, gated=True)
    y = combine(grouped_linear(hidden, down, …, None, starts, …), places, weights)

No expert has a capacity and no token is dropped: each expert multiplies as many rows as chose it.
Sources: Shazeer et al. 2017, arXiv:1701.06538 (the layer); Fedus et al. 2021, arXiv:2101.03961
(Switch), Zoph et al. 2022, arXiv:2202.08906 (ST-MoE): capacities, which this does without, as
Gale et al. 2022, arXiv:2211.15841 (MegaBlocks), showed; Jiang et al. 2024, arXiv:2401.04088
(Mixtral).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from penstock.ops.linear import linear
from penstock.ops.registry import define_op, op


def check_groups(x: Tensor, weight: Tensor, rows: Tensor | None, starts: Tensor) -> None:
    """Refuse what doesn't fit together, by shapes and dtypes alone."""
    if starts.dtype is not torch.int32 or starts.shape != (weight.shape[0] + 1,):
        raise RuntimeError(
            f"grouped_linear: starts must be int32 [{weight.shape[0] + 1}], one more than the "
            f"weight's experts, not {starts.dtype} {list(starts.shape)}"
        )
    if rows is not None and (rows.dtype is not torch.int32 or rows.dim() != 1):
        raise RuntimeError(
            f"grouped_linear: rows must be int32 [R], not {rows.dtype} {list(rows.shape)}"
        )
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise RuntimeError(
            f"grouped_linear: x must be [T, K] with whole rows, not {list(x.shape)} "
            f"with strides {x.stride()}"
        )


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    rows: Tensor | None,
    starts: Tensor,
    out_features: int,
    row_codes: int = 0,
    activation: int = 0,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    count = x.shape[0] if rows is None else rows.shape[0]
    return x.new_empty((count, out_features), dtype=out_dtype or x.dtype)


@define_op(
    "grouped_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, "
    "Tensor? rows, Tensor starts, SymInt out_features, int row_codes=0, int activation=0, "
    "bool gated=False, ScalarType? out_dtype=None, int levels=0, Tensor? outer=None, "
    "Tensor? input_scale=None) -> Tensor",
    fake=_fake,
)
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    rows: Tensor | None,
    starts: Tensor,
    out_features: int,
    row_codes: int = 0,
    activation: int = 0,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """y[r] = act(x[rows[r]] · W[e]ᵀ + b[e]) for starts[e] ≤ r < starts[e + 1].

    x [T, K], rows may be strided; weight, scale, zero, bias, outer, input_scale: of `linear`, of E
    experts one after the other, each in its panels or its rows ([E, 2·N, K] of dense ones in rows
    where gated). rows [R] int32: which row of x a product takes; None: product r takes row r.
    starts [E + 1] int32, from 0, never falling, at most R. The rest is as in `linear`. Returns
    [R, out_features]; products from starts[E] on, which belong to no expert, are 0.
    A row's bits depend on its expert's matrix alone, not on other rows, or on how many of them went
    where.
    Here experts that have rows run one by one through `linear`, natively where weights are panels;
    that reads `starts`, which a GPU would be waited for.
    Cost: 2·R·K·N operations; the bytes of the experts that have rows, read once; memory-bound for
    few rows an expert.
    Source: Gale et al. 2022, arXiv:2211.15841; above.
    """
    check_groups(x, weight, rows, starts)
    count = x.shape[0] if rows is None else rows.shape[0]
    y = x.new_zeros((count, out_features), dtype=out_dtype or x.dtype)
    product = op("linear").reference if weight.dim() == 3 else linear  # rows have no native one
    ends = starts.tolist()
    if ends[0] or ends[-1] > count or ends != sorted(ends):
        raise RuntimeError(
            f"grouped_linear: starts must go from 0 up to at most {count} products, not {ends}"
        )
    for e, (start, end) in enumerate(pairwise(ends)):
        if start == end:
            continue
        taken = x[start:end] if rows is None else x[rows[start:end].long()]
        parts = (None if t is None else t[e] for t in (scale, zero, bias, outer, input_scale))
        of_scale, of_zero, of_bias, of_outer, of_input = parts
        y[start:end] = product(
            taken, weight[e], of_scale, of_zero, of_bias, out_features, row_codes, None, 0.0,
            activation, gated, out_dtype, levels, of_outer, of_input,
        )  # fmt: skip
    return y


def check_places(y: Tensor, places: Tensor, weights: Tensor) -> None:
    """Refuse what doesn't fit together, by shapes and dtypes alone."""
    if places.dtype is not torch.int32 or weights.dtype is not torch.float32:
        raise RuntimeError(
            f"combine: places must be int32 and weights float32, not {places.dtype} and "
            f"{weights.dtype}"
        )
    if y.dim() != 2 or places.dim() != 2 or places.shape != weights.shape:
        raise RuntimeError(
            f"combine: y [R, N], places and weights [T, k] don't fit: {list(y.shape)}, "
            f"{list(places.shape)}, {list(weights.shape)}"
        )


def _fake_combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty((places.shape[0], y.shape[1]))


@define_op("combine(Tensor y, Tensor places, Tensor weights) -> Tensor", fake=_fake_combine)
def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """out[t] = Σⱼ weights[t, j] · y[places[t, j]], added in order of j in float32, rounded once.

    y [R, N], rows may be strided; places [T, k] int32, below R: where the products of a token are,
    negative: nowhere, nothing is added; weights [T, k] float32. Returns [T, N] in y.dtype.
    Rows of y at no place are never read.
    Cost: (k + 1)·T·N·itemsize bytes moved; memory-bound.
    """
    check_places(y, places, weights)
    total = torch.zeros((places.shape[0], y.shape[1]), dtype=torch.float32, device=y.device)
    if not y.shape[0]:
        return total.to(y.dtype)
    for at, weight in zip(places.long().unbind(1), weights.unbind(1), strict=True):
        value = y[at.clamp(min=0)].float() * weight[:, None]
        total += torch.where(at[:, None] >= 0, value, 0.0)
    return total.to(y.dtype)
