"""The rows of the block table: one for each sequence that runs, or will once its request forks."""

from __future__ import annotations

from penstock.engine.request import Sequence, Status


class Rows:
    """Which of `count` rows are free; `sequence.row` says who has which, -1 being none."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self.kept = 0
        """Of the free ones: for those that are set aside in this step."""

    @property
    def num_free(self) -> int:
        """For whoever is the first of the queue."""
        return len(self.free) - self.kept

    def take(self, sequence: Sequence) -> None:
        sequence.row = self.free.pop()

    def reserve(self, leader: Sequence) -> None:
        """For the other samples of a request whose prompt comes in."""
        if leader.index or leader.num_output:
            return
        for member in leader.request.sequences[1:]:
            self.take(member)
            member.status = Status.FORKING

    def give_back(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self.free.append(sequence.row)
            sequence.row = -1
