"""Attention in blocks is attention."""

from __future__ import annotations

import pytest
import torch
from recipes.attention import BLOCK, attend
from torch.nn import functional as F


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize("documents", [False, True])
def test_blocks_are_torchs_attention(length: int, documents: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 4, length, 16, requires_grad=True)
    k, v = (torch.randn(2, 2, length, 16, requires_grad=True) for _ in "kv")
    order = torch.arange(length)
    mask = (order[:, None] >= order)[None, None].expand(2, 1, -1, -1)
    if documents:  # each sees itself at least
        number = torch.randint(0, 3, (2, length)).sort(-1).values
        mask = mask & (number[:, :, None] == number[:, None, :])[:, None]
    found = attend(q, k, v, mask if documents else None)
    wide = (x.repeat_interleave(2, 1) for x in (k, v))
    expected = F.scaled_dot_product_attention(q, *wide, attn_mask=mask)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    up = torch.randn_like(found)
    gradients = torch.autograd.grad(found, (q, k, v), up, retain_graph=True)
    wanted = torch.autograd.grad(expected, (q, k, v), up)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
