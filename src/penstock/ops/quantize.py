"""Rounding of weights to int8 and int4, straight to packed panels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.panels import (
    BYTE_BLOCK,
    COLUMNS,
    alternate,
    pack_groups,
    pack_int4,
    pack_int8,
    round_up,
)
from penstock.ops.registry import define_op

GROUPS = (32, 64, 128)
"""How many values may share a scale of int4."""

INT4_PARTS = (8.0, 8.5, 7.5, 9.0)
"""What the largest value of a group is divided by for its scale; the kernel has the same."""

LEAST_HALF = 2.0**-24
"""The smallest float16 above zero."""
LEAST_ROW = 2.0**-100
"""Rows of int8 without a larger magnitude are zero: float32 has no normal scale much below it."""


def _check(weight: Tensor, group: int, gated: bool) -> None:
    if group not in (0, *GROUPS):
        raise RuntimeError(f"quantize_int4: group {group} isn't 32, 64 or 128")
    if gated and weight.shape[0] % 2:
        raise RuntimeError(
            f"quantize: a weight with a gate has two halves, this one {weight.shape[0]} rows"
        )


def _shape(weight: Tensor, group: int, gated: bool) -> tuple[int, int]:
    """Panels, and K as it is stored."""
    n, k = weight.shape
    count = 2 * round_up(n // 2, COLUMNS) if gated else round_up(n, COLUMNS)
    return count // COLUMNS, round_up(k, max(BYTE_BLOCK, group))


def _fake_int8(weight: Tensor, gated: bool = False) -> tuple[Tensor, Tensor]:
    panels, k = _shape(weight, 0, gated)
    return (
        weight.new_empty((panels, k // 4, COLUMNS, 4), dtype=torch.int8),
        weight.new_empty((panels, 1, COLUMNS), dtype=torch.float32),
    )


def _fake_int4(
    weight: Tensor, group: int, symmetric: bool, gated: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    panels, k = _shape(weight, group, gated)
    groups = (panels, k // group, COLUMNS)
    return (
        weight.new_empty((panels, k // 8, COLUMNS, 4), dtype=torch.uint8),
        weight.new_empty(groups, dtype=torch.float16),
        weight.new_empty((0, *groups[1:]) if symmetric else groups, dtype=torch.uint8),
    )


def _padded(weight: Tensor, group: int) -> Tensor:
    n, k = weight.shape
    size = (0, round_up(k, max(BYTE_BLOCK, group)) - k, 0, -n % COLUMNS)
    return functional.pad(weight.float(), size)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    w = _padded(weight, 0)
    top = w.abs().amax(-1, keepdim=True)
    scale = torch.where(top < LEAST_ROW, 1.0, top / 127.0)
    scale = torch.where(top.isfinite(), scale, torch.nan)
    q = torch.round(w * (torch.ones_like(scale) / scale))
    return pack_int8(q.nan_to_num().to(torch.int8), w.shape[1]), pack_groups(scale)


@define_op("quantize_int8(Tensor weight, bool gated=False) -> (Tensor, Tensor)", fake=_fake_int8)
def quantize_int8(weight: Tensor, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Round to int8, with one scale for each row: max|w| / 127.

    weight [N, K] float32, bfloat16 or float16, rows may be strided; gated: gate above up, [2·N, K],
    whose panels alternate. Returns panels [N/16, K/4, 16, 4] int8 in ±127 and scale [N/16, 1, 16]
    float32 (`ops.linear`). N and K are padded with zeros.

    q = round(w · (1 / scale)), in float32, half to even. A row of less than 2⁻¹⁰⁰ is zero, its
    scale 1; one with a NaN or an infinity has the scale NaN, and its values mean nothing.
    Cost: the weight's bytes (16 rows twice, from cache) and N·K bytes written.
    Source: Jacob et al. 2017, arXiv:1712.05877.
    """
    _check(weight, 0, gated)
    if not gated:
        return _int8(weight)
    gate, up = (_int8(half) for half in weight.chunk(2))
    return alternate(gate[0], up[0]), alternate(gate[1], up[1])


def _int4(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    w = _padded(weight, group).unflatten(1, (-1, group))
    low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        scale, q = _least_error(w, low, high)
        zero = torch.empty((0, w.shape[1], COLUMNS), dtype=torch.uint8)
    else:
        scale = ((high - low) / 15.0).clamp(min=LEAST_HALF).to(torch.float16).float()
        inverse = torch.ones_like(scale) / scale
        offset = torch.round(-low * inverse).clamp_(max=15)
        q = torch.round(w * inverse).add_(offset).clamp_(0, 15)
        scale = torch.where((high - low).isfinite(), scale, torch.nan)
        zero = pack_groups(offset[..., 0].nan_to_num().to(torch.uint8))
    codes = q.nan_to_num().flatten(1).to(torch.uint8)
    return pack_int4(codes, codes.shape[1]), pack_groups(scale[..., 0].to(torch.float16)), zero


@define_op(
    "quantize_int4(Tensor weight, int group, bool symmetric, bool gated=False)"
    " -> (Tensor, Tensor, Tensor)",
    fake=_fake_int4,
)
def quantize_int4(
    weight: Tensor, group: int, symmetric: bool, gated: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Round to int4, with a float16 scale for each `group` values of K.

    weight, gated as in `quantize_int8`; group 32, 64 or 128. Returns panels [N/16, K/8, 16, 4]
    uint8, scale [N/16, G, 16] float16 and zero [N/16, G, 16] uint8, which is [0, G, 16] (each 8)
    where symmetric: W ≈ (q − zero) · scale (`ops.linear`).

    All in float32, rounding half to even; low ≤ 0 ≤ high are the ends of a group.
    Symmetric: −8 stands near the end of larger magnitude, so the scale has the other sign: −end / c
    for c in INT4_PARTS, in float16 and not nearer to 0 than 2⁻²⁴. q − 8 = u = w · (1 / scale),
    rounded within −8 … 7. Of the four scales the one with the least Σ(u − q)² · scale² is taken,
    the first of equals; the sum runs over 16 lanes that fold in halves.
    Else: scale = (high − low) / 15 in float16, at least 2⁻²⁴; zero = round(−low · (1 / scale));
    q = round(w · (1 / scale)) + zero within 0 … 15.
    A NaN, an infinity or a scale beyond float16 make their group's scale NaN or infinite; its
    values mean nothing then.

    On the first embedded model (5.5 M), group 32, symmetric (squared error of the weights over
    their squares; KL of next tokens from bfloat16's on 6,000 tokens of held-out stories, w4a16):
        max|w| / 7                  0.0098   0.0347
        max|w| / 7.5                0.0094   0.0303
        end / −8 (llama.cpp's Q4_0) 0.0077   0.0272
        these four                  0.0071   0.0223
        24 from 6 to 11.75          0.0069   0.0209
    Cost: the weight's bytes, and a quarter of bfloat16's written; about 30 operations a value.
    Source: Dettmers & Zettlemoyer 2022, arXiv:2212.09720; scales by search: Lin et al. 2023,
    arXiv:2306.00978, without its activations.
    """
    _check(weight, group, gated)
    if not gated:
        return _int4(weight, group, symmetric)
    gate, up = (_int4(half, group, symmetric) for half in weight.chunk(2))
    return alternate(gate[0], up[0]), alternate(gate[1], up[1]), alternate(gate[2], up[2])


def _least_error(w: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and q + 8 of groups w [N, G, group]: of INT4_PARTS the one with the least error."""
    top, sign = torch.maximum(high, -low), torch.where(high > -low, -1.0, 1.0)
    best = scale = q = torch.empty(0)
    for i, part in enumerate(INT4_PARTS):
        s = sign * (top / part).clamp(min=LEAST_HALF).to(torch.float16).float()
        u = w * (torch.ones_like(s) / s)
        rounded = torch.round(u.clamp(-8, 7))
        error = sum_squares(u - rounded) * (s * s)
        if i == 0:
            best, scale, q = error, s.where(~error.isnan(), torch.nan), rounded
            continue
        less = error < best
        best, scale = error.where(less, best), s.where(less, scale)
        q = rounded.where(less, q)
    return scale, q + 8


def sum_squares(r: Tensor) -> Tensor:
    """Over the last dimension, in the kernel's order: 16 lanes, which then fold in halves."""
    squares = (r * r).unflatten(-1, (-1, COLUMNS))
    lanes: Tensor = squares[..., 0, :]
    for i in range(1, squares.shape[-2]):
        lanes = lanes + squares[..., i, :]
    while lanes.shape[-1] > 1:
        first, second = lanes.chunk(2, -1)
        lanes = first + second
    return lanes
