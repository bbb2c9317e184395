"""Summaries that were written lately: nobody writes them twice (`server.compaction`)."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

_MOST_REMEMBERED = 1024


class Remembered:
    """How far conversations were summarised, by what they were up to then; the latest ones."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: bytes) -> tuple[int, str] | None:
        """(messages that are summarised, the summary)."""
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def put(self, key: bytes, summarised: int, summary: str) -> None:
        """Remember it, and forget what was asked for longest ago."""
        with self._lock:
            self._known[key] = summarised, summary
            self._known.move_to_end(key)
            while len(self._known) > _MOST_REMEMBERED:
                self._known.popitem(last=False)
