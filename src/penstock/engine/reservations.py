"""Places in the cache for drafts: what nobody else needs, and only for one step."""

from __future__ import annotations

from penstock.cache import BlockPool
from penstock.engine.batch import Ints
from penstock.engine.request import Sequence, Status
from penstock.engine.waiting import WaitingQueue


class Reservations:
    """Gives sequences blocks beyond their next token, and takes them back."""

    def __init__(
        self,
        pool: BlockPool,
        table: Ints,
        block_size: int,
        running: list[Sequence],
        waiting: WaitingQueue,
    ) -> None:
        """table [max_num_seqs, M], `running` and `waiting` are the scheduler's own."""
        self._pool = pool
        self._table = table
        self._block_size = block_size
        self._running = running
        self._waiting = waiting

    def reserve(self, sequence: Sequence, count: int) -> int:
        """Blocks for up to `count` tokens behind those of `sequence`; how many have room.

        Each that runs may need a block in the next step, and whoever waits first those of its
        tokens. None for a sequence that is about to copy the block it writes to.
        """
        size, blocks = self._block_size, sequence.blocks
        at, first = sequence.num_computed // size, len(blocks)
        if at < first and self._pool.count(blocks[at]) > 1:
            return 0
        free = self._pool.num_available - len(self._running) - self._wanted
        need = min(-(-(len(sequence.tokens) + count) // size) - first, free)
        if need > 0:
            blocks += self._pool.allocate(need) or ()
            self._table[sequence.row, first : len(blocks)] = blocks[first:]
        return max(min(count, len(blocks) * size - len(sequence.tokens)), 0)

    @property
    def _wanted(self) -> int:
        """Blocks that the first of those who wait is about to take."""
        first = self._waiting.first()
        if first is None:
            return 0
        if first.status is Status.SWAPPED:  # with all of its request
            return self._pool.num_blocks
        return -(-len(first.tokens) // self._block_size)

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks of `sequence` that hold nothing it has computed."""
        if sequence.status is Status.RUNNING:
            kept = -(-sequence.num_computed // self._block_size)
            self._pool.release(reversed(sequence.blocks[kept:]))
            del sequence.blocks[kept:]
