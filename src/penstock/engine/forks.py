"""Sequences that go on from where another is: they share its blocks until they write to one."""

from __future__ import annotations

from penstock.cache import BlockPool
from penstock.engine.layout import Ints
from penstock.engine.request import Sequence, Status
from penstock.engine.states import States


def rows_of(group: list[Sequence]) -> int:
    """How many rows the samples that start together take, with those that will fork."""
    leader = group[0]
    return len(group) if leader.index or leader.num_output else leader.request.params.n


class Forks:
    """Lets sequences that have a row take over what others have computed."""

    def __init__(
        self,
        pool: BlockPool,
        table: Ints,
        running: list[Sequence],
        states: States | None = None,
    ) -> None:
        """table [max_num_seqs, M] and `running` are the scheduler's own; states: of a model that
        has some.
        """
        self._states = states
        self._pool = pool
        self._table = table
        self._running = running

    def fork(self, parent: Sequence) -> None:
        """Start the other samples of a request whose prompt `parent` has computed."""
        for sequence in parent.request.sequences:
            if sequence.status is Status.FORKING:
                self.adopt(sequence, parent)

    def adopt(self, sequence: Sequence, parent: Sequence) -> None:
        """Let `sequence` go on from where `parent` is."""
        for block in parent.blocks:
            self._pool.share(block)
        self._pool.release(reversed(sequence.blocks))
        if self._states is not None:
            self._states.adopt(sequence, parent)
        sequence.num_computed = parent.num_computed
        sequence.blocks, sequence.nodes = list(parent.blocks), list(parent.nodes)
        self._table[sequence.row, : len(sequence.blocks)] = sequence.blocks
        if sequence.status is Status.FORKING:
            sequence.status = Status.RUNNING
            sequence.overdue = parent.overdue
            self._running.append(sequence)

    def park(self, sequence: Sequence) -> None:
        """Take its blocks from `sequence`, which keeps its row to go on from another later."""
        if sequence.status is Status.FORKING:
            return
        self._pool.release(reversed(sequence.blocks))
        if self._states is not None:
            self._states.let_go(sequence)
        sequence.blocks, sequence.nodes, sequence.num_computed = [], [], 0
        sequence.status = Status.FORKING
        self._running.remove(sequence)
