"""Prompt lookup: what followed the last tokens where they stood before, in prompt or output.

Source: Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023,
arXiv:2304.04487. Their search of the whole text is replaced by an index that grows with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from penstock.errors import ConfigError
from penstock.speculate.matches import Runs
from penstock.speculate.proposer import Draft, Wish, looked_up

MIN_MATCH: Final = 2
"""Tokens that must match, unless somebody chose."""

MAX_MATCH: Final = 16
"""Tokens that are looked at, unless somebody chose."""

TOKENS_PER_MATCHED: Final = 2
"""How long a guess may be, for each token that matches: short matches are mostly chance."""


class NgramProposer:
    """Guesses that a text goes on as it did after the longest run of tokens that it repeats.

    Where several places match equally well, the latest is taken: a list's items, a loop's lines and
    a dialogue's turns change slowly, so that the nearest is likeliest to be followed in the same
    way.
    """

    name = "ngram"
    by_passes = False
    last_caught_up = 0

    def __init__(self, min_match: int = MIN_MATCH, max_match: int = MAX_MATCH) -> None:
        """How many tokens must match, and how many are looked at."""
        if min_match > max_match:
            raise ConfigError(
                f"prompt_lookup_min={min_match} is above prompt_lookup_max={max_match}. Lower the "
                "first or raise the second."
            )
        self._min, self._max = min_match, max_match
        self._runs: dict[object, Runs] = {}

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish, of no tokens where its end never stood before."""
        drafts = []
        for wish in wishes:
            length, place = self.match(wish.key, wish.tokens)
            guess = partial(self._guess, wish.tokens, length, place, wish.limit)
            drafts.append(looked_up(wish, length, guess))
        return drafts

    @property
    def nbytes(self) -> int:
        """What the indexes of sequences that haven't ended take."""
        return sum(runs.nbytes for runs in self._runs.values())

    def guess(self, key: object, tokens: list[int], limit: int) -> list[int]:
        """Up to `limit` tokens that may follow `tokens`, the sequence of that key."""
        return self._guess(tokens, *self.match(key, tokens), limit)

    @staticmethod
    def _guess(tokens: list[int], length: int, place: int, limit: int) -> list[int]:
        limit = min(limit, TOKENS_PER_MATCHED * length)
        return continued(tokens, place, limit) if place else []

    def match(self, key: object, tokens: list[int]) -> tuple[int, int]:
        """How many of the last tokens stood before, and the place after them; 0, 0 for none."""
        runs = self._runs.get(key)
        if runs is None:
            runs = self._runs[key] = Runs(self._min, self._max, 2 * len(tokens))
        runs.read(tokens)
        length, places = runs.find(tokens, tokens[-self._max :], runs.hashes, first=True)
        return length, places[0] if places else 0

    def forget(self, key: object) -> None:
        """The sequence of that key has ended."""
        self._runs.pop(key, None)


def continued(tokens: list[int], place: int, limit: int) -> list[int]:
    """What stands at `place` and after it; from the end of the text on, what was guessed so far.

    So a text that repeats itself goes on repeating itself, however short its period.
    """
    found = tokens[place : place + limit]
    return (found * -(-limit // len(found)))[:limit]
