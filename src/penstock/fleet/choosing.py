"""Which instance a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from penstock.errors import ConfigError
from penstock.fleet.ask import CHUNK_BYTES, Ask
from penstock.fleet.worker import Worker

_KEPT_CHUNKS = 1 << 14  # of each instance: 2 MB of prompts
_AHEAD, _AHEAD_TIMES = 4, 1.5
"""Sequences, and times as many, that an instance may have more than the idlest one and still be
sent what it knows."""


class Chooser(Protocol):
    """A policy. It is asked by one task at a time."""

    def choose(self, workers: Sequence[Worker], ask: Ask) -> Worker:
        """One of them; there is at least one."""

    def knows(self, workers: Sequence[Worker], ask: Ask) -> float:
        """The most of a prompt's beginning that one of them was sent before, as far as is known."""

    def forget(self, worker: Worker) -> None:
        """It has ended, and with it all that it kept."""


def chooser_of(policy: str) -> Chooser:
    """The policy of this name. Raises ConfigError."""
    match policy:
        case "prefix":
            return ByPrefix()
        case "least":
            return Least()
        case "round_robin":
            return RoundRobin()
    raise ConfigError(f"There is no policy {policy!r}.")


def _busyness(worker: Worker) -> tuple[float, str]:
    return worker.outstanding / max(1, worker.capacity), worker.name


class Least:
    """The one that is least busy, by requests over what it can do at once."""

    def choose(self, workers: Sequence[Worker], ask: Ask) -> Worker:
        return min(workers, key=_busyness)

    def knows(self, workers: Sequence[Worker], ask: Ask) -> float:
        return 0.0

    def forget(self, worker: Worker) -> None:
        """It keeps nothing."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, workers: Sequence[Worker], ask: Ask) -> Worker:
        return workers[next(self._turns) % len(workers)]

    def knows(self, workers: Sequence[Worker], ask: Ask) -> float:
        return 0.0

    def forget(self, worker: Worker) -> None:
        """It keeps nothing."""


class ByPrefix:
    """The one that computed most of the prompt's beginning, unless it is far busier than another.

    What an instance has in its cache isn't asked: what it was sent is remembered, chunk by chunk,
    each known by a hash of all up to its end (as in SGLang's router, whose rule of imbalance
    this is too).
    """

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[int, None]] = {}
        self.hits = 0  # chunks that the chosen one knew
        self.asked = 0

    def choose(self, workers: Sequence[Worker], ask: Ask) -> Worker:
        path = ask.chunks
        lengths = {worker.name: self._length(worker.name, path) for worker in workers}
        idlest = min(workers, key=_busyness)
        chosen = max(workers, key=lambda x: (lengths[x.name], -_busyness(x)[0]))
        if not lengths[chosen.name]:
            chosen = min(workers, key=lambda x: (_busyness(x)[0], self._size(x.name), x.name))
        elif _is_ahead(chosen.outstanding, idlest.outstanding):
            chosen = idlest
        self.asked += len(path)
        self.hits += lengths[chosen.name]
        self._remember(chosen.name, path)
        return chosen

    def knows(self, workers: Sequence[Worker], ask: Ask) -> float:
        path = ask.chunks
        most = max((self._length(worker.name, path) for worker in workers), default=0)
        return most * CHUNK_BYTES / max(len(ask.prefix), ask.size, 1)

    def forget(self, worker: Worker) -> None:
        self._known.pop(worker.name, None)

    def _size(self, name: str) -> int:
        return len(self._known.get(name, ()))

    def _length(self, name: str, path: Sequence[int]) -> int:
        known = self._known.get(name)
        if known is None:
            return 0
        return next((i for i, chunk in enumerate(path) if chunk not in known), len(path))

    def _remember(self, name: str, path: Sequence[int]) -> None:
        known = self._known.setdefault(name, OrderedDict())
        for chunk in reversed(path):  # so that ends are forgotten before beginnings
            known[chunk] = None
            known.move_to_end(chunk)
        while len(known) > _KEPT_CHUNKS:
            known.popitem(last=False)


def _is_ahead(one: int, other: int) -> bool:
    return one > other + _AHEAD and one > other * _AHEAD_TIMES
