"""Who has which part of a sequence, where the processes of one step (ranks) share its tokens.

Each rank has all weights, and of a step some consecutive rows: as many as make the products and
what they attend to an equal part of the work. Keys and values are kept by position (`ops.ring`).
Source: Liu et al. 2023, arXiv:2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.ops.attention import SPAN
from penstock.ops.panels import COLUMNS, round_up
from penstock.ops.ranks import HEADER
from penstock.step import RingStep, Step

Ints = NDArray[np.int32]


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

    def most_tokens(self, head_dim: int) -> int:
        """Of a sequence whose spans' parts have room where ranks meet, of 32 rows at once."""
        part_bytes = 32 * 4 * (2 + round_up(head_dim, COLUMNS))
        return (len(self.meeting) - HEADER) // 2 // part_bytes * SPAN

    def part(self, step: Step, worth: int) -> RingStep:
        """What this rank does of a step. worth: how many positions a row may attend to for as many
        multiplications as its products take; the same in all ranks.
        """
        rows = self._rows(step.positions.numpy(), worth)
        own = slice(int(rows[self.rank]), int(rows[self.rank + 1]))
        copies = None if step.copies is None else self._copies(step.copies.numpy())
        return RingStep(
            step.tokens[own],
            step.positions[own],
            torch.from_numpy(self._own(step.slots.numpy())),
            step.query_start,
            step.context_len,
            step.block_table,
            step.sample_at,
            step.positions,
            torch.from_numpy(rows),
            copies,
        )

    def _rows(self, positions: Ints, worth: int) -> Ints:
        """[R + 1]: where each rank's rows begin, and the last one's end."""
        before = np.zeros(len(positions) + 1, dtype=np.int64)
        np.cumsum(positions + np.int64(1 + worth), out=before[1:])
        shares = before[-1] * np.arange(self.size + 1) // self.size
        # a row is of the rank in whose share it begins
        rows: Ints = np.searchsorted(before, shares).astype(np.int32)
        return rows

    def _copies(self, copies: Ints) -> Tensor:
        """Those into this rank's cache."""
        slots = self._own(copies[:, 1])
        found = np.stack((copies[:, 0], slots), axis=1)[slots >= 0]
        return torch.from_numpy(found)

    def _own(self, slots: Ints) -> Ints:
        """Slots in this rank's cache; −1: another's."""
        block, offset = np.divmod(slots, np.int32(self.block_size))
        owner, at = np.divmod(offset, np.int32(SPAN))
        own = (owner == self.rank) & (slots >= 0)
        return np.where(own, block * np.int32(SPAN) + at, np.int32(-1))
