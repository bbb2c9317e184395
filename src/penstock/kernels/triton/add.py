"""Addition to the residual stream, where no product takes it along."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import cdiv, early, implement, take_turn

_BLOCK = 1024
"""Columns of a program."""


@triton.jit
def _add(residual, x, residual_stride, stride, columns, BLOCK: tl.constexpr):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    place = residual + row * residual_stride + at
    before = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    more = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, (before + more).to(residual.dtype.element_ty), mask=inside)


@implement("add_")
def add_(residual: Tensor, x: Tensor) -> None:
    """`ops.add_`: summed in float32 and rounded once."""
    rows, columns = residual.shape
    if residual.numel():
        _add[(rows, cdiv(columns, _BLOCK))](
            residual, x, residual.stride(0), x.stride(0), columns, BLOCK=_BLOCK, **early(rows)
        )
