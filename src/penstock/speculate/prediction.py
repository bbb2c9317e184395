"""An output that a caller expects, and how far the real one has come in it.

Most of a file that is to be edited comes back as it was: who sends it along says what to guess.
Source: OpenAI, API reference, chat completions, `prediction`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np

_END: Final = -1

FIRM: Final = 16
"""Tokens in a row after which a guess may be as long as any, and how many are compared to find the
place again. The beginning counts for as many: nothing has spoken against it yet."""

TOKENS_PER_MATCHED: Final = 2
"""How long a guess may be, for each token that matches."""

KIND: Final = 64
"""Added to a draft's kind: how often other guesses are right says nothing about these."""

LONGEST_WAIT: Final = 64
"""Steps at most, after guesses that were found not to pay, before others are looked for."""

_NEAR: Final = 8
"""Places that are compared, nearest to where the output has left what was expected."""


class Expected:
    """What a request's outputs are expected to be: its tokens, and where each two of them stand."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    @cached_property
    def _pairs(self) -> tuple[array[int], array[int]]:
        """All pairs of tokens, in order, and the place after each, equal pairs' in order too."""
        tokens = np.asarray(self.tokens, dtype=np.int64)
        pairs = tokens[:-1] << 32 | tokens[1:]
        order = np.argsort(pairs, kind="stable")
        # which are searched faster than numpy's
        return array("q", pairs[order].tobytes()), array("q", (order + 2).tobytes())

    def near(self, first: int, second: int, place: int) -> Sequence[int]:
        """Places after these two tokens: those from `place` on, then those before it, the nearest
        first; some of each at most.
        """
        pairs, places = self._pairs
        pair = first << 32 | second
        low = bisect_left(pairs, pair)
        if low == len(pairs) or pairs[low] != pair:
            return ()
        high = bisect_right(pairs, pair, low)
        middle = bisect_left(places, place, low, high)
        after = places[middle : min(middle + _NEAR, high)]
        return after + places[max(middle - _NEAR, low) : middle][::-1]


class Prediction:
    """Where one sequence's output is in what is expected of it."""

    __slots__ = (
        "_expected",
        "_first",
        "_left",
        "_length",
        "_next_wait",
        "_place",
        "_read",
        "_wait",
    )

    def __init__(self, expected: Expected, num_prompt: int) -> None:
        """expected: after the `num_prompt` tokens of the prompt."""
        self._expected = expected
        self._first = self._read = num_prompt
        self._place: int | None = 0  # of the token that should come next; None where it is lost
        self._left = 0  # the place after the last token that came as expected
        self._length = FIRM  # tokens in a row that have
        self._wait, self._next_wait = 0, 1  # steps in which nobody looks

    def is_due(self, tokens: list[int]) -> bool:
        """Whether to look, in this step, for guesses that nobody else would have looked for."""
        if self._wait:
            self._wait -= 1
            return False
        return self.follow(tokens) > 0

    def judge(self, pays: bool) -> None:
        """Whether guesses were predicted to pay; where not, the next look is later each time."""
        self._wait = 0 if pays else self._next_wait
        self._next_wait = 1 if pays else min(2 * self._next_wait, LONGEST_WAIT)

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
        return list(self._expected.tokens[self._place : end])

    def _at(self, place: int) -> int:
        tokens = self._expected.tokens
        return tokens[place] if place < len(tokens) else _END

    def _find(self, tokens: list[int]) -> None:
        """Go on where the output's last tokens stand, most of them; of such places, the nearest
        to where it left, those after it first.
        """
        if len(tokens) - self._first < 2:
            return
        tail = tokens[max(self._first, len(tokens) - FIRM) :][::-1]
        self._length = 0
        for place in self._expected.near(tokens[-2], tokens[-1], self._left):
            length = self._matching(tail, place)
            if length > self._length:
                self._place, self._length = place, length

    def _matching(self, tail: list[int], place: int) -> int:
        """How many tokens before a place are those of `tail`, which begins with the last one."""
        for count, token in enumerate(tail):
            if count == place or self._expected.tokens[place - 1 - count] != token:
                return count
        return len(tail)
