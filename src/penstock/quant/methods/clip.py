"""Scales by search: how far a group's ends are drawn in, by the error of the products.

Source: Lin et al. 2023, arXiv:2306.00978, section 3.2 and its code (`auto_clip`), with XᵀX in the
place of the inputs themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.quant.codes import Codes, groups
from penstock.quant.methods import rtn
from penstock.quant.scheme import Scheme

RATIOS = tuple(1 - i / 20 for i in range(10))
"""What the ends of a group are multiplied by: 1 down to 0.55."""

_BLOCK = 128
"""Columns of H's blocks where a whole row shares a scale."""


def can_clip(scheme: Scheme) -> bool:
    """Whether a group's scale is free: no power of two, none above it, none that rows share."""
    return scheme.kind not in ("mxfp4", "nvfp4") and scheme.rows == 1


Scales = tuple[Tensor, Tensor | None, Tensor | None]
"""Scale [N, G], zero point [N, G] or None, outer scale [N] or None."""


def clipped_scale(weight: Tensor, hessian: Tensor, scheme: Scheme) -> Scales | None:
    """Of ten scales for each group, the one whose products err least under H's diagonal blocks.

    weight [N, K], hessian [K, K] = XᵀX / T. The error of a group with Δ = W − Ŵ is Δ·H_gg·Δᵀ, as if
    groups erred independently. None where scales aren't free (`can_clip`).
    Cost: ten roundings and 10·N·K·group operations.
    """
    if not can_clip(scheme):
        return None
    weight = weight.float()
    width = scheme.group or min(_BLOCK, weight.shape[1])
    blocks = _diagonal_blocks(hessian, width)
    best = chosen_scale = torch.empty(0)
    chosen_zero: Tensor | None = None
    low, high = _ends(weight, scheme)
    for ratio in RATIOS:
        drawn = weight.clamp(low * ratio, high * ratio)
        scale, zero, _ = rtn.choose_scale(drawn, scheme)
        values = rtn.encode(weight, scheme, scale, zero, None)
        delta = weight - _meaning(scheme, values, scale, zero)
        error = _error(delta, blocks, width, scale.shape[1])
        if ratio == 1:
            best, chosen_scale, chosen_zero = error, scale, zero
            continue
        less = error < best
        best, chosen_scale = error.where(less, best), scale.where(less, chosen_scale)
        if zero is not None and chosen_zero is not None:
            chosen_zero = zero.where(less, chosen_zero)
    return chosen_scale, chosen_zero, None


def quantize(
    weight: Tensor, scheme: Scheme, hessian: Tensor, input_scale: float | None = None
) -> Codes:
    """Round to nearest under `clipped_scale`'s scales."""
    found = clipped_scale(weight, hessian, scheme)
    if found is None:
        return rtn.quantize(weight, scheme, input_scale)
    values = rtn.encode(weight, scheme, *found)
    return Codes(scheme, values, *found, input_scale)


def _meaning(scheme: Scheme, values: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    static = 1.0 if scheme.static else None
    return Codes(scheme, values, scale, zero, None, static).dequantize()


def _ends(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The ends of each group, [N, K]."""
    k = weight.shape[1]
    group = scheme.group or k
    whole = functional.pad(weight, (0, -k % group)).unflatten(1, (-1, group))
    low, high = whole.amin(-1).clamp(max=0), whole.amax(-1).clamp(min=0)
    if scheme.symmetric:  # both ends are drawn in together
        high = torch.maximum(high, -low)
        low = -high
    return low.repeat_interleave(group, 1)[:, :k], high.repeat_interleave(group, 1)[:, :k]


def _diagonal_blocks(hessian: Tensor, width: int) -> Tensor:
    """[K, K] → [⌈K / width⌉, width, width], padded with zeros."""
    more = -hessian.shape[0] % width
    whole = functional.pad(hessian, (0, more, 0, more))
    count = whole.shape[0] // width
    grid = whole.view(count, width, count, width)
    each = torch.arange(count)
    return grid[each, :, each]


def _error(delta: Tensor, blocks: Tensor, width: int, scales: int) -> Tensor:
    """Of each row and scale, [N, G]."""
    assert groups(delta.shape[1], width) == len(blocks)
    parts = functional.pad(delta, (0, -delta.shape[1] % width)).unflatten(1, (-1, width))
    by_block = parts.transpose(0, 1)  # [B, N, width]
    error: Tensor = ((by_block @ blocks) * by_block).sum(-1).t()  # [N, B]
    return error if error.shape[1] == scales else error.sum(1, keepdim=True)
