"""Activation and gate, where no product takes them along: one pass over the rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.activation import activated, gated_by
from penstock.kernels.triton.launch import cdiv, early, implement, take_turn
from penstock.ops.panels import COLUMNS, round_up

_BLOCK = 1024
"""Columns of a program."""
_COLUMNS: tl.constexpr = tl.constexpr(COLUMNS)


@triton.jit
def _gate(
    x,
    y,
    stride,
    columns,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    x += row * stride
    if GATED:
        first = at // _COLUMNS * (2 * _COLUMNS) + at % _COLUMNS
        gate = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x + first + _COLUMNS, mask=inside, other=0.0).to(tl.float32)
        value = gated_by(gate, up, ACTIVATION)
    else:
        value = activated(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(y + row * columns + at, value.to(y.dtype.element_ty), mask=inside)


@implement("gate")
def gate(
    x: Tensor,
    activation: int,
    gated: bool,
    out_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`ops.gate`: 16 columns of gate and of up are two vectors each, read once."""
    rows = x.shape[0]
    y = torch.empty((rows, out_features), dtype=out_dtype or x.dtype, device=x.device)
    if rows:
        _gate[(rows, cdiv(out_features, _BLOCK))](
            x,
            y,
            x.stride(0),
            out_features,
            ACTIVATION=activation,
            GATED=gated,
            BLOCK=_BLOCK,
            enable_fp_fusion=x.dtype is torch.float32,  # as in the products that end with it
            **early(rows),
        )
    return y


@triton.jit
def _alternate(bias, y, half, total, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = at // (2 * _COLUMNS) * _COLUMNS + at % _COLUMNS
    from_up = at // _COLUMNS % 2
    value = tl.load(bias + from_up * half + column, mask=(at < total) & (column < half), other=0.0)
    tl.store(y + at, value, mask=at < total)


@implement("alternate")
def alternate(bias: Tensor) -> Tensor:
    """`ops.alternate`: a gather."""
    half = bias.shape[0] // 2
    total = 2 * round_up(half, COLUMNS)
    y = torch.empty((total,), dtype=bias.dtype, device=bias.device)
    if total:
        _alternate[(cdiv(total, _BLOCK),)](bias, y, half, total, BLOCK=_BLOCK)
    return y
