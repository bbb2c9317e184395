"""The largest logit of each row."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def _fake(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty((rows,), dtype=torch.int64), logits.new_empty((rows,))


@define_op("argmax(Tensor logits) -> (Tensor ids, Tensor values)", fake=_fake)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The place of each row's largest value and the value.

    logits [R, V] float32, rows may be strided; returns ids [R] int64, values [R].
    Of equal values the first, and -0 equals 0; a NaN counts as the largest of all.
    Natively one pass of block maxima; only the block that holds the largest is searched.
    Cost: R·V·4 bytes read; memory-bound.
    """
    ids = logits.argmax(-1, keepdim=True)
    return ids[:, 0], logits.gather(1, ids)[:, 0]
