"""A gate that each token has for a whole block."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import early, implement, take_turn

_BLOCK = 1024
"""Columns at a time."""


@triton.jit
def _gate_rows(y, x, weight, y_stride, stride, columns, dim, BLOCK: tl.constexpr):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, dim, BLOCK):
        at = start + lanes
        inside = at < dim
        seen = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
        sums += seen * tl.load(weight + at, mask=inside, other=0.0)
    share = tl.sigmoid(tl.sum(sums, 0))
    for start in range(0, columns, BLOCK):
        at = start + lanes
        inside = at < columns
        place = y + row * y_stride + at
        value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (value * share).to(y.dtype.element_ty), mask=inside)


@implement("gate_rows_")
def gate_rows_(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """`ops.gate_rows_`: one program of each row, so that its sum is the same in any batch."""
    rows, columns = y.shape
    if y.numel():
        _gate_rows[(rows,)](
            y, x, weight, y.stride(0), x.stride(0), columns, x.shape[1], BLOCK=_BLOCK, **early(rows)
        )
