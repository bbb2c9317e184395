"""Making tokens impossible that a mask of bits leaves out."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def _fake(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    return None


@define_op("mask_(Tensor(a!) logits, Tensor rows, Tensor bits) -> ()", fake=_fake)
def mask_(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Logits become -inf where a mask has no bit, in place.

    logits [S, V] float32, rows may be strided; rows [R] int64, which of them, each at most once;
    bits [R, ⌈V / 32⌉] int32, token v's bit is bit v % 32 of word v // 32.
    Natively words that leave out nothing aren't looked at twice.
    Cost: R·V / 8 bytes read, 4 written for each token left out; memory-bound.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts) & 1
    kept = allowed.flatten(1)[:, : logits.shape[1]].bool()
    logits[rows] = logits[rows].masked_fill_(~kept, -torch.inf)
