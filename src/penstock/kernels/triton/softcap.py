"""The soft cap of scores and logits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.activation import tanh
from penstock.kernels.triton.launch import cdiv, implement

_BLOCK = 2048
"""Columns of a program."""


@triton.jit
def _softcap(x, stride, columns, cap, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    place = x + tl.program_id(0).to(tl.int64) * stride + at
    value = tl.load(place, mask=inside, other=0.0)
    tl.store(place, tanh(tl.div_rn(value, cap)) * cap, mask=inside)


@implement("softcap_")
def softcap_(x: Tensor, cap: float) -> None:
    """`ops.softcap_`: read and written once."""
    rows, columns = x.shape
    if x.numel():
        _softcap[(rows, cdiv(columns, _BLOCK))](x, x.stride(0), columns, float(cap), BLOCK=_BLOCK)
