"""An output that a caller expects, and how far the real one has come in it.

Most of a file that is to be edited comes back as it was: who sends it along says what to guess.
Source: OpenAI, API reference, chat completions, `prediction`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

_END: Final = -1
FIRM: Final = 16
"""Tokens in a row after which a guess may be as long as any, and how many are compared to find the
place again. The beginning counts for as many: nothing has spoken against it yet."""

TOKENS_PER_MATCHED: Final = 2
"""How long a guess may be, for each token that matches."""

KIND: Final = 64
"""Added to a draft's kind: how often other guesses are right says nothing about these."""

_NEAR: Final = 32
"""Places that are compared, nearest to where the output has left what was expected."""


class Prediction:
    """Where one sequence's output is in what is expected of it."""

    __slots__ = ("_behind", "_first", "_left", "_length", "_place", "_read", "_text")

    def __init__(self, text: Sequence[int], num_prompt: int) -> None:
        """text: the tokens that are expected after the `num_prompt` ones of the prompt."""
        self._text = text
        self._first = self._read = num_prompt
        self._place: int | None = 0  # of the token that should come next; None where it is lost
        self._left = 0  # the place after the last token that came as expected
        self._length = FIRM  # tokens in a row that have
        self._behind: dict[tuple[int, int], list[int]] = {}  # two tokens: the places after them

    def follow(self, tokens: list[int]) -> int:
        """How many of a sequence's last tokens are as expected; 0 where nothing can be guessed."""
        start, self._read = self._read, len(tokens)
        for token in tokens[start:]:
            if self._place is not None and self._at(self._place) == token:
                self._place += 1
                self._left, self._length = self._place, self._length + 1
            else:
                self._place = None
        if self._place is None and len(tokens) > start:
            self._find(tokens)
        return 0 if self._place is None or self._at(self._place) == _END else self._length

    def guess(self, limit: int) -> list[int]:
        """Up to `limit` tokens that should follow those that were read; `follow` isn't 0."""
        assert self._place is not None
        end = self._place + min(limit, TOKENS_PER_MATCHED * self._length)
        return list(self._text[self._place : end])

    def _at(self, place: int) -> int:
        return self._text[place] if place < len(self._text) else _END

    def _find(self, tokens: list[int]) -> None:
        """Go on where the output's last tokens stand, most of them; of such places, the nearest
        to where it left, those after it first.
        """
        if len(tokens) - self._first < 2:
            return
        if not self._behind:
            for place in range(2, len(self._text)):
                pair = (self._text[place - 2], self._text[place - 1])
                self._behind.setdefault(pair, []).append(place)
        places = self._behind.get((tokens[-2], tokens[-1]), [])
        middle = bisect_left(places, self._left)
        near = places[middle : middle + _NEAR] + places[max(middle - _NEAR, 0) : middle][::-1]
        tail = tokens[max(self._first, len(tokens) - FIRM) :][::-1]
        self._length = 0
        for place in near:
            length = self._matching(tail, place)
            if length > self._length:
                self._place, self._length = place, length

    def _matching(self, tail: list[int], place: int) -> int:
        """How many tokens before a place are those of `tail`, which begins with the last one."""
        for count, token in enumerate(tail):
            if count == place or self._text[place - 1 - count] != token:
                return count
        return len(tail)
