"""Round to nearest: each value by itself, the scale from the largest of its group.

Symmetric int4 divides the largest magnitude by 7.5, so that both ends of −8 … 7 lose half a step.
Source: Jacob et al. 2017, arXiv:1712.05877; Dettmers & Zettlemoyer 2022, arXiv:2212.09720.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import WeightsError

_LEAST = 2.0**-24
"""The smallest float16 above zero."""


def round_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] → q [N, K] int8 in ±127 and scale [N, 1] float32, one for a row."""
    w = _finite(weight)
    top = w.abs().amax(-1, keepdim=True)
    scale = torch.where(top > 0, top / 127.0, 1.0)
    return torch.round(w / scale).clamp_(-127, 127).to(torch.int8), scale


def round_int4(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """[N, K], K a multiple of `group` → q [N, K] uint8 below 16, scale and zero [N, K/group].

    W ≈ (q − zero) · scale; scale float16, zero uint8 or None, which means 8.
    """
    w = _finite(weight).unflatten(1, (-1, group))
    if symmetric:
        top = w.abs().amax(-1, keepdim=True)
        scale = _half(top / 7.5)
        q = torch.round(w / scale).add_(8).clamp_(0, 15)
        zero = None
    else:
        low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
        scale = _half((high - low) / 15)
        offset = torch.round(-low / scale).clamp_(0, 15)
        q = torch.round(w / scale).add_(offset).clamp_(0, 15)
        zero = offset[..., 0].to(torch.uint8)
    return q.flatten(1).to(torch.uint8), scale[..., 0].to(torch.float16), zero


def _half(scale: Tensor) -> Tensor:
    """What float16 makes of a scale, never 0, in float32."""
    if bool((scale > 65504).any()):
        raise WeightsError(
            f"A group's scale of {float(scale.max()):.3g} is beyond float16's 65,504: these aren't "
            "weights of a trained model. Load them without quantization."
        )
    return scale.clamp(min=_LEAST).to(torch.float16).float()


def _finite(weight: Tensor) -> Tensor:
    w = weight.float()
    if not bool(w.isfinite().all()):
        count = int((~w.isfinite()).sum())
        raise WeightsError(
            f"{count} of {w.numel()} values of a weight {list(w.shape)} are NaN or infinite and "
            "can't be quantized. The checkpoint is damaged."
        )
    return w
