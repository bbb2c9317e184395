"""Matrix product over weights in rows, and what comes before and after it.

How it is computed: `linear_sums` (one tile), `linear_tiles` (which tiles), `dequantize` (codes).

The bits of a row's result are a function of that row and the matrix. K is cut into spans by the
matrix's sizes (`linear_tiles.spans_for`); a span is summed from zero, in order, and spans are added
in order. With few rows each span has a program of its own, so that a small matrix keeps all
multiprocessors busy, and a second kernel adds the spans; with many a program goes through all spans
of its tile. Either way the same numbers are added in the same order.

The scale of a group multiplies its sum in float32, never the weight in bfloat16, which would round;
that of MXFP4's or NVFP4's groups does multiply the weight: it rounds nothing there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.activation import activated, gated_by
from penstock.kernels.triton.dequantize import multipliers
from penstock.kernels.triton.launch import cdiv, early, implement, power_of_2, take_turn, wait_turn
from penstock.kernels.triton.linear_forms import Form, Matrix
from penstock.kernels.triton.linear_sums import E4M3, INT8, Operands, Sizes, span_sums
from penstock.kernels.triton.linear_tiles import ONE_SUM, PROCESSORS, span_length, tiles_for
from penstock.kernels.triton.rows import e4m3_rows, int8_rows, norm_rows

SWIZZLE: tl.constexpr = tl.constexpr(8)
"""Tiles of rows that go through the matrix together, so that both are read from the L2 cache."""


class Ends(NamedTuple):
    """What is done with sums: tensors, or None."""

    scale: Any  # [N] of a row of W without groups
    zero: Any  # [N] of int8 weights beside int8 rows, without groups
    outer: Any  # [N]
    row_scale: Any  # [T] of rows without groups
    row_sums: Any  # [T] of int8 rows, for zero points
    bias: Any  # [N], or [2·N]
    out: Any  # [T, N]


class Sums(NamedTuple):
    """Of spans, one after another: rows of gate's and behind them up's, where gated."""

    held: Any
    part_stride: int
    stride: int


@triton.jit
def _values(total, ends, features, rows):
    """Sums with what a whole row of W, or of x, is multiplied by, and the bias."""
    if ends.zero is not None:
        zero = tl.load(ends.zero + features).to(tl.int32)[:, None]
        total -= zero * tl.load(ends.row_sums + rows)[None, :]
    value = total.to(tl.float32)
    if ends.scale is not None:
        value *= multipliers(tl.load(ends.scale + features))[:, None]
    if ends.outer is not None:
        value *= tl.load(ends.outer + features)[:, None]
    if ends.row_scale is not None:
        value *= tl.load(ends.row_scale + rows)[None, :]
    if ends.bias is not None:
        value += tl.load(ends.bias + features)[:, None]
    return value


@triton.jit
def _finish(
    total, other, ends, width, features, rows, inside, out_stride, dtype: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Sums [F, R] as the operator's result, stored where `inside`; width: features of a half."""
    value = _values(total, ends, features, rows)
    if GATED:
        up = _values(other, ends, features + width, rows)
        gate = value.to(dtype).to(tl.float32)
        value = gated_by(gate, up.to(dtype).to(tl.float32), ACTIVATION)
    elif ACTIVATION:
        value = activated(value.to(dtype).to(tl.float32), ACTIVATION)
    at = ends.out + (rows.to(tl.int64) * out_stride)[None, :] + features[:, None]
    if RESIDUAL:
        before = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value = before + value.to(dtype).to(tl.float32)
    tl.store(at, value.to(ends.out.dtype.element_ty), mask=inside)


@triton.jit
def _tile(pid, count, size, F: tl.constexpr, R: tl.constexpr):
    """Features and rows of program `pid`, the first of each before them, and which rows there are;
    and which places of the tile.

    Those that there aren't repeat the last.

    Programs go through the matrix SWIZZLE tiles of rows at a time.
    """
    feature_tiles = tl.cdiv(size.features, F)
    row_tiles = tl.cdiv(count, R)
    each = SWIZZLE * feature_tiles
    first = pid // each * SWIZZLE
    height = tl.minimum(row_tiles - first, SWIZZLE)
    row_tile = first + pid % each % height
    feature_tile = pid % each // height
    features = feature_tile * F + tl.arange(0, F)
    rows = row_tile * R + tl.arange(0, R)
    there = rows < count
    inside = (features < size.features)[:, None] & there[None, :]
    features = tl.minimum(features, size.features - 1)
    rows = tl.minimum(rows, count - 1)
    return (feature_tile * F, features, row_tile * R, rows, there), inside


@triton.jit
def _at(sums, part, features, rows):
    """Where a span's sums lie."""
    first = part * sums.part_stride + rows.to(tl.int64) * sums.stride
    return sums.held + (first[None, :] + features[:, None])


@triton.jit
def _added(
    sums, width, features, rows, SPANS: tl.constexpr, GATED: tl.constexpr, F: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """The sums of all spans, one after another; width: features of a half."""
    held: tl.constexpr = tl.int32 if sums.held.dtype.element_ty == tl.int32 else tl.float32
    total = tl.zeros((F, R), held)
    other = tl.zeros((F, R), held)
    for span in tl.static_range(SPANS):
        number = tl.cast(span, tl.int64)
        part = tl.load(_at(sums, number, features, rows))
        total += part.to(total.dtype)
        if GATED:
            part = tl.load(_at(sums, number, features + width, rows))
            other += part.to(total.dtype)
    return total, other


@triton.jit(do_not_specialize=["count"])
def _linear(
    m, ends, size, sums, count, out_stride, depth, length, SPANS: tl.constexpr, APART: tl.constexpr,
    CODES: tl.constexpr, ROWS: tl.constexpr, LENGTH: tl.constexpr, FOLD: tl.constexpr,
    STEP: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr, dtype: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    F: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile of the result; or, APART, one span's sums of it. depth: K as W stores it."""
    tile, inside = _tile(tl.program_id(0), count, size, F, R)
    wait_turn()
    if APART:
        begin = tl.program_id(1) * length
        total, other = span_sums(
            m, size, tile, begin, tl.minimum(begin + length, depth), CODES, ROWS, LENGTH, FOLD,
            STEP, P, EVEN, GATED, F, R,
        )  # fmt: skip
        part = tl.program_id(1).to(tl.int64)
        tl.store(_at(sums, part, tile[1], tile[3]), total, mask=inside)
        if GATED:
            tl.store(_at(sums, part, tile[1] + size.features, tile[3]), other, mask=inside)
    else:
        if SPANS == 1:
            total, other = span_sums(
                m, size, tile, 0, depth, CODES, ROWS, LENGTH, FOLD, STEP, P, EVEN, GATED, F, R
            )
        else:
            total = tl.zeros((F, R), sums.held.dtype.element_ty)
            other = tl.zeros((F, R), sums.held.dtype.element_ty)
            for span in range(SPANS):
                begin = span * length
                part, other_part = span_sums(
                    m, size, tile, begin, tl.minimum(begin + length, depth), CODES, ROWS, LENGTH,
                    FOLD, STEP, P, EVEN, GATED, F, R,
                )  # fmt: skip
                total += part
                other += other_part
        _finish(
            total, other, ends, size.features, tile[1], tile[3], inside, out_stride, dtype,
            ACTIVATION, GATED, RESIDUAL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _join(
    ends, size, sums, count, out_stride, SPANS: tl.constexpr, dtype: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    F: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile of the result from the sums of all spans."""
    take_turn()
    tile, inside = _tile(tl.program_id(0), count, size, F, R)
    features, rows = tile[1], tile[3]
    total, other = _added(sums, size.features, features, rows, SPANS, GATED, F, R)
    _finish(
        total, other, ends, size.features, features, rows, inside, out_stride, dtype, ACTIVATION,
        GATED, RESIDUAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _row_sums(
    codes, sums, count, depth, groups, LENGTH: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr
):
    """Sums of each group of R rows of int8."""
    take_turn()
    rows, group = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R), tl.program_id(1)
    total = tl.zeros((R, BLOCK), tl.int32)
    for start in range(0, LENGTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = (at < LENGTH) & (group * LENGTH + at < depth)
        pointers = codes + (rows * depth + group * LENGTH)[:, None] + at[None, :]
        total += tl.load(pointers, mask=(rows < count)[:, None] & inside[None, :], other=0)
    tl.store(sums + rows * groups + group, tl.sum(total, 1), mask=rows < count)


DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
HALVES_APART = 16
"""Up to so many rows, gate and up are summed by programs of their own: twice as many run."""
_JOIN = (128, 16, 4)
"""Features, the most rows, and warps of a program that ends sums."""


class Rows(NamedTuple):
    """Rows as they are multiplied."""

    x: Tensor
    scale: Tensor | None
    sums: Tensor | None


def rounded(x: Tensor, matrix: Matrix, norm: Tensor | None, eps: float) -> Rows:
    """Rows of x, normalised and rounded to what the matrix meets them in."""
    if matrix.row_codes == INT8.value or matrix.rotated:
        codes, scale = int8_rows(x, norm, eps, matrix.input_scale, matrix.rotated)
        if matrix.zero is None or matrix.weight.dtype is torch.uint8:
            return Rows(codes, scale, None)
        length = matrix.depth // matrix.groups
        sums = torch.empty((x.shape[0], matrix.groups), dtype=torch.int32, device=x.device)
        _row_sums[(cdiv(x.shape[0], 16), matrix.groups)](
            codes, sums, x.shape[0], codes.shape[1], matrix.groups, LENGTH=length,
            BLOCK=min(256, power_of_2(length, 1)), R=16, **early(x.shape[0]),
        )  # fmt: skip
        return Rows(codes, scale, sums)
    if matrix.row_codes == E4M3.value:
        codes, scale = e4m3_rows(x, norm, eps, matrix.groups, matrix.depth, matrix.input_scale)
        return Rows(codes, scale, None)
    return Rows(x if norm is None else norm_rows(x, norm, eps), None, None)


def operands(rows: Rows, matrix: Matrix, form: Form) -> Operands:
    """What is read in the loop over K."""
    grouped, nibbles = form.length > 0, matrix.weight.dtype is torch.uint8
    return Operands(
        x=rows.x,
        row_scale=rows.scale if grouped and form.rows == E4M3.value else None,
        row_sums=rows.sums if grouped else None,
        weight=matrix.weight.view(torch.int16) if nibbles else matrix.weight,
        scale=matrix.scale if grouped or form.fold else None,
        zero=matrix.zero if grouped or rows.sums is None else None,
    )


def ends_of(rows: Rows, matrix: Matrix, form: Form, out: Tensor) -> Ends:
    """What is done after it."""
    whole = not (form.length or form.fold)
    return Ends(
        scale=matrix.scale if whole else None,
        zero=matrix.zero if whole and rows.sums is not None else None,
        outer=matrix.outer,
        row_scale=None if form.length and form.rows == E4M3.value else rows.scale,
        row_sums=rows.sums if whole else None,
        bias=matrix.bias,
        out=out,
    )


def multiply(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int = 0,
    residual: bool = False,
) -> None:
    """out = act(norm(x) · Wᵀ + b), or out += it."""
    count, n = out.shape
    form = matrix.form(x)
    if not count or not n:
        return
    rows = rounded(x, matrix, norm, eps)
    halves = matrix.gated and count <= HALVES_APART  # gate and up are features like others
    tiles = tiles_for(form.kind, count, n, matrix.depth, matrix.gated, halves)
    row_tiles = cdiv(count, tiles.rows)
    width = n * (2 if matrix.gated else 1)
    grid = cdiv(width if halves else n, tiles.features) * row_tiles
    apart = halves or (tiles.spans > 1 and (count <= ONE_SUM or grid < PROCESSORS))
    exact = form.rows == INT8.value and not form.length
    parts = (tiles.spans, count, width) if apart else (0, 0, width)
    held = torch.empty(parts, dtype=torch.int32 if exact else torch.float32, device=x.device)
    sums = Sums(held, held.stride(0), width)
    ends = ends_of(rows, matrix, form, out)
    read = operands(rows, matrix, form)
    size = Sizes(n, rows.x.shape[1], rows.x.stride(0), read.weight.stride(0), matrix.groups)
    after = {
        "dtype": DTYPES[x.dtype],
        "ACTIVATION": activation,
        "GATED": matrix.gated,
        "RESIDUAL": residual,
    }
    # a product and a sum aren't made one where that would depend on which kernel has them
    unfused = {"enable_fp_fusion": form.kind == "float32"}
    length = span_length(matrix.depth, tiles.spans)
    step = tiles.step(matrix.depth, length)
    _linear[(grid, tiles.spans if apart else 1)](
        read,
        ends,
        size._replace(features=width) if halves else size,
        sums,
        count,
        out.stride(0),
        matrix.depth,
        length,
        SPANS=tiles.spans,
        APART=apart,
        CODES=form.codes,
        ROWS=form.rows,
        LENGTH=form.length,
        FOLD=form.fold,
        STEP=step,
        P=form.part,
        EVEN=size.depth == matrix.depth and size.depth % step == 0,
        F=tiles.features,
        R=tiles.rows,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **{**after, "GATED": matrix.gated and not halves},
        **unfused,
        **early(count),
    )
    if apart:
        finish_sums(sums, size, ends, count, tiles.spans, after, unfused)


def finish_sums(
    sums: Sums,
    size: Sizes,
    ends: Ends,
    count: int,
    spans: int,
    after: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """Store the result of sums that lie in memory."""
    features, most, warps = _JOIN
    rows = min(most, power_of_2(count, 1))
    grid = cdiv(size.features, features) * cdiv(count, rows)
    _join[(grid,)](
        ends, size, sums, count, ends.out.stride(0), SPANS=spans, F=features, R=rows,
        num_warps=warps, **after, **options, **early(count),
    )  # fmt: skip


@implement("linear")
def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    row_codes: int = 0,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int = 0,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """`ops.linear`: W is read once for each tile of rows, activation and gate follow in registers.

    Norm, and rounding to codes, are a kernel of their own before it.
    """
    matrix = Matrix(weight, scale, zero, bias, row_codes, levels, outer, input_scale, gated)
    matrix.check(x, out_features)
    out = torch.empty((x.shape[0], out_features), dtype=out_dtype or x.dtype, device=x.device)
    multiply(x, matrix, out, norm, eps, activation)
    return out


@implement("linear_add_")
def linear_add_(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    row_codes: int = 0,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> None:
    """`ops.linear_add_`: the residual is read and written where the result is."""
    matrix = Matrix(weight, scale, zero, bias, row_codes, levels, outer, input_scale)
    matrix.check(x, residual.shape[1])
    multiply(x, matrix, residual, residual=True)
