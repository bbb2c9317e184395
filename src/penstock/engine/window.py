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

    def pass_by(self, sequence: Sequence) -> bool:
        """Let go of what the next query of `sequence` can't see; whether there was any."""
        if not self._tokens:
            return False
        blocks, empty = sequence.blocks, self._pool.empty
        last = max(sequence.num_computed + 1 - self._tokens, 0) // self._block_size
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
