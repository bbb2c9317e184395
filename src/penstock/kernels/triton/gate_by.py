"""A gate for each value of a block."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import cdiv, early, implement, take_turn

_BLOCK = 1024
"""Columns of a program."""


@triton.jit
def _gate_by(y, x, y_stride, stride, columns, BLOCK: tl.constexpr):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    place = y + row * y_stride + at
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (value * tl.sigmoid(gate)).to(y.dtype.element_ty), mask=inside)


@implement("gate_by_")
def gate_by_(y: Tensor, x: Tensor) -> None:
    """`ops.gate_by_`: each value by itself."""
    rows, columns = y.shape
    if y.numel():
        _gate_by[(rows, cdiv(columns, _BLOCK))](
            y, x, y.stride(0), x.stride(0), columns, BLOCK=_BLOCK, **early(rows)
        )
