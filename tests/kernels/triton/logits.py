"""Rows of logits of every kind, and numbers to draw with."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.triton.conftest import DEVICE

inf, nan = torch.inf, torch.nan


def normal(rows: int, size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=random) * spread).to(DEVICE)


def awkward(size: int) -> Tensor:
    """Plain, ties, flat, zeros of both signs, sorted, masked, denormal, huge, and broken rows."""
    plain = normal(1, size)[0]
    masked = torch.where(plain > 4.0, plain, -inf)
    rows = [plain, plain.round(), torch.full_like(plain, -1.5)]
    rows += [torch.where(plain > 0, 0.0, -0.0), plain.sort(descending=True).values, masked]
    rows += [torch.full_like(plain, -inf), plain * 1e-40, plain * 1e37, plain * 1e-3 + 7.0]
    for value in (inf, nan, -nan):
        broken = torch.where(masked == -inf, masked, plain)
        broken[[size // 2, size - 1]] = value
        rows.append(broken)
    return torch.stack(rows)


def peaked(size: int) -> Tensor:
    """Rows whose nucleus is one token, a few, about 100, about 1,000, and nearly all."""
    place = torch.arange(size, device=DEVICE).roll(size // 3)
    sure = torch.where(place == 0, 30.0, -place.float())
    rows = [sure, *(-place / width for width in (3.0, 40.0, 350.0, 1e6))]
    return torch.stack([*rows, (-place / 60.0).round()])


def fractions(rows: int) -> Tensor:
    random = torch.Generator().manual_seed(9)
    return torch.rand(rows, dtype=torch.float64, generator=random).to(DEVICE)


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype is expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
