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
    nibbles,
    repeated,
    widen_bytes,
    widen_integers,
    widen_levels,
)
from penstock.kernels.triton.launch import INTERPRETED

FLOATS: tl.constexpr = tl.constexpr(0)
INT8: tl.constexpr = tl.constexpr(1)
E4M3: tl.constexpr = tl.constexpr(2)
"""What rows of x hold: `ops.linear.ROW_CODES`."""

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
    table: Any  # [16] float32 of levels


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
    if ROWS == INT8:
        return tl.dot(w, x, total, out_dtype=tl.int32)
    if INTERPRETED:  # which multiplies nothing below float32
        return total + tl.dot(w.to(tl.float32), x.to(tl.float32), input_precision="ieee")
    if ROWS == E4M3:
        return tl.dot(w, x, total, max_num_imprecise_acc=PROMOTED)
    return tl.dot(w, x, total, input_precision="ieee")


@triton.jit
def _group_added(total, sums, m, size, features, rows, k, LENGTH: tl.constexpr, ROWS: tl.constexpr):
    """fma(sum over the group that k lies in, its scale, total)."""
    group = k // LENGTH
    scale = multipliers(tl.load(m.scale + features * size.groups + group))[:, None]
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
    """Zero points [F] of the group that k lies in."""
    group = 0 if LENGTH == 0 else k // LENGTH
    return tl.load(m.zero + features * size.groups + group)


@triton.jit
def _half(codes, m, size, features, k, HIGH: tl.constexpr, LENGTH: tl.constexpr, FOLD: tl.constexpr,
          dtype: tl.constexpr):  # fmt: skip
    """The low or the high nibbles of codes [F, P], whose first is at k, as operands."""
    code = nibbles(codes, HIGH)
    if m.table is None:
        if m.zero is None:
            return widen_integers(code, 8, dtype)
        return widen_integers(code, _zero(m, size, features, k, LENGTH)[:, None], dtype)
    value = widen_levels(code, m.table, dtype)
    if FOLD == 0:
        return value
    COUNT: tl.constexpr = codes.shape[1] // FOLD
    at = features[:, None] * size.groups + k // FOLD + tl.arange(0, COUNT)[None, :]
    scale = exact(multipliers(tl.load(m.scale + at)), dtype)
    return value * repeated(scale, COUNT, FOLD)


@triton.jit
def _columns(m, size, rows, k, P: tl.constexpr, EVEN: tl.constexpr):
    """x^T [P, R] from k on."""
    at = k + tl.arange(0, P)
    pointers = m.x + rows[None, :] * size.x_stride + at[:, None]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=at[:, None] < size.depth, other=0.0)


@triton.jit
def _bytes_step(
    total, m, size, features, rows, x, k, CODES: tl.constexpr, ROWS: tl.constexpr,
    LENGTH: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """total with the products of P values from k on, a value of W in one element."""
    at = k + tl.arange(0, P)
    pointers = m.weight + features[:, None] * size.weight_stride + at[None, :]
    if CODES == DENSE and not EVEN:
        w = tl.load(pointers, mask=at[None, :] < size.depth, other=0.0)
    else:
        w = tl.load(pointers)
    if ROWS == FLOATS and CODES == BYTES:
        if m.zero is None:
            w = exact(w, x.dtype)
        else:
            w = widen_bytes(w, _zero(m, size, features, k, LENGTH)[:, None], x.dtype)
    if LENGTH == 0:
        return product(w, x, total, ROWS)
    sums = product(w, x, tl.zeros(total.shape, tl.int32 if ROWS == INT8 else tl.float32), ROWS)
    return _group_added(total, sums, m, size, features, rows, k, LENGTH, ROWS)


@triton.jit
def _nibbles_step(
    total, m, size, features, rows, low, high, k, ROWS: tl.constexpr,
    LENGTH: tl.constexpr, FOLD: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """total with the products of P values from k on and of P from k + 64 on: a byte has both."""
    dtype: tl.constexpr = low.dtype
    at = k // 128 * 64 + k % 128 + tl.arange(0, P)
    codes = tl.load(m.weight + features[:, None] * size.weight_stride + at[None, :])
    first = _half(codes, m, size, features, k, False, LENGTH, FOLD, dtype)
    second = _half(codes, m, size, features, k + 64, True, LENGTH, FOLD, dtype)
    if LENGTH == 0:
        return product(second, high, product(first, low, total, ROWS), ROWS)
    sums = product(first, low, tl.zeros(total.shape, tl.int32 if ROWS == INT8 else tl.float32), ROWS)
    if LENGTH > 64:
        sums = product(second, high, sums, ROWS)
        return _group_added(total, sums, m, size, features, rows, k, LENGTH, ROWS)
    total = _group_added(total, sums, m, size, features, rows, k, LENGTH, ROWS)
    sums = product(second, high, tl.zeros(total.shape, sums.dtype), ROWS)
    return _group_added(total, sums, m, size, features, rows, k + 64, LENGTH, ROWS)


@triton.jit
def span_sums(
    m, size, features, rows, begin, end, CODES: tl.constexpr, ROWS: tl.constexpr,
    LENGTH: tl.constexpr, FOLD: tl.constexpr, STEP: tl.constexpr, P: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, F: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sums [F, R] from `begin` to `end`, and those of the other half, where gated.

    A step is STEP values of K: 64 or 32 floats, or 128 codes; P of them share a scale or more.
    """
    dtype: tl.constexpr = tl.int32 if ROWS == INT8 and LENGTH == 0 else tl.float32
    total = tl.zeros((F, R), dtype)
    other = tl.zeros((F, R), dtype)
    ups = features + size.features
    for k in tl.range(begin, end, STEP):
        if CODES <= BYTES:
            for i in tl.static_range(STEP // P):
                at = k + i * P
                x = _columns(m, size, rows, at, P, EVEN)
                total = _bytes_step(
                    total, m, size, features, rows, x, at, CODES, ROWS, LENGTH, P, EVEN
                )
                if GATED:
                    other = _bytes_step(
                        other, m, size, ups, rows, x, at, CODES, ROWS, LENGTH, P, EVEN
                    )
        else:
            for i in tl.static_range(STEP // (2 * P)):
                at = k + i * P
                low = _columns(m, size, rows, at, P, EVEN)
                high = _columns(m, size, rows, at + 64, P, EVEN)
                total = _nibbles_step(
                    total, m, size, features, rows, low, high, at, ROWS, LENGTH, FOLD, P
                )
                if GATED:
                    other = _nibbles_step(
                        other, m, size, ups, rows, low, high, at, ROWS, LENGTH, FOLD, P
                    )
    return total, other
