"""Blocks of a sequence that its queries see no more, where all layers see a window."""

from __future__ import annotations

from penstock.cache import BlockPool
from penstock.engine.layout import Ints
from penstock.engine.request import Sequence
from penstock.runtime import Horizon


class Window:
    """Lets go of them as sequences grow, so that a sequence holds a window's blocks at most, and
    those of its first tokens where layers see them too.

    The pool's empty block, whose keys and values are zeros, takes their places: a kernel may look
    at positions beside those that are seen, with weights of zero.
    """

    def __init__(self, pool: BlockPool, table: Ints, block_size: int, horizon: Horizon) -> None:
        """table [max_num_seqs, M] is the scheduler's own."""
        self._pool = pool
        self._table = table
        self._block_size = block_size
        self._tokens = horizon.window
        self._kept = horizon.kept(block_size)

    def passed(self, num_computed: int) -> range:
        """Blocks, by their places in a sequence, that the query behind so many tokens can't see."""
        if not self._tokens:
            return range(0)
        last = max(num_computed + 1 - self._tokens, 0) // self._block_size
        return range(min(self._kept, last), last)

    def found(self, blocks: list[int]) -> list[int]:
        """Of a cached prefix's blocks those that what follows it can see, held; empty ones between,
        or a text that goes on for long would hold more than there are.
        """
        gone, empty = self.passed(len(blocks) * self._block_size), self._pool.empty
        kept = [empty if at in gone else block for at, block in enumerate(blocks)]
        for block in kept:
            self._pool.share(block)
        return kept

    def pass_by(self, sequence: Sequence) -> bool:
        """Let go of what the next query of `sequence` can't see; whether there was any."""
        if not self._tokens:
            return False
        blocks, empty = sequence.blocks, self._pool.empty
        last = self.passed(sequence.num_computed).stop
        first = max(last, self._kept)
        while first > self._kept and blocks[first - 1] != empty:
            first -= 1
        if first >= last:
            return False
        self._pool.release(reversed(blocks[first:last]))
        for at in range(first, last):
            self._pool.share(empty)
            blocks[at] = empty
        self._table[sequence.row, first:last] = empty
        return True
