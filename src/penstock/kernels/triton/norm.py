"""Normalisation of rows, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import early, implement, power_of_2, take_turn


def whole_vectors(x: Tensor) -> tuple[Tensor, int]:
    """x, and what its rows' starts are a multiple of: a vector's elements, or 1.

    How a row is loaded may decide which thread holds what of it, and so the order of its sum. Its
    width alone decides on that: rows that could begin on 16 bytes but don't are copied.
    """
    vector = 16 // x.itemsize
    if x.shape[1] % vector:
        return x, 1
    if x.data_ptr() % 16 or (x.shape[0] > 1 and x.stride(0) % vector):
        x = x.clone(memory_format=torch.contiguous_format)
    return x, vector


def warps(tile: int) -> int:
    """Warps for a row of `tile` elements: two vector loads of bfloat16 a thread, at most 16."""
    return min(max(tile // 512, 1), 16)


@triton.jit
def rms_scaled(value, weight, dim: tl.constexpr, eps):
    """value / sqrt(mean(value²) + eps) · weight; beyond dim, value is zero."""
    mean = tl.div_rn(tl.sum(value * value), dim * 1.0)
    return value * tl.div_rn(1.0, tl.sqrt_rn(mean + eps)) * weight


@triton.jit(do_not_specialize=["stride"])
def _rms_norm(x, weight, y, stride, eps, dim: tl.constexpr, VECTOR: tl.constexpr, D: tl.constexpr):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, D)
    inside = at < dim
    start = tl.multiple_of(row * stride, VECTOR)
    value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scaled = rms_scaled(value, by, dim, eps)
    tl.store(y + row * dim + at, scaled.to(y.dtype.element_ty), mask=inside)


@implement("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`ops.rms_norm`: a row is read once and stays in registers."""
    rows, dim = x.shape
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    if rows:
        x, vector = whole_vectors(x)
        tile = power_of_2(dim)
        _rms_norm[(rows,)](
            x,
            weight,
            y,
            x.stride(0),
            eps,
            dim,
            VECTOR=vector,
            D=tile,
            num_warps=warps(tile),
            **early(rows),
        )
    return y


@triton.jit(do_not_specialize=["stride"])
def _layer_norm(
    x,
    weight,
    bias,
    y,
    stride,
    eps,
    dim: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    VECTOR: tl.constexpr,
    D: tl.constexpr,
):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, D)
    inside = at < dim
    start = tl.multiple_of(row * stride, VECTOR)
    value = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float32)
    by = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(value), dim * 1.0)
    centred = tl.where(inside, value - mean, 0.0)
    scaled = rms_scaled(centred, by, dim, eps)
    if HAS_BIAS:
        scaled += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * dim + at, scaled.to(y.dtype.element_ty), mask=inside)


@implement("layer_norm")
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """`ops.layer_norm`: both passes run over registers."""
    rows, dim = x.shape
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    if rows:
        x, vector = whole_vectors(x)
        tile = power_of_2(dim)
        _layer_norm[(rows,)](
            x,
            weight,
            bias,
            y,
            x.stride(0),
            eps,
            dim,
            HAS_BIAS=bias is not None,
            VECTOR=vector,
            D=tile,
            num_warps=warps(tile),
            **early(rows),
        )
    return y
