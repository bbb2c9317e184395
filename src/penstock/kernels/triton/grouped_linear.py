"""Products with the experts that rows chose, and their sums by token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.activation import activated, gated_by
from penstock.kernels.triton.launch import cdiv, dot, implement, power_of_2
from penstock.ops.grouped_linear import check_groups, check_places
from penstock.ops.rows import BLOCK

GROUP: tl.constexpr = tl.constexpr(8)
"""Tiles of rows that run side by side, so that what one reads of an expert serves all from L2."""

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Weights of one byte, all of which 16 bits hold exactly."""


@triton.jit
def _tile_of(pid, tiles, features):
    """Which tile of rows and of features a program has: GROUP tiles of rows, then on along N."""
    first = pid // (GROUP * features) * GROUP
    height = tl.minimum(tiles - first, GROUP)
    within = pid % (GROUP * features)
    return first + within % height, within // height


@triton.jit
def _rows_of(starts, tile, count, experts, E: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr):
    """A tile's expert (`experts`: none), first row and the end of its expert's rows.

    Expert e's tiles are starts[e] // ROWS + e and on: as many as it can need, and a number that
    takes no sum over the experts before it. With EACH they are its products' own numbers, of which
    every ROWS-th is one. A tile without rows begins at their end or beyond.
    """
    at = tl.arange(0, E)
    begin = tl.load(starts + at, mask=at <= experts, other=0)
    first = begin if EACH else begin // ROWS + at
    expert = tl.sum(((first <= tile) & (at <= experts)).to(tl.int32), axis=0) - 1
    start = tl.load(starts + expert)
    end = tl.load(starts + expert + 1, mask=expert < experts, other=0)
    end = tl.where(expert < experts, end, count)
    if EACH:
        row = tl.where((tile - start) % ROWS == 0, tile, end)
    else:
        row = start + (tile - start // ROWS - expert) * ROWS
    return expert, row, end


@triton.jit
def _part(at, k, depth, like, EVEN: tl.constexpr, axis: tl.constexpr, STEP: tl.constexpr):
    """What lies at `at` as values of dtype `like`; zeros from K = depth on."""
    if EVEN:
        part = tl.load(at)
    else:
        inside = tl.expand_dims(k + tl.arange(0, STEP) < depth, axis)
        part = tl.load(at, mask=inside, other=0.0)
    return part.to(like)


@triton.jit
def _finish(total, scale, bias, at, inside, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sums [N, R], scaled and with their bias."""
    if HAS_SCALE:
        total *= tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + at, mask=inside, other=0.0)[:, None]
    return total


@triton.jit
def _grouped_linear(
    x, weight, scale, bias, rows, starts, y,
    count, experts, features, depth, tiles, width,
    stride_x, stride_expert, stride_weight,
    E: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, STEP: tl.constexpr,
    EACH: tl.constexpr, EVEN: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    tile, feature = _tile_of(tl.program_id(0), tiles, width)
    expert, row, end = _rows_of(starts, tile, count, experts, E, ROWS, EACH)
    if row < end:
        like = x.dtype.element_ty
        r = row + tl.arange(0, ROWS)
        source = tl.minimum(r, end - 1)
        if HAS_ROWS:
            source = tl.load(rows + source)
        n = feature * FEATURES + tl.arange(0, FEATURES)
        k = tl.arange(0, STEP)
        own = tl.minimum(expert, experts - 1).to(tl.int64)
        stored = own * (2 * features if GATED else features)
        x_at = x + source.to(tl.int64)[None, :] * stride_x + k[:, None]
        some = tl.minimum(n, features - 1).to(tl.int64)[:, None]
        w_at = weight + own * stride_expert + some * stride_weight + k[None, :]
        u_at = weight + own * stride_expert + (some + features) * stride_weight + k[None, :]
        total = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
        second = tl.zeros((FEATURES, ROWS), dtype=tl.float32)
        WHOLE: tl.constexpr = EVEN or HAS_SCALE  # codes are padded
        for i in range(0, tl.where(expert < experts, depth, 0), STEP):
            each = _part(x_at + i, i, depth, like, EVEN, 1, STEP)
            total = dot(_part(w_at + i, i, depth, like, WHOLE, 0, STEP), each, total)
            if GATED:
                second = dot(_part(u_at + i, i, depth, like, WHOLE, 0, STEP), each, second)
        inside = n < features
        total = _finish(total, scale, bias, stored + n, inside, HAS_SCALE, HAS_BIAS)
        if GATED:
            at = stored + features + n
            second = _finish(second, scale, bias, at, inside, HAS_SCALE, HAS_BIAS)
            gate = total.to(like).to(tl.float32)
            total = gated_by(gate, second.to(like).to(tl.float32), ACTIVATION)
        elif ACTIVATION:
            total = activated(total.to(like).to(tl.float32), ACTIVATION)
        total = tl.where(expert < experts, total, 0.0)
        y_at = y + r.to(tl.int64)[None, :] * features + n[:, None]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=inside[:, None] & (r < end)[None, :])


def _refuse(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    features: int,
    others: Mapping[str, object],
) -> None:
    """Refuse the formats that there is no code for here, and sides that don't fit."""
    given = [name for name, value in others.items() if isinstance(value, Tensor) or value]
    if given or weight.dim() != 3 or weight.dtype not in (x.dtype, *CODES):
        raise RuntimeError(
            f"grouped_linear: on a GPU experts are [E, N, K] in {x.dtype}, int8 or float8, not "
            f"{weight.dtype} {list(weight.shape)}" + (f" with {', '.join(given)}" if given else "")
        )
    coded = weight.dtype is not x.dtype
    if coded != (scale is not None) or (scale is not None and scale.shape[2] != 1):
        found = None if scale is None else list(scale.shape)
        raise RuntimeError(
            f"grouped_linear: experts of one byte have a scale a row, [E, N, 1], and others none; "
            f"{weight.dtype} came with {found}"
        )
    depth, (count, width) = x.shape[1], weight.shape[1:]
    fits = depth <= width and width % BLOCK == 0 if coded else depth == width
    if not fits or count != features:
        raise RuntimeError(
            f"grouped_linear: experts of {features} rows for K = {depth} don't have the shape "
            f"{list(weight.shape)}" + f", whose K is a multiple of {BLOCK}" * coded
        )
    whole = all(t is None or t.is_contiguous() for t in (scale, bias))
    if weight.stride(2) != 1 or not whole or (bias is not None and bias.dtype != torch.float32):
        raise RuntimeError(
            "grouped_linear: rows of the weight, scale and float32 bias must be contiguous"
        )


def tiles_of(x: Tensor, weight: Tensor, count: int, gated: bool) -> dict[str, int]:
    """The sides of tiles, and what else is compiled in.

    Features are the first side of every product, at least 64 of them, so that tiles of 16 rows
    run on Hopper's matrix units as those of 128 do. STEP, which sums are split by, follows from
    K and the dtypes alone; only the other sides follow the mean number of rows of an expert.
    """
    experts, _, width = weight.shape
    wide = x.dtype is torch.float32  # sums of vectors, not of matrix units
    rows = min(32 if wide else 128, power_of_2(-(-count // experts)))
    stages = 2 if wide else 3 if rows == 128 else 4 if weight.dtype is x.dtype else 6
    return {
        "E": power_of_2(experts + 1),
        "ROWS": rows,
        "FEATURES": 128 if rows == 128 and not gated else 64,
        "STEP": min(power_of_2(width), 32 if wide else 64),
        "EACH": count <= count // rows + experts + 1,
        "num_warps": 8 if rows == 128 else 4,
        "num_stages": stages,
    }


@implement("grouped_linear")
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    rows: Tensor | None,
    starts: Tensor,
    out_features: int,
    row_codes: int = 0,
    activation: int = 0,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """`ops.grouped_linear`: a program a tile of rows and features, which finds its own expert.

    The grid has as many tiles as any shares of the rows can need; those without rows end at once.
    An expert's weight is read once for each tile of up to 128 of its rows.
    """
    check_groups(x, weight, rows, starts)
    others = {"zero": zero, "row_codes": row_codes, "levels": levels, "outer": outer}
    features = 2 * out_features if gated else out_features
    _refuse(x, weight, scale, bias, features, others | {"input_scale": input_scale})
    count, depth = (x if rows is None else rows).shape[0], x.shape[1]
    y = torch.empty((count, out_features), dtype=out_dtype or x.dtype, device=x.device)
    if not count:
        return y
    sides = tiles_of(x, weight, count, gated)
    experts = weight.shape[0]
    tiles = count if sides["EACH"] else count // sides["ROWS"] + experts + 1
    width = cdiv(out_features, sides["FEATURES"])
    _grouped_linear[(tiles * width,)](
        x, weight, scale, bias, rows, starts, y,
        count, experts, out_features, depth, tiles, width,
        x.stride(0), weight.stride(0), weight.stride(1),
        EVEN=depth % sides["STEP"] == 0, HAS_ROWS=rows is not None, HAS_SCALE=scale is not None,
        HAS_BIAS=bias is not None, GATED=gated, ACTIVATION=activation, **sides,
    )  # fmt: skip
    return y


@triton.jit
def _combine(y, places, weights, out, features, stride, K: tl.constexpr, FEATURES: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = n < features
    total = tl.zeros((FEATURES,), dtype=tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j).to(tl.int64)
        weight = tl.load(weights + token * K + j)
        value = tl.load(y + place * stride + n, mask=inside & (place >= 0), other=0.0)
        total = tl.where(place >= 0, tl.fma(value.to(tl.float32), weight, total), total)
    tl.store(out + token * features + n, total.to(out.dtype.element_ty), mask=inside)


@implement("combine")
def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """`ops.combine`: a program a token and up to 1024 features, all loads under way at once."""
    check_places(y, places, weights)
    (tokens, k), features = places.shape, y.shape[1]
    out = torch.empty((tokens, features), dtype=y.dtype, device=y.device)
    if tokens:
        side = min(1024, power_of_2(features))
        _combine[(tokens, cdiv(features, side))](
            y, places.contiguous(), weights.contiguous(), out, features, y.stride(0),
            K=k, FEATURES=side,
        )  # fmt: skip
    return out
