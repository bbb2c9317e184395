"""What `linear` does to rows before they are multiplied: the norm, and rounding to eight bits.

Not operators of their own. One program takes a row, which is read once: it is normalised and
rounded to its own dtype, as `ops.rms_norm` has it, and then to codes, as `ops.linear` has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import early, power_of_2, take_turn
from penstock.kernels.triton.norm import rms_norm, rms_scaled, warps, whole_vectors
from penstock.kernels.triton.rounding import is_number, magnitude, round_even
from penstock.ops.panels import round_up
from penstock.ops.rotate import ROTATED

_LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
"""The largest float32 that is finite."""


def norm_rows(x: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """x [T, K] normalised by `norm` [K], or as it is."""
    return x if norm is None else rms_norm(x, norm, eps)


@triton.jit
def _row(x, norm, start, at, eps, dim: tl.constexpr, HAS_NORM: tl.constexpr):
    """The values of a row at `at`, zero from dim on: float32, but rounded to their own dtype."""
    inside = at < dim
    value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        by = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        value = rms_scaled(value, by, dim, eps).to(x.dtype.element_ty).to(tl.float32)
    return value


@triton.jit
def _unless_bad(scale, top):
    """scale, or NaN where the largest magnitude isn't finite."""
    return tl.where(top <= _LARGEST, scale, float("nan"))


@triton.jit
def _rotated(value, D: tl.constexpr):
    """Blocks of 64 of D values: `ops.rotate`, in its order."""
    for _ in tl.static_range(6):  # each puts the bit that parts neighbours before the others
        even, odd = tl.split(value.reshape(D // 2, 2))
        mixed = tl.join(even + odd, even - odd)
        value = mixed.reshape(D // 64, 32, 2).permute(0, 2, 1).reshape(D)
    return value * 0.125


@triton.jit(do_not_specialize=["stride"])
def _int8_rows(
    x,
    norm,
    input_scale,
    codes,
    scales,
    stride,
    eps,
    dim: tl.constexpr,
    width: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STATIC: tl.constexpr,
    ROTATED: tl.constexpr,
    VECTOR: tl.constexpr,
    D: tl.constexpr,
):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, D)
    start = tl.multiple_of(row * stride, VECTOR)
    value = _row(x, norm, start, at, eps, dim, HAS_NORM)
    if ROTATED:
        value = _rotated(value, D)
    top = tl.max(magnitude(value)).to(tl.float32, bitcast=True)
    if STATIC:
        scale = tl.load(input_scale).to(tl.float32)
        q = tl.div_rn(value, scale)
        scale = _unless_bad(scale, top)
    else:
        scale = tl.div_rn(top, 127.0)
        some = top > 1e-30
        q = value * tl.where(some, tl.div_rn(127.0, tl.where(some, top, 1.0)), 0.0)
    q = tl.where(is_number(q), tl.minimum(tl.maximum(q, -127.0), 127.0), 0.0)
    tl.store(codes + row * width + at, round_even(q).to(tl.int8), mask=at < width)
    tl.store(scales + row, scale)


def int8_rows(
    x: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    input_scale: Tensor | None = None,
    rotated: bool = False,
) -> tuple[Tensor, Tensor]:
    """`ops.linear.quantize_rows` of x [T, K], normalised first where there is a norm.

    Returns codes [T, K] int8 and their scales [T, 1] float32; rotated (`ops.rotate`), K is rounded
    up to whole blocks.
    """
    rows, dim = x.shape
    width = round_up(dim, ROTATED) if rotated else dim
    codes = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        x, vector = whole_vectors(x)
        tile = power_of_2(width)
        _int8_rows[(rows,)](
            x,
            norm,
            input_scale,
            codes,
            scales,
            x.stride(0),
            eps,
            dim,
            width,
            HAS_NORM=norm is not None,
            STATIC=input_scale is not None,
            ROTATED=rotated,
            VECTOR=vector,
            D=tile,
            num_warps=warps(tile),
            **early(rows),
        )
    return codes, scales


@triton.jit(do_not_specialize=["stride"])
def _e4m3_rows(
    x,
    norm,
    input_scale,
    codes,
    scales,
    stride,
    eps,
    dim: tl.constexpr,
    padded: tl.constexpr,
    groups: tl.constexpr,
    HAS_NORM: tl.constexpr,
    STATIC: tl.constexpr,
    VECTOR: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    each: tl.constexpr = padded // groups
    at = tl.arange(0, G * S)
    if groups > 1 and each != S:  # a tile has more room than a group
        at = tl.where(at % S < each, at // S * each + at % S, padded)
    start = tl.multiple_of(row * stride, VECTOR)
    value = tl.reshape(_row(x, norm, start, at, eps, dim, HAS_NORM), (G, S))
    top = tl.max(magnitude(value), 1).to(tl.float32, bitcast=True)
    if STATIC:
        scale = tl.zeros((G,), tl.float32) + tl.load(input_scale).to(tl.float32)
    else:
        scale = tl.where(top > 1e-30, tl.div_rn(top, 448.0), 1.0)
    q = tl.div_rn(value, scale[:, None])
    q = tl.where(is_number(q), tl.minimum(tl.maximum(q, -448.0), 448.0), float("nan"))
    code = tl.reshape(q.to(tl.float8e4nv), (G * S,))
    tl.store(codes + row * padded + at, code, mask=at < padded)
    group = tl.arange(0, G)
    tl.store(scales + row * groups + group, _unless_bad(scale, top), mask=group < groups)


def e4m3_rows(
    x: Tensor,
    norm: Tensor | None,
    eps: float,
    groups: int,
    padded: int,
    input_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.linear.quantize_rows_e4m3` of x [T, K], normalised first where there is a norm.

    Returns codes [T, padded] in E4M3, zeros from K on, and their scales [T, groups] float32.
    """
    rows, dim = x.shape
    codes = torch.empty((rows, padded), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        x, vector = whole_vectors(x)
        count, each = power_of_2(groups, 1), power_of_2(padded // groups)
        _e4m3_rows[(rows,)](
            x,
            norm,
            input_scale,
            codes,
            scales,
            x.stride(0),
            eps,
            dim,
            padded,
            groups,
            HAS_NORM=norm is not None,
            STATIC=input_scale is not None,
            VECTOR=vector,
            G=count,
            S=each,
            num_warps=warps(count * each),
            **early(rows),
        )
    return codes, scales
