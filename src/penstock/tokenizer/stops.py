"""Finding stop strings in text that arrives in pieces.

An Aho-Corasick automaton whose states are made when the text first reaches them: nothing is
prepared but a sorted list, so a stop string of a million characters costs as much as was matched
of it, and a thousand stop strings cost a dictionary look-up a character. The depth of the current
state is the length of the longest end of the text that begins some stop string: exactly the text
that must not be shown yet.
Source: Aho & Corasick 1975, doi:10.1145/360825.360855.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string and where it lies in the text fed so far."""

    stop: str
    start: int
    end: int


class _State:
    """A prefix of stop strings: those sorted ones from `low` to `high` that begin with it."""

    __slots__ = ("depth", "fallback", "found", "high", "low", "next")

    def __init__(self, low: int, high: int, depth: int) -> None:
        self.low, self.high, self.depth = low, high, depth
        self.next: dict[str, _State] = {}
        # The state of the longest proper suffix that is a prefix too; None for the root.
        self.fallback: _State | None = None
        # The longest stop string that ends here.
        self.found: str | None = None


class StopFinder:
    """Finds the stop string that is complete first; of two that end together, the longer.

    Both rules don't depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops))
        self._root = _State(0, len(self._stops), 0)
        self._state = self._root
        self._fed = 0
        firsts = "".join(re.escape(stop[0]) for stop in self._stops)
        self._first = re.compile(f"[{firsts}]")

    @property
    def held(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return self._state.depth

    def feed(self, text: str) -> StopMatch | None:
        """Read on; the first match, after which the finder is not to be fed again."""
        state, root = self._state, self._root
        index, length = 0, len(text)
        while index < length:
            if state is root:
                # Text in which no stop string begins is skipped at the speed of `re`.
                match = self._first.search(text, index)
                if match is None:
                    break
                index = match.start()
            character = text[index]
            state = state.next.get(character) or self._advance(state, character)
            index += 1
            if state.found is not None:
                end = self._fed + index
                return StopMatch(state.found, end - len(state.found), end)
        self._state = state
        self._fed += length
        return None

    def _advance(self, state: _State, character: str) -> _State:
        """Make the transition from `state`, and those of its fallbacks that lack it."""
        lacking: list[_State] = []
        node: _State | None = state
        while node is not None and character not in node.next:
            lacking.append(node)
            node = node.fallback
        target = self._root if node is None else node.next[character]
        # From the shortest suffix up: a longer prefix falls back to the one made before it.
        for parent in reversed(lacking):
            child = self._child(parent, character)
            if child is not None:
                child.fallback = target
                own = self._stops[child.low]
                child.found = own if len(own) == child.depth else target.found
                target = child
            parent.next[character] = target
        return target

    def _child(self, parent: _State, character: str) -> _State | None:
        depth = parent.depth

        def at(stop: str) -> str:
            return stop[depth : depth + 1]

        low = bisect_left(self._stops, character, parent.low, parent.high, key=at)
        high = bisect_right(self._stops, character, low, parent.high, key=at)
        return _State(low, high, depth + 1) if low < high else None
