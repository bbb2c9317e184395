"""The queue: who is next, at a cost that hardly grows with its length."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from penstock.engine.policy import Policy
from penstock.engine.request import Sequence

Rank = tuple[float, ...]
"""The lower goes first; no two sequences have the same."""

Entry = tuple[Rank, int, Sequence]
"""Of a heap: the ticket tells whether it is still valid."""


class WaitingQueue:
    """Sequences that wait, in the order of their ranks, but first those that waited too long.

    Whatever its length n: O(log n) to add, O(1) amortized to look at the first, to take one out
    and to find out who has waited too long. An entry that is no longer valid stays in its heap
    until it comes to the top, or until half of the heap is such.
    """

    def __init__(self, policy: Policy, starvation_s: float) -> None:
        self._policy = policy
        self._starvation_s = starvation_s
        self._tickets: dict[Sequence, int] = {}  # those that wait; a ticket for each entry
        self._heap: list[Entry] = []
        self._overdue: list[Entry] = []
        self._since: OrderedDict[Sequence, float] = OrderedDict()  # those that aren't overdue
        self._next_ticket = 0

    def rank(self, sequence: Sequence) -> Rank:
        """Where `sequence` stands, waiting or running: the overdue by arrival, then by policy."""
        if sequence.overdue:
            return (0, 0.0, *sequence.order)
        return (1, self._policy.key(sequence.request), *sequence.order)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._tickets

    def __iter__(self) -> Iterator[Sequence]:
        """In order, which takes a sort: for whoever looks, not for a step."""
        return iter(sorted(self._tickets, key=self.rank))

    def add(self, sequence: Sequence, now: float) -> None:
        """`sequence` waits from `now` on, in seconds that never go back."""
        rank = self.rank(sequence)  # first: one without a rank must leave nothing here
        ticket = self._next_ticket
        self._next_ticket += 1
        self._tickets[sequence] = ticket
        if sequence.overdue:  # once is for all: it only came back because others needed room
            heapq.heappush(self._overdue, (rank, ticket, sequence))
        else:
            heapq.heappush(self._heap, (rank, ticket, sequence))
            self._since[sequence] = now

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence` out, wherever it stands."""
        del self._tickets[sequence]
        self._since.pop(sequence, None)
        if len(self._heap) + len(self._overdue) > 2 * len(self._tickets) + 64 or not self._tickets:
            valid = [entry for entry in self._heap + self._overdue if self._is_valid(entry)]
            self._heap = [entry for entry in valid if entry[0][0]]
            self._overdue = [entry for entry in valid if not entry[0][0]]
            heapq.heapify(self._heap)
            heapq.heapify(self._overdue)

    def age(self, now: float) -> None:
        """Those that have waited longer than `starvation_s` by `now` become overdue."""
        while self._since:
            sequence, since = next(iter(self._since.items()))
            if now - since <= self._starvation_s:
                return
            self.remove(sequence)
            sequence.overdue = True
            self.add(sequence, now)

    def first(self) -> Sequence | None:
        """The next to go, of those that aren't set aside."""
        for heap in (self._overdue, self._heap):
            while heap:
                if self._is_valid(heap[0]):
                    return heap[0][2]
                heapq.heappop(heap)
        return None

    def set_aside(self) -> Entry:
        """Let the first be passed by the others until `put_back`; its time runs on."""
        return heapq.heappop(self._overdue or self._heap)

    def put_back(self, aside: list[Entry]) -> None:
        """Those that were set aside stand where they stood."""
        for entry in aside:
            heapq.heappush(self._heap if entry[0][0] else self._overdue, entry)

    def _is_valid(self, entry: Entry) -> bool:
        _, ticket, sequence = entry
        return self._tickets.get(sequence) == ticket
