"""Rows of an embedding table, plain or quantized, stored in rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.triton.launch import cdiv, implement
from penstock.ops.levels import LEVELS, NF4
from penstock.ops.rows import BLOCK as HALVES

_BLOCK = 1024
"""Columns of a program."""
_BLOCK_OF_CODES: tl.constexpr = tl.constexpr(HALVES)
_NF4: tl.constexpr = tl.constexpr(LEVELS.index("nf4"))
_NF4_VALUES = tuple(torch.tensor(NF4).bfloat16().tolist())
"""As bfloat16 holds them (`ops.levels.table`)."""


@triton.jit
def _row(tokens, count):
    """The row that a program's token asks for. What isn't in the table becomes its nearest end."""
    token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    return tl.minimum(tl.maximum(token, 0), count - 1)


@triton.jit
def _scaled(value, scale, dtype: tl.constexpr, SCALES: tl.constexpr):
    """value rounded to `dtype`, and where it is scaled, once more."""
    value = value.to(dtype)
    if SCALES:
        value = (value.to(tl.float32) * scale).to(dtype)
    return value


@triton.jit
def _plain(tokens, weight, y, count, stride, dim, scale, SCALES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(weight + _row(tokens, count) * stride + at, mask=at < dim, other=0.0)
    if SCALES:
        value = (value.to(tl.float32) * scale).to(y.dtype.element_ty)
    tl.store(y + tl.program_id(0).to(tl.int64) * dim + at, value, mask=at < dim)


@triton.jit
def _level(code, LEVEL: tl.constexpr, TABLE: tl.constexpr):
    """What a code of four bits stands for among NF4's or E2M1's levels."""
    if LEVEL == _NF4:
        value = tl.zeros(code.shape, tl.float32)
        for i in tl.static_range(16):
            value = tl.where(code == i, TABLE[i], value)
        return value
    exponent, fraction = (code >> 1) & 3, (code & 1).to(tl.float32)
    power = (exponent + 126 << 23).to(tl.float32, bitcast=True)  # 2^(exponent − 1)
    value = tl.where(exponent == 0, 0.5 * fraction, power * (1.0 + 0.5 * fraction))
    return tl.where(code > 7, -value, value)


@triton.jit
def _factor(scale, row, at, inside, groups, padded: tl.constexpr):
    """The scale of each of a row's columns, in float32."""
    held = tl.load(scale + row * groups + at // (padded // groups), mask=inside, other=0.0)
    if scale.dtype.element_ty == tl.uint8:  # powers of two; none at zero
        return (held.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return held.to(tl.float32)


@triton.jit
def _quantized(
    tokens,
    weight,
    weight_scale,
    zero,
    outer,
    y,
    count,
    dim,
    scale,
    padded: tl.constexpr,
    groups: tl.constexpr,
    zero_groups: tl.constexpr,
    LEVEL: tl.constexpr,
    TABLE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, inside = _row(tokens, count), at < dim
    if weight.dtype.element_ty == tl.uint8:
        quarter: tl.constexpr = _BLOCK_OF_CODES // 4
        part = at // quarter % 4
        byte = at // _BLOCK_OF_CODES * (2 * quarter) + at % quarter * 2 + part // 2
        code = tl.load(weight + row * (padded // 2) + byte, mask=inside, other=0).to(tl.int32)
        code = (code >> (part % 2 * 4)) & 15
        value = code.to(tl.float32)
        if LEVEL > 0:
            value = _level(code, LEVEL, TABLE)
    else:
        value = tl.load(weight + row * padded + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_ZERO:
        point = zero + row * zero_groups + at // (padded // zero_groups)
        value -= tl.load(point, mask=inside, other=0).to(tl.float32)
    elif weight.dtype.element_ty == tl.uint8 and LEVEL == 0:
        value -= 8.0
    value *= _factor(weight_scale, row, at, inside, groups, padded)
    if HAS_OUTER:
        value *= tl.load(outer + row)
    place = y + tl.program_id(0).to(tl.int64) * dim + at
    tl.store(place, _scaled(value, scale, y.dtype.element_ty, SCALES), mask=inside)


@implement("embedding")
def embedding(
    tokens: Tensor,
    weight: Tensor,
    dim: int,
    scale: float = 1.0,
    weight_scale: Tensor | None = None,
    zero: Tensor | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
) -> Tensor:
    """`ops.embedding` of rows. A program gives 1024 columns of one token.

    A token outside of the table reads its first or its last row: nothing here can say so.
    """
    if weight.dim() != 2:
        raise KernelError(
            f"embedding reads rows [V, D], this table has the shape {list(weight.shape)}, of "
            f"panels. Store it with quant.formats.storage.ROWS."
        )
    count, dtype = tokens.shape[0], weight.dtype if weight_scale is None else torch.bfloat16
    y = torch.empty((count, dim), dtype=dtype, device=weight.device)
    if not count:
        return y
    grid = (count, cdiv(dim, _BLOCK))
    table, scales = weight.shape[0], scale != 1.0
    if weight_scale is None:
        stride = weight.stride(0)
        _plain[grid](tokens, weight, y, table, stride, dim, scale, SCALES=scales, BLOCK=_BLOCK)
        return y
    _quantized[grid](
        tokens,
        weight,
        weight_scale,
        zero,
        outer,
        y,
        table,
        dim,
        scale,
        weight.shape[1] * (2 if weight.dtype is torch.uint8 else 1),
        weight_scale.shape[1],
        1 if zero is None else zero.shape[1],
        LEVEL=levels,
        TABLE=_NF4_VALUES,
        HAS_ZERO=zero is not None,
        HAS_OUTER=outer is not None,
        SCALES=scales,
        BLOCK=_BLOCK,
    )
    return y
