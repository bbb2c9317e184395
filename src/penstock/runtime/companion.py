"""A cache beside the target's: as many blocks, given out together with its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from penstock.cache import SwapStore, block_rows, copy_blocks
from penstock.speculate.stamps import Stamps
from penstock.step import KV


class CompanionCache:
    """The keys and values of a draft model; what moves a block of the target's moves this one's."""

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.stamps: Stamps | None = None
        """What its blocks hold, as whoever drafts with it knows."""
        self._swapped: SwapStore | None = None

    @cached_property
    def rows(self) -> list[Tensor]:
        """`block_rows` of the cache."""
        return block_rows(self.kv)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (from, to)."""
        copy_blocks(self.rows, pairs)
        if self.stamps is not None:
            self.stamps.copy(pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to swap slots, (block, slot)."""
        if self._swapped is None:
            self._swapped = SwapStore(self.kv)
        self._swapped.put(pairs)
        if self.stamps is not None:
            self.stamps.swap_out(pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy swap slots back to blocks, (slot, block)."""
        assert self._swapped is not None  # something was put there
        self._swapped.take(pairs)
        if self.stamps is not None:
            self.stamps.swap_in(pairs)
