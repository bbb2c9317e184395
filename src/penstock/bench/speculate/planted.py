"""Guesses that are right as often as they are told to be.

What would a method gain that is right so often and costs so much? The output is known from a plain
run, so any rate can be had, without a draft model and on any weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from penstock.config import SpeculativeConfig
from penstock.errors import ConfigError, nearest
from penstock.speculate import Draft, Wish

METHOD: Final = "planted"

_MOST: Final = 8
"""Tokens in a draft, unless the configuration says."""


@dataclass(frozen=True, slots=True)
class Planted:
    """How good the guesses are, and how many."""

    rate: float  # the probability that a guess is right where those before it are
    cost: float = 0.0  # of a plain step, what each guess takes
    num_speculative_tokens: int = _MOST
    adaptive: bool = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError(
                f"--planted {self.rate:g} isn't a probability. Choose one from 0 (no guess is "
                "right) to 1 (all are)."
            )
        if not (math.isfinite(self.cost) and self.cost >= 0.0):
            raise ConfigError(
                f"--planted-cost must be a share of a plain step, 0 or more, not {self.cost:g}."
            )

    @classmethod
    def of(cls, rate: float, cost: float, asked: Mapping[str, Any]) -> Planted:
        """With what a speculative_config asks for: of its keys, those that have a meaning here."""
        known = ("num_speculative_tokens", "adaptive")
        for name in asked:
            if name not in known:
                raise ConfigError(
                    f"--planted guesses by itself and has no use for {name!r}; beside it a "
                    f"speculative_config may have {' and '.join(known)}."
                    f"{nearest(str(name), known)}"
                )
        checked = SpeculativeConfig(method="ngram", **{"num_speculative_tokens": _MOST, **asked})
        assert checked.num_speculative_tokens is not None
        return cls(rate, cost, checked.num_speculative_tokens, checked.adaptive)


class PlantedProposer:
    """Knows what comes, and doesn't always say it."""

    name = METHOD
    last_caught_up = 0

    def __init__(
        self,
        known: Sequence[list[int]],
        rate: float,
        vocabulary: Sequence[int],
        seed: object,
        pass_s: float = 0.0,
    ) -> None:
        """known: whole sequences, prompts and outputs; vocabulary: ids for wrong guesses, at least
        two; pass_s: what a token of a draft takes.
        """
        self.by_passes = pass_s > 0.0
        self._known = known
        self._rate = rate
        self._vocabulary = vocabulary
        self._pass_s = pass_s
        self._random = Random(str(seed))
        self._found: dict[int, list[int]] = {}  # by the key's id, until it is forgotten

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish, none for a sequence that isn't known."""
        start = time.perf_counter()
        drafts = [self._draft(wish) for wish in wishes]
        end = start + self._pass_s * max(map(len, drafts), default=0)
        while time.perf_counter() < end:  # as a model that computes
            pass
        return drafts

    def _draft(self, wish: Wish) -> Draft:
        draft, at = Draft(wish.sampling), len(wish.tokens)
        draft.extend(
            token if self._random.random() < self._rate else self._other(token)
            for token in self._whole(wish)[at : at + wish.limit]
        )
        return draft

    def _whole(self, wish: Wish) -> list[int]:
        """The known sequence that begins with these tokens; two may have begun alike."""
        tokens = wish.tokens
        whole = self._found.get(id(wish.key), [])
        if whole[: len(tokens)] != tokens:
            like = (one for one in self._known if one[: len(tokens)] == tokens)
            whole = self._found[id(wish.key)] = next(like, [])
        return whole

    def _other(self, token: int) -> int:
        """Any token but this."""
        while (other := int(self._random.choice(self._vocabulary))) == token:
            pass
        return other

    def forget(self, key: object) -> None:
        """The sequence of that key has ended."""
        self._found.pop(id(key), None)
