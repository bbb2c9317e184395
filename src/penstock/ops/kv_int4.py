"""Keys and values of four bits: what the bytes of an int4 cache mean.

A group of values that share a step s and a minimum m, both float16, is codes 0 … 15:

    m = float16(min x), s = float16((max x − m) / 15), code = round((x − m) / s)
    x ≈ bfloat16(code · s + m)

code · s is exact in float32, so that is one rounding of float32 and one to bfloat16, halves away
from zero: what attention multiplies. s is at least float16's smallest step, and m and s at most
its largest value.
Sources: asymmetric groups of 32: Liu et al. 2024, arXiv:2402.02750 (KIVI).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Values that share a step and a minimum, at most."""

LEAST, MOST = 2.0**-24, 65504.0
"""float16's smallest and largest positive values."""


def choose_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of groups along the last dimension, and their float16 scales.

    x [..., n] float32 that bfloat16 holds; returns uint8 [..., n] and [..., 2], step and minimum.
    A group with a value that isn't finite has a step of NaN.
    """
    minimum = (x.amin(-1).clamp(-MOST, MOST) + 0.0).half()  # of −0, 0
    size = (x.amax(-1) - minimum.float()) / 15.0
    step = size.clamp(LEAST, MOST).masked_fill(~x.isfinite().all(-1), torch.nan).half()
    codes = torch.round((x - minimum.float().unsqueeze(-1)) / step.float().unsqueeze(-1))
    scales = torch.stack((step, minimum), dim=-1)
    return codes.nan_to_num(0.0).clamp(0, 15).to(torch.uint8), scales


def widen(codes: Tensor, step: Tensor, minimum: Tensor) -> Tensor:
    """codes · step + minimum as bfloat16 has it, halves away from zero; float32."""
    exact = codes.float() * step.float() + minimum.float()
    return ((exact.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)


def put_keys(cache: Tensor, codes: Tensor, block: Tensor, offset: Tensor) -> None:
    """Write codes [T, Hkv, D] into keys [N, Hkv, P/16, D/2, 16, 1]."""
    pair = codes.unflatten(-1, (-1, 2))
    cache[block, :, offset // 16, :, offset % 16, 0] = pair[..., 0] | pair[..., 1] << 4


def put_values(cache: Tensor, codes: Tensor, block: Tensor, offset: Tensor) -> None:
    """Write codes [T, Hkv, D] into values [N, Hkv, D/16, P/2, 2, 8]."""
    half = codes.unflatten(-1, (-1, 2, 8))
    cache[block, :, :, offset // 2, offset % 2] = half[..., 0, :] | half[..., 1, :] << 4


def key_codes(cache: Tensor) -> Tensor:
    """Keys [M, Hkv, P/16, D/2, 16, 1] → codes [M, Hkv, P, D]."""
    pair = torch.cat((cache & 15, cache >> 4), dim=-1)  # [M, Hkv, P/16, D/2, 16, 2]
    return pair.transpose(3, 4).flatten(4).flatten(2, 3)


def value_codes(cache: Tensor) -> Tensor:
    """Values [M, Hkv, D/16, P/2, 2, 8] → codes [M, Hkv, P, D]."""
    half = torch.cat((cache & 15, cache >> 4), dim=-1)  # [M, Hkv, D/16, P/2, 2, 16]
    return half.flatten(3, 4).transpose(2, 3).flatten(3)


def token_codes(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """x [T, Hkv, D] in groups of each token's dimensions: codes [T, Hkv, padded] and scales
    [T, Hkv, G, 2]."""
    parts = [choose_codes(part) for part in x.split(GROUP, dim=-1)]
    codes = torch.cat([codes for codes, _ in parts], dim=-1)
    codes = torch.nn.functional.pad(codes, (0, padded - x.shape[-1]))
    return codes, torch.stack([scales for _, scales in parts], dim=-2)


def by_token(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [M, Hkv, P, D] with scale [M, Hkv, G, 2, P] → float32."""
    spread = scale.permute(3, 0, 1, 4, 2).repeat_interleave(GROUP, dim=-1)  # [2, M, Hkv, P, ≥ D]
    step, minimum = spread[..., : codes.shape[-1]]
    return widen(codes, step, minimum)
