"""DRY, "don't repeat yourself": a penalty on tokens that would prolong a repetition.

Where the last n tokens stand elsewhere in the text, followed by token t, t loses
multiplier · base^(n − allowed_length) if n ≥ allowed_length; the longest such n counts. Repetitions
end at sequence breakers.

Source: p-e-w 2024, github.com/oobabooga/text-generation-webui, pull request 5677.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.sampling.params import SamplingParams

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]

_FIRST_CAPACITY: Final = 256
_HIGHEST: Final = 1e30
"""A penalty beyond this is as good as this."""


@dataclass(frozen=True, slots=True)
class DryParams:
    """How repetitions are punished; llama.cpp's names and defaults."""

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1  # tokens that are looked at; -1: all

    @classmethod
    def of(cls, params: SamplingParams) -> DryParams:
        """Those of a request."""
        return cls(
            params.dry_multiplier, params.dry_base, params.dry_allowed_length,
            params.dry_penalty_last_n,
        )  # fmt: skip


class DryState:
    """One sequence's tokens, and how long a repetition each of them ends.

    After each token the lengths come from those before it by one pass over the text, so a step
    costs as much as reading the text, not as searching it.
    """

    __slots__ = ("_breakers", "_length", "_matches", "_params", "_tokens")

    def __init__(self, params: DryParams, tokens: Sequence[int], breakers: Container[int]) -> None:
        """breakers: ids of the tokens that no repetition goes beyond."""
        self._params = params
        self._breakers = breakers
        self._length = len(tokens)
        self._tokens: Ids = np.empty(max(_FIRST_CAPACITY, 2 * len(tokens)), dtype=np.int64)
        self._tokens[: len(tokens)] = tokens
        # [i]: how many tokens up to and with i are also the last ones of the text
        self._matches: npt.NDArray[np.int32] = np.zeros(len(self._tokens), dtype=np.int32)
        since = next((i for i, t in enumerate(reversed(tokens)) if t in breakers), len(tokens))
        self._matches[: len(tokens)] = np.minimum(_suffix_matches(tokens), since)

    def append(self, token: int) -> None:
        """Go on by one token."""
        n = self._length
        if n == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
            self._matches = np.concatenate((self._matches, np.zeros_like(self._matches)))
        matches = self._matches
        if token in self._breakers:
            matches[:n] = 0
        elif n:
            same = self._tokens[:n] == token
            matches[1:n] = (matches[: n - 1] + 1) * same[1:]
            matches[0] = same[0]
        matches[n] = 0  # it isn't a repetition of itself
        self._tokens[n] = token
        self._length = n + 1

    def fork(self) -> DryState:
        """The same state for another sequence with the same tokens."""
        twin = object.__new__(DryState)
        twin._params, twin._breakers, twin._length = self._params, self._breakers, self._length
        twin._tokens, twin._matches = self._tokens.copy(), self._matches.copy()
        return twin

    def penalties(self) -> tuple[Ids, Values]:
        """What tokens lose now: ids [N], each once, and values [N]."""
        n, params = self._length, self._params
        first = 0 if params.last_n < 0 else max(n - params.last_n, 0)
        if n - first < 2:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        within = np.arange(1, n - first, dtype=np.int32)  # a repetition begins in the window
        lengths = np.minimum(self._matches[first : n - 1], within)
        at = np.flatnonzero(lengths >= params.allowed_length)
        ids, place = np.unique(self._tokens[first + 1 + at], return_inverse=True)
        longest = np.zeros(len(ids), dtype=np.int32)
        np.maximum.at(longest, place, lengths[at])
        return ids, self._values(longest - params.allowed_length)

    def _values(self, beyond: npt.NDArray[np.int32]) -> Values:
        params = self._params
        most = math.log(_HIGHEST / params.multiplier) / max(math.log(params.base), 1e-9)
        exponents = np.minimum(beyond, most)
        values = params.multiplier * params.base**exponents
        return values.astype(np.float32)


def _suffix_matches(tokens: Sequence[int]) -> npt.NDArray[np.int32]:
    """For each place, how many tokens up to and with it are also the last ones; 0 for the last.

    The Z-function of the reversed text: Gusfield 1997, Algorithms on Strings, §1.4.
    """
    text = list(reversed(tokens))
    n, found = len(text), [0] * len(text)
    low = high = 0  # text[low:high] is a prefix of the text
    for i in range(1, n):
        length = min(high - i, found[i - low]) if i < high else 0
        while i + length < n and text[length] == text[i + length]:
            length += 1
        found[i] = length
        if i + length > high:
            low, high = i, i + length
    return np.array(found[::-1], dtype=np.int32)
