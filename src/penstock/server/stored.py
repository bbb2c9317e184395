"""Responses that are kept for a while, so that a later request can go on from one by its id.

In memory, in so many bytes: what was used longest ago goes first, and nothing stays that long
unused. Each has what its request brought and a link to the one before it, so a conversation is
there once, however many turns it has. Source: OpenAI's Responses API (`store`,
`previous_response_id`), which keeps them for 30 days.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

_ENTRY_BYTES = 1024
"""That one takes beside its texts, about."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One response, as JSON: all but its output, its output's items, and its own input's.

    owner: whose key asked for it; count: items of both; previous: the id of the one before it.
    """

    id: str
    owner: str
    head: bytes
    output: bytes
    input: bytes
    count: int
    previous: str | None = None

    @property
    def items_bytes(self) -> int:
        """Of the items of both."""
        return len(self.output) + len(self.input)

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        return len(self.head) + self.items_bytes + _ENTRY_BYTES


class UnknownResponse(LookupError):  # noqa: N818 — it becomes an error of the API
    """There is none of this id for this owner: never, or no longer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(slots=True)
class _Entry:
    stored: Stored
    used: float  # when, by the clock


class StoredResponses:
    """The latest ones. For any thread."""

    def __init__(
        self, capacity: int, keep_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """capacity: bytes of all; keep_s: since one was used last."""
        self.capacity, self._keep_s, self._clock = capacity, keep_s, clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # what was used last is at the end
        self._size = 0
        self._lock = Lock()

    def put(self, one: Stored) -> bool:
        """Whether it is kept: not one that is larger than all may be, or whose id is taken."""
        with self._lock:
            self._forget_old()
            if one.size > self.capacity or one.id in self._entries:
                return False
            self._entries[one.id] = _Entry(one, self._clock())
            self._size += one.size
            while self._size > self.capacity:
                self._remove(next(iter(self._entries)))
            return True

    def get(self, owner: str, name: str) -> Stored:
        """It. Raises UnknownResponse. What it goes on from is used too: see `chain`."""
        with self._lock:
            self._forget_old()
            return self._walk(owner, name)[0][0]

    def chain(self, owner: str, name: str) -> list[Stored]:
        """It and all before it, the first one first. Raises UnknownResponse, also for one of those.

        The first is used last, so that conversations are forgotten from their ends.
        """
        with self._lock:
            self._forget_old()
            found, missing = self._walk(owner, name)
            if missing is not None:
                raise UnknownResponse(missing)
            return found[::-1]

    def delete(self, owner: str, name: str) -> None:
        """Forget it. Raises UnknownResponse."""
        with self._lock:
            self._forget_old()
            self._use(owner, name)
            self._remove(name)

    @property
    def count(self) -> int:
        """How many are kept."""
        with self._lock:
            self._forget_old()
            return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes of all."""
        with self._lock:
            self._forget_old()
            return self._size

    def _walk(self, owner: str, name: str) -> tuple[list[Stored], str | None]:
        """It and those before it, the first one last, and the id of one that isn't there any more.
        Raises UnknownResponse.
        """
        found = [self._use(owner, name)]
        while (before := found[-1].previous) is not None:
            if before not in self._entries or len(found) == len(self._entries):
                return found, before
            found.append(self._use(owner, before))
        return found, None

    def _use(self, owner: str, name: str) -> Stored:
        entry = self._entries.get(name)
        if entry is None or entry.stored.owner != owner:
            raise UnknownResponse(name)
        entry.used = self._clock()
        self._entries.move_to_end(name)
        return entry.stored

    def _remove(self, name: str) -> None:
        self._size -= self._entries.pop(name).stored.size

    def _forget_old(self) -> None:
        oldest = self._clock() - self._keep_s
        while self._entries:
            name, entry = next(iter(self._entries.items()))
            if entry.used > oldest:
                return
            self._remove(name)
