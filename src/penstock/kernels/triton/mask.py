"""Making tokens impossible that a mask of bits leaves out."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import cdiv, implement

_BLOCK = 2048
"""Logits of a program."""


@triton.jit
def _mask(logits, rows, bits, stride, bits_stride, columns, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    words = bits + which.to(tl.int64) * bits_stride + at // 32
    allowed = (tl.load(words, mask=inside, other=0) >> (at % 32)) & 1
    place = logits + tl.load(rows + which) * stride + at
    value = tl.load(place, mask=inside, other=0.0)
    # all are written: a store whose mask differs from lane to lane isn't one of vectors
    tl.store(place, tl.where(allowed != 0, value, float("-inf")), mask=inside)


@implement("mask_")
def mask_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """`ops.mask_`: R·V·(4 + 1/8) bytes read, R·V·4 written, as the reference says."""
    count, columns = rows.shape[0], logits.shape[1]
    if count and columns:
        _mask[(count, cdiv(columns, _BLOCK))](
            logits, rows, bits, logits.stride(0), bits.stride(0), columns, BLOCK=_BLOCK
        )
