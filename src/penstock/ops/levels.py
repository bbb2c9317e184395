"""The sixteen values that codes of four bits stand for, where they aren't integers."""

from __future__ import annotations

import torch
from torch import Tensor

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution: Dettmers et al. 2023, arXiv:2305.14314, appendix E."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))
"""Four bits of floating point, the sign in the highest: OCP Microscaling Formats 1.0, 5.3.3."""

LEVELS = ("none", "nf4", "e2m1")
"""What `levels` counts in."""


def table(levels: int) -> Tensor:
    """The [16] float32 values that products are computed with: as bfloat16 holds them.

    That changes NF4's, by 2⁻⁹ of each at most, and none of E2M1's.
    """
    return torch.tensor(NF4 if LEVELS[levels] == "nf4" else E2M1).bfloat16().float()
