"""Blocks of the paged cache: reference counts, reuse, and what stays cached after use.

A block is in one of three states: in use (its count is above 0), idle (its count is 0, but the
prefix tree knows its contents and may hand it out again), or free. Idle blocks are given up in the
order in which they became idle. A sequence releases its blocks last to first, so a block is given
up after those that continue it; but for those that a window has passed by, which go before.
Source: Kwon et al. 2023, arXiv:2309.06180.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from penstock.errors import PenstockError


class BlockPool:
    """Numbers 0 … num_blocks − 1, and who holds them."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._count = [0] * num_blocks + [1]  # the last is `empty`, which is never let go
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._known: set[int] = set()
        self.on_evict: Callable[[int], None] = lambda block: None

    @property
    def empty(self) -> int:
        """A block that nothing is ever written to, behind the others; whoever holds it shares it.

        Caches of models whose layers all see a window have it: `runtime.memory.horizon_of`.
        """
        return self.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that something holds."""
        return self.num_blocks - self.num_available

    @property
    def num_idle(self) -> int:
        """Blocks that nothing holds, whose contents are still known."""
        return len(self._idle)

    def filled(self, blocks: Iterable[int]) -> int:
        """How many of these aren't `empty`."""
        return sum(block != self.empty for block in blocks)

    def count(self, block: int) -> int:
        """How many hold `block`."""
        return self._count[block]

    def states(self) -> bytes:
        """Of each block: 0 free, 1 used, 2 used by several, 3 idle. For another thread to show:
        while the engine works, a block may be told a step late.
        """
        found = bytearray(min(count, 2) for count in self._count[: self.num_blocks])
        for block in list(self._idle):
            found[block] = 3
        return bytes(found)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks held once each, or None when there aren't as many: all or nothing."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._known.discard(block)
                self.on_evict(block)
            self._count[block] = 1
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """Hold `block` once more; an idle one comes back into use."""
        if self._count[block] == 0:
            if block not in self._idle:
                raise PenstockError(f"Block {block} is free: there is nothing in it to share.")
            del self._idle[block]
        self._count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of each block once."""
        for block in blocks:
            if self._count[block] == 0:
                raise PenstockError(f"Block {block} was released more often than it was held.")
            self._count[block] -= 1
            if self._count[block]:
                continue
            if block in self._known:
                self._idle[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """`block` becomes idle instead of free when it is let go."""
        self._known.add(block)

    def lose(self, block: int) -> None:
        """What `block` holds can't be found any more: it becomes free when it is let go, or is."""
        self._known.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def forget(self) -> None:
        """Every idle block becomes free."""
        while self._idle:
            block, _ = self._idle.popitem(last=False)
            self._known.discard(block)
            self.on_evict(block)
            self._free.append(block)
