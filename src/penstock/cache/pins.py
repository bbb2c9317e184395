"""Prefixes that stay cached for a while after they were last asked for.

A pin holds the first blocks of a prompt. It takes nothing from requests that run: what is pinned
and in nobody's use is given up like any cached block, only after all others, a whole pin at a time:
those whose time is over, then the least recently used. Its time starts again with each prompt that
begins with it.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.cache.blocks import BlockPool
from penstock.cache.prefix_tree import Node
from penstock.errors import RequestError

MAX_PINNED = 0.5
"""At most this share of the blocks is pinned at a time."""


class PinnablePool(BlockPool):
    """A pool whose idle blocks may be pinned: a pinned one rests instead, and goes last.

    Pins aren't counted as holders. A resting block can be handed out like an idle one, so a pool
    with pins has as many blocks to give as one without.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._pins: dict[int, int] = {}  # of each pinned block: how many
        self._resting: set[int] = set()  # pinned, and nobody holds them
        self.on_evicting: Callable[[int], None] = lambda short: None
        """Called before cached blocks are given up; `short`, where positive, must be unpinned."""

    @property
    def num_available(self) -> int:
        return super().num_available + len(self._resting)

    @property
    def num_idle(self) -> int:
        return super().num_idle + len(self._resting)

    @property
    def num_resting(self) -> int:
        """Blocks that nothing but pins keeps."""
        return len(self._resting)

    @property
    def num_pinned(self) -> int:
        """Blocks with at least one pin, whoever else holds them."""
        return len(self._pins)

    def pins(self, block: int) -> int:
        """How many pins `block` has."""
        return self._pins.get(block, 0)

    def is_spare(self, block: int) -> bool:
        """Whether one pin is all that keeps `block` from being idle."""
        return block in self._resting and self._pins[block] == 1

    def is_resting(self, block: int) -> bool:
        """Whether nothing but pins keeps `block`."""
        return block in self._resting

    def states(self) -> bytes:
        """As in BlockPool, and 4 for a block that only pins keep."""
        found = bytearray(super().states())
        for block in list(self._resting):
            found[block] = 4
        return bytes(found)

    def allocate(self, count: int) -> list[int] | None:
        if self._pins and len(self._free) < count <= self.num_available:
            self.on_evicting(count - super().num_available)
        return super().allocate(count)

    def share(self, block: int) -> None:
        if block in self._resting:
            self._resting.remove(block)
            self._idle[block] = None
        super().share(block)

    def release(self, blocks: Iterable[int]) -> None:
        if not self._pins:
            return super().release(blocks)
        held = list(blocks)
        super().release(held)
        for block in held:
            if block in self._pins:
                self._rest(block)
        return None

    def pin(self, block: int) -> None:
        """Pin `block`, whose contents are known, once more."""
        self._pins[block] = self._pins.get(block, 0) + 1
        self._rest(block)

    def unpin(self, blocks: Iterable[int]) -> None:
        """Take one pin off each block, last to first."""
        for block in blocks:
            self._pins[block] -= 1
            if self._pins[block]:
                continue
            del self._pins[block]
            if block in self._resting:
                self._resting.remove(block)
                self._idle[block] = None

    def _rest(self, block: int) -> None:
        if block in self._idle:
            del self._idle[block]
            self._resting.add(block)


@dataclass(eq=False, slots=True)
class _Pin:
    path: list[Node]  # from the first block to the last
    ttl_s: float
    expires: float

    @property
    def last(self) -> Node:
        return self.path[-1]


class Pins:
    """Which prefixes are pinned, and until when."""

    def __init__(self, pool: PinnablePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._pins: OrderedDict[Node, _Pin] = OrderedDict()  # by last node, longest unused first
        self._due: list[tuple[float, int, _Pin]] = []  # a heap; a pin's time may have moved on
        self._serial = itertools.count()
        self.clock: Callable[[], float] = time.monotonic
        self.max_blocks = int(pool.num_blocks * MAX_PINNED)
        pool.on_evicting = self._yield
        self.on_pin: Callable[[Node], None] = lambda node: None  # is shown where pins end
        self.on_unpin: Callable[[Node], None] = lambda node: None

    def check(self, tokens: int) -> None:
        """Raises RequestError where the whole blocks of `tokens` are more than may be pinned."""
        size, most = self._block_size, self.max_blocks
        if tokens // size > most:
            raise RequestError(
                f"{tokens // size} blocks of {size} tokens are to be pinned, but of a cache of "
                f"{self._pool.num_blocks} blocks at most {most} may be. Pin up to "
                f"{(most + 1) * size - 1} tokens, or give the cache more blocks."
            )

    def renew(self, path: Sequence[Node], wanted: Iterable[tuple[int, float]] = ()) -> None:
        """A prompt is in the cache, its whole blocks in `path`: pins that it begins with live on.

        wanted: (tokens, seconds): the whole blocks of so many of its first are pinned for so long
        from now, at least. What a window has passed by, and others have taken, isn't pinned.
        """
        self.expire()
        path = list(itertools.takewhile(lambda node: not node.lost, path))
        ttls: dict[int, float] = {}  # by number of blocks
        for tokens, ttl_s in wanted:
            count = min(tokens // self._block_size, len(path))
            ttls[count] = max(ttl_s, ttls.get(count, 0.0))
        if not (ttls or self._pins):
            return
        for count in range(len(path), 0, -1):  # the longer of two first: `_drop_until`
            node = path[count - 1]
            if count in ttls and node not in self._pins:
                self._add(list(path[:count]), ttls[count])
            pin = self._pins.get(node)
            if pin is not None:
                pin.ttl_s = max(pin.ttl_s, ttls.get(count, 0.0))
                pin.expires = self.clock() + pin.ttl_s
                self._pins.move_to_end(node)
                self.on_pin(node)

    def _add(self, path: list[Node], ttl_s: float) -> None:
        pool = self._pool
        for node in path:
            pool.pin(node.block)
        self._drop_until(
            lambda: pool.num_pinned <= self.max_blocks, lambda block: pool.pins(block) == 1
        )
        pin = self._pins[path[-1]] = _Pin(path, ttl_s, self.clock() + ttl_s)
        self._note(pin)

    def _note(self, pin: _Pin) -> None:
        """Look at `pin` again when its time is over."""
        if len(self._due) > 2 * len(self._pins) + 64:  # mostly of pins that were dropped before it
            self._due = [due for due in self._due if self._is_held(due[2])]
            heapq.heapify(self._due)
        heapq.heappush(self._due, (pin.expires, next(self._serial), pin))

    def _is_held(self, pin: _Pin) -> bool:
        return self._pins.get(pin.last) is pin

    def expire(self) -> None:
        """Drop the pins whose time is over."""
        if not self._due:
            return
        now = self.clock()
        while self._due and self._due[0][0] <= now:
            _, _, pin = heapq.heappop(self._due)
            if not self._is_held(pin):
                continue
            if pin.expires > now:
                self._note(pin)
            else:
                self._drop(pin)

    def _yield(self, short: int) -> None:
        """Blocks are needed: drop what has expired, and then pins until `short` became idle.

        First those of which a block becomes idle by it. Where a window has let go of the first
        blocks of a prompt that still runs, such a pin may come to that only after another, longer
        one that gives nothing itself: then all that keep something are dropped, in their order.
        """
        pool = self._pool
        left = pool.num_resting - short
        self.expire()
        for gives in (pool.is_spare, pool.is_resting):
            self._drop_until(lambda: pool.num_resting <= left, gives)

    def _drop_until(self, enough: Callable[[], bool], gives: Callable[[int], bool]) -> None:
        """Drop pins with a block that `gives` something, the longest unused first.

        Of two within each other the longer one stands first in the order: one pass finds all
        there is where the shorter one gives only after it.
        """
        for pin in list(self._pins.values()):
            if enough():
                return
            if any(gives(node.block) for node in reversed(pin.path)):
                self._drop(pin)

    def _drop(self, pin: _Pin) -> None:
        del self._pins[pin.last]
        self.on_unpin(pin.last)
        self._pool.unpin(node.block for node in reversed(pin.path))

    def clear(self) -> None:
        """Drop every pin."""
        for pin in list(self._pins.values()):
            self._drop(pin)
        self._due.clear()

    def stats(self) -> dict[str, int]:
        """How many pins are in force, and over how many blocks; changes nothing."""
        now = self.clock()
        pins = [pin for pin in list(self._pins.values()) if pin.expires > now]
        blocks = {node.block for pin in pins for node in pin.path}
        return {"pins": len(pins), "pinned_blocks": len(blocks)}
