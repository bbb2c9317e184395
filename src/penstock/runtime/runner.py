"""The only place that sees both a model and its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.cache import copy_blocks
from penstock.step import KV, Step

Forward = Callable[[Step, KV], Tensor]
"""Logits [S, V] float32 of the rows `step.sample_at`; writes the step's keys and values."""


class Runner:
    """Runs steps; owns the cache's memory."""

    def __init__(self, forward: Forward, kv: KV) -> None:
        self._forward = forward
        self.kv = kv

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to): before the step that writes to the copies."""
        with torch.inference_mode():
            copy_blocks(self.kv, pairs)

    def forward(self, step: Step) -> Tensor:
        """The step's logits [S, V]; its keys and values are in the cache afterwards."""
        with torch.inference_mode():
            return self._forward(step, self.kv)
