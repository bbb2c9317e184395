"""Rotation of rows, by which a value that stands out is shared out before it is rounded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.panels import round_up
from penstock.ops.registry import define_op

ROTATED = 64
"""Values of K that are rotated together."""


def rotated(x: Tensor) -> Tensor:
    """What `rotate` returns."""
    blocks = functional.pad(x.float(), (0, -x.shape[1] % ROTATED)).unflatten(1, (-1, ROTATED))
    for _ in range(6):  # each mixes neighbours, and puts the bit that parts them before the others
        even, odd = blocks[..., ::2], blocks[..., 1::2]
        blocks = torch.cat((even + odd, even - odd), -1)
    whole: Tensor = (blocks / 8).flatten(1)
    return whole


def _fake_rotate(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], round_up(x.shape[1], ROTATED)), dtype=torch.float32)


@define_op("rotate(Tensor x) -> Tensor", fake=_fake_rotate)
def rotate(x: Tensor) -> Tensor:
    """Blocks of 64 values of each row by the Hadamard matrix of that order, over 8.

    x [T, K] float32, bfloat16 or float16, rows may be strided. Returns [T, 64·⌈K/64⌉] float32; K is
    padded with zeros. The matrix is its own inverse, so products stay what they were: (H·x)·(H·w)
    = x·w, but for rounding. In float32, in order: sums and differences (the lower place less the
    higher) of values 1 apart, 2, … 32, then the division by 8.
    Cost: the bytes of x and of the result; 6 additions a value.
    Source: Ashkboos et al. 2024 (QuaRot), arXiv:2404.00456, in blocks.
    """
    return rotated(x)
