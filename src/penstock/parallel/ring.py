"""Who has which part of a sequence, where the processes of one step (ranks) share its tokens.

Each rank has all weights, and of a step some consecutive rows: as many as make the products and
what they attend to an equal part of the work. Keys and values are kept by position (`ops.ring`).
Source: Liu et al. 2023, arXiv:2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.ops.attention import SPAN
from penstock.step import RingStep, Step


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """This process's place among those that share sequences."""

    rank: int
    size: int
    meeting: Tensor  # ops.ranks: memory of all of them

    @property
    def block_size(self) -> int:
        """Tokens of a block, of which each rank keeps a span."""
        return SPAN * self.size

    def part(self, step: Step, worth: int) -> RingStep:
        """What this rank does of a step. worth: how many positions a row may attend to for as many
        multiplications as its products take; the same in all ranks.
        """
        rows = self._rows(step, worth)
        first, end = int(rows[self.rank]), int(rows[self.rank + 1])
        copies = step.copies
        if copies is not None:
            copies = torch.stack((copies[:, 0], self._own(copies[:, 1])), dim=1)
            copies = copies[copies[:, 1] >= 0]
        return RingStep(
            step.tokens[first:end],
            step.positions[first:end],
            self._own(step.slots),
            step.query_start,
            step.context_len,
            step.block_table,
            step.sample_at,
            step.positions,
            rows,
            copies,
        )

    def _rows(self, step: Step, worth: int) -> Tensor:
        """[R + 1] int32: where each rank's rows begin, and the last one's end."""
        before = torch.zeros(step.num_tokens + 1, dtype=torch.int64)
        torch.cumsum(step.positions.long() + (1 + worth), 0, out=before[1:])
        shares = before[-1] * torch.arange(self.size + 1) // self.size
        # a row is of the rank in whose share it begins
        return torch.searchsorted(before, shares).to(torch.int32)

    def _own(self, slots: Tensor) -> Tensor:
        """Slots in this rank's cache; −1: another's."""
        block = slots.div(self.block_size, rounding_mode="floor")
        offset = slots - block * self.block_size
        own = (slots >= 0) & (offset.div(SPAN, rounding_mode="floor") == self.rank)
        return torch.where(own, block * SPAN + offset % SPAN, -1).to(torch.int32)
