"""Sums of products along K, for one tile of `linear`.

Features of the matrix are the first side of a tile and rows of x the second: out^T = W · x^T. So
weights go from the registers that they are widened in straight into the product, and a tile fits
one row as well as 256: Hopper's matrix units want 64 of the first side and any number of the
second. What a row's sum is depends on neither side of the tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from penstock.kernels.triton.dequantize import (
    BYTES,
    DENSE,
    exact,
    multipliers,
    repeated,
    widen_bytes,
    widen_nibbles,
)
from penstock.kernels.triton.launch import INTERPRETED

FLOATS: tl.constexpr = tl.constexpr(0)
INT8: tl.constexpr = tl.constexpr(1)
E4M3: tl.constexpr = tl.constexpr(2)
"""What rows of x hold: `ops.linear.ROW_CODES`."""

FEW: tl.constexpr = tl.constexpr(16)
"""Rows of the least tile: for one row its 16 would be read from L2 a quarter as often as W is."""

WORDS: tl.constexpr = tl.constexpr(32)
"""Of 16 bits, that hold 128 codes of four (`ops.rows`)."""

PROMOTED: tl.constexpr = tl.constexpr(128)
"""Hopper sums products of E4M3 in fewer bits than float32 has: after so many values of K, what was
summed is added to a float32 (DeepSeek-V3, arXiv:2412.19437, 3.3.2)."""


class Operands(NamedTuple):
    """What is read: tensors, or None."""

    x: Any  # [T, K], floats or codes
    row_scale: Any  # [T, G or 1] of codes
    row_sums: Any  # [T, G] of int8 codes beside int8 weights with zero points
    weight: Any
    scale: Any
    zero: Any


class Sizes(NamedTuple):
    """Elements from row to row, and ends."""

    features: int  # of a half, where gated
    depth: int  # K of x
    x_stride: int
    weight_stride: int
    groups: int


@triton.jit
def product(w, x, total, ROWS: tl.constexpr):
    """total + w · x: int32 of int8, else float32."""
    if INTERPRETED:  # which multiplies nothing below float32; that holds the sums of 128 products
        part = tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
        total += part.to(total.dtype)
    elif ROWS == INT8:
        total = tl.dot(w, x, total, out_dtype=tl.int32)
    elif ROWS == E4M3:
        total = tl.dot(w, x, total, max_num_imprecise_acc=PROMOTED)
    else:
        total = tl.dot(w, x, total, input_precision="ieee")
    return total


@triton.jit
def _none(total, ROWS: tl.constexpr):
    """Zeros that a group is summed from."""
    return tl.zeros(total.shape, tl.int32 if ROWS == INT8 else tl.float32)


@triton.jit
def _multiplier(m, size, features, k, LENGTH: tl.constexpr):
    """The scales [F] of the group that k lies in, read before what they multiply is there."""
    return multipliers(tl.load(m.scale + features * size.groups + k // LENGTH))


@triton.jit
def _group_added(
    total, sums, scale, m, size, features, rows, k, LENGTH: tl.constexpr, ROWS: tl.constexpr
):
    """fma(sum over the group that k lies in, its scale, total)."""
    group = k // LENGTH
    scale = scale[:, None]
    if ROWS == INT8:
        if m.row_sums is not None:
            zero = tl.load(m.zero + features * size.groups + group).to(tl.int32)
            sums -= zero[:, None] * tl.load(m.row_sums + rows * size.groups + group)[None, :]
        sums = sums.to(tl.float32)
    if ROWS == E4M3:
        scale = scale * tl.load(m.row_scale + rows * size.groups + group)[None, :]
    return tl.fma(sums, tl.broadcast_to(scale, total.shape), total)


@triton.jit
def _zero(m, size, features, k, LENGTH: tl.constexpr):
    """Zero points [F, 1] of the group that k lies in; 0 where there are none."""
    if m.zero is None:
        zero = 0
    else:
        group = 0 if LENGTH == 0 else k // LENGTH
        zero = tl.load(m.zero + features * size.groups + group)[:, None]
    return zero


@triton.jit
def _quarter(
    words, m, size, features, k, PART: tl.constexpr, CODES: tl.constexpr, LENGTH: tl.constexpr,
    FOLD: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """One code of each word [F, WORDS], whose first is at k, as operands."""
    zero = _zero(m, size, features, k, LENGTH)
    value = widen_nibbles(words, zero, m.zero is not None, CODES, PART, dtype)
    if FOLD:
        COUNT: tl.constexpr = words.shape[1] // FOLD
        at = features[:, None] * size.groups + k // FOLD + tl.arange(0, COUNT)[None, :]
        value *= repeated(exact(multipliers(tl.load(m.scale + at)), dtype), COUNT, FOLD)
    return value


@triton.jit
def _codes(m, size, first, features, k, P: tl.constexpr, EVEN: tl.constexpr):
    """W [F, P] from element k on of each row.

    Offsets are of 32 bits, from the tile's first row: of 64 they would take twice the registers.
    """
    at = tl.arange(0, P)
    offsets = (features - first) * size.weight_stride
    pointers = m.weight + (first.to(tl.int64) * size.weight_stride + k)
    pointers += offsets[:, None] + at[None, :]
    if EVEN:
        w = tl.load(pointers)
    else:
        w = tl.load(pointers, mask=(k + at)[None, :] < size.depth, other=0.0)
    return w


@triton.jit
def _columns(m, size, tile, k, P: tl.constexpr, EVEN: tl.constexpr):
    """x^T [P, R] from k on; where a tile is mostly empty, what it lacks isn't read but is zero."""
    at = tl.arange(0, P)
    _, _, first, rows, there = tile
    offsets = (rows - first) * size.x_stride
    pointers = m.x + (first.to(tl.int64) * size.x_stride + k)
    pointers += offsets[None, :] + at[:, None]
    if EVEN and rows.shape[0] > FEW:
        x = tl.load(pointers)
    elif EVEN:
        x = tl.load(pointers, mask=tl.broadcast_to(there[None, :], pointers.shape), other=0.0)
    else:
        x = tl.load(pointers, mask=(k + at)[:, None] < size.depth, other=0.0)
    return x


@triton.jit
def _bytes_step(
    total, m, size, first, features, rows, x, k, CODES: tl.constexpr, ROWS: tl.constexpr,
    LENGTH: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """total with the products of P values from k on, a value of W in one element."""
    w = _codes(m, size, first, features, k, P, CODES != DENSE or EVEN)
    if ROWS == FLOATS and CODES == BYTES:
        zero = _zero(m, size, features, k, LENGTH)
        w = widen_bytes(w, zero, m.zero is not None, x.dtype)
    if LENGTH == 0:
        total = product(w, x, total, ROWS)
    else:
        scale = _multiplier(m, size, features, k, LENGTH)
        sums = product(w, x, _none(total, ROWS), ROWS)
        total = _group_added(total, sums, scale, m, size, features, rows, k, LENGTH, ROWS)
    return total


@triton.jit
def _nibbles_step(
    total, m, size, first, features, rows, x, k, CODES: tl.constexpr, ROWS: tl.constexpr,
    LENGTH: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    """total with the products of 128 values from k on, whose codes lie in the same WORDS words; x:
    its four parts.

    A step is summed from zero even where no scale asks for it: were sums of several products handed
    on from step to step, the matrix units would wait for each (ptxas' C7515).
    """
    dtype: tl.constexpr = x[0].dtype
    words = _codes(m, size, first, features, tl.multiple_of(k // 4, WORDS), WORDS, True)
    TOGETHER: tl.constexpr = 4 if LENGTH == 0 or LENGTH >= 4 * WORDS else LENGTH // WORDS
    for begin in tl.static_range(0, 4, TOGETHER):
        at = k + begin * WORDS
        if LENGTH > 0:
            scale = _multiplier(m, size, features, at, LENGTH)
        sums = _none(total, ROWS)
        for i in tl.static_range(TOGETHER):
            w = _quarter(
                words, m, size, features, at + i * WORDS, begin + i, CODES, LENGTH, FOLD, dtype
            )
            sums = product(w, x[begin + i], sums, ROWS)
        if LENGTH > 0:
            total = _group_added(total, sums, scale, m, size, features, rows, at, LENGTH, ROWS)
        else:
            total += sums
    return total


@triton.jit
def span_sums(
    m, size, tile, begin, end, CODES: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr,
    FOLD: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, F: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sums [F, R] from `begin` to `end`, and those of the other half, where gated.

    A step is STEP values of K: 64 or 32 floats, or 128 codes; P of them share a scale or more.
    """
    first, features, _, rows, _ = tile
    ups = features + size.features
    dtype: tl.constexpr = tl.int32 if ROWS == INT8 and LENGTH == 0 else tl.float32
    total = tl.zeros((F, R), dtype)
    other = tl.zeros((F, R), dtype)
    for k in tl.range(begin, end, STEP):
        if CODES <= BYTES:
            for i in tl.static_range(STEP // P):
                at = k + i * P
                x = _columns(m, size, tile, at, P, EVEN)
                total = _bytes_step(
                    total, m, size, first, features, rows, x, at, CODES, ROWS, LENGTH, P, EVEN
                )
                if GATED:
                    other = _bytes_step(
                        other, m, size, first + size.features, ups, rows, x, at, CODES, ROWS,
                        LENGTH, P, EVEN,
                    )  # fmt: skip
        else:
            for i in tl.static_range(STEP // (4 * WORDS)):
                at = tl.multiple_of(k, STEP) + i * 4 * WORDS
                x = (
                    _columns(m, size, tile, at, WORDS, EVEN),
                    _columns(m, size, tile, at + WORDS, WORDS, EVEN),
                    _columns(m, size, tile, at + 2 * WORDS, WORDS, EVEN),
                    _columns(m, size, tile, at + 3 * WORDS, WORDS, EVEN),
                )
                total = _nibbles_step(
                    total, m, size, first, features, rows, x, at, CODES, ROWS, LENGTH, FOLD
                )
                if GATED:
                    other = _nibbles_step(
                        other, m, size, first + size.features, ups, rows, x, at, CODES, ROWS,
                        LENGTH, FOLD,
                    )  # fmt: skip
    return total, other
