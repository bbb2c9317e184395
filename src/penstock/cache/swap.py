"""Blocks outside the pool: where a sequence's keys and values wait until there is room again.

A place for one block is a slot. `SwapSpace` counts who holds which slot, as `BlockPool` does for
blocks; `SwapStore` holds the bytes. Both grow as they are used: a space that nobody needs costs
nothing.
Source: Kwon et al. 2023, arXiv:2309.06180, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.cache.layouts import block_rows
from penstock.cache.pages import lazy_zeros
from penstock.errors import PenstockError
from penstock.step import KV

Words = NDArray[np.integer[Any]]


class SwapSpace:
    """Slots 0 … num_slots − 1, and how many hold each."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._count: list[int] = []  # of the slots that were ever in use
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        """Slots that something holds."""
        return len(self._count) - len(self._free)

    @property
    def num_available(self) -> int:
        """Slots that `allocate` can hand out."""
        return self.num_slots - self.num_used

    def count(self, slot: int) -> int:
        """How many hold `slot`."""
        return self._count[slot]

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots held once each, or None when there aren't as many: all or nothing."""
        if count > self.num_available:
            return None
        while len(self._free) < count:
            self._free.append(len(self._count))
            self._count.append(0)
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._count[slot] = 1
        return slots

    def share(self, slot: int) -> None:
        """Hold `slot` once more."""
        if self._count[slot] == 0:
            raise PenstockError(f"Slot {slot} is free: there is nothing in it to share.")
        self._count[slot] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Let go of each slot once."""
        for slot in slots:
            if self._count[slot] == 0:
                raise PenstockError(f"Slot {slot} was released more often than it was held.")
            self._count[slot] -= 1
            if not self._count[slot]:
                self._free.append(slot)


class SwapStore:
    """The bytes of swapped blocks, in ordinary memory.

    It grows by as much again whenever a slot beyond its end is written to, so that memory is
    taken as it is needed; `slots` come from a `SwapSpace`, which hands out low ones first.
    """

    def __init__(self, kv: KV) -> None:
        """kv: the cache, without a window."""
        self._cache = block_rows(kv)
        self._parts: list[list[Words]] = [[] for _ in self._cache]  # [piece][slot's chunk]
        self._sizes: list[int] = []  # slots in each chunk

    @property
    def nbytes(self) -> int:
        """Of memory that is taken."""
        return sum(chunk.nbytes for chunks in self._parts for chunk in chunks)

    def put(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks out, (block, slot)."""
        if not pairs:
            return
        self._reach(max(slot for _, slot in pairs))
        places = [(block, *self._place(slot)) for block, slot in pairs]
        for cache, chunks in zip(self._cache, self._parts, strict=True):
            rows = read_blocks(cache, [block for block, _, _ in places])
            for row, (_, chunk, at) in zip(rows, places, strict=True):
                chunks[chunk][at] = row

    def take(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back, (slot, block): the bytes that were put there."""
        places = [(*self._place(slot), block) for slot, block in pairs]
        for cache, chunks in zip(self._cache, self._parts, strict=True):
            rows = [chunks[chunk][at] for chunk, at, _ in places]
            write_blocks(cache, [block for _, _, block in places], rows)

    def _place(self, slot: int) -> tuple[int, int]:
        """A slot's chunk, and where it is in there."""
        for chunk, size in enumerate(self._sizes):
            if slot < size:
                return chunk, slot
            slot -= size
        raise PenstockError("A slot was read that was never written.")

    def _reach(self, slot: int) -> None:
        """Have room for `slot`."""
        while sum(self._sizes) <= slot:
            size = max(sum(self._sizes), 16)
            shapes = [((size, cache.shape[1]), cache.dtype) for cache in self._cache]
            # of whole pages: a copy that ends 16 bytes off a page took 3 times as long on Zen 3
            fresh = [lazy_zeros(*shape).numpy() for shape in shapes]
            for chunks, chunk in zip(self._parts, fresh, strict=True):
                chunks.append(chunk)  # all were allocated: none is half there
            self._sizes.append(size)


def read_blocks(cache: torch.Tensor, blocks: list[int]) -> Iterable[Words]:
    """The rows of these blocks; a GPU's come in one copy."""
    if cache.is_cpu:
        held = cache.numpy()
        return (held[block] for block in blocks)
    return cache.index_select(0, torch.tensor(blocks, device=cache.device)).cpu().numpy()


def write_blocks(cache: torch.Tensor, blocks: list[int], rows: list[Words]) -> None:
    """Overwrite these blocks; a GPU's in one copy."""
    if cache.is_cpu:
        held = cache.numpy()
        for block, row in zip(blocks, rows, strict=True):
            held[block] = row
    elif rows:
        fresh = torch.from_numpy(np.stack(rows)).to(cache.device)
        cache.index_copy_(0, torch.tensor(blocks, device=cache.device), fresh)
