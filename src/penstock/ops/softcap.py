"""The soft cap of scores and logits."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def _fake_cap(x: Tensor, cap: float) -> None:
    return None


@define_op("softcap_(Tensor(a!) x, float cap) -> ()", fake=_fake_cap)
def softcap_(x: Tensor, cap: float) -> None:
    """x = cap · tanh(x / cap), in place; x [T, V] float32.

    Source: Gemma 2, arXiv:2408.00118.
    """
    x.copy_(torch.tanh(x / cap) * cap)
