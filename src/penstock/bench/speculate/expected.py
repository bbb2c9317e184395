"""What speculation should gain, from how often guesses are right and what they cost.

A step that verifies a draft of γ tokens gives 1 + P(the first is right) + … + P(all γ are) tokens.
With one rate α for every place that is (1 − α^(γ+1)) / (1 − α); with drafting at c of a plain step
for each token, and verification for the price of a plain step, the speed-up is
(1 − α^(γ+1)) / ((1 − α)(γc + 1)).
Source: Leviathan, Kalman & Matias 2023, arXiv:2211.17192, theorem 3.8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from penstock.roofline import StepSize
from penstock.speculate import DraftCounts

_HALVINGS: Final = 50
"""Of the interval in which the break-even rate lies."""


@dataclass(slots=True)
class DraftLog(DraftCounts):
    """Every draft that was verified: how deep, and how much of it was right."""

    lengths: Counter[tuple[int, int]] = field(default_factory=Counter)

    def count(self, drafted: int, accepted: int, depth: int) -> None:
        """A draft of so many tokens, `depth` one after another, of which so many were right."""
        DraftCounts.count(self, drafted, accepted, depth)
        self.lengths[depth, accepted] += 1

    def places(self) -> list[Place]:
        """By place in the draft, as far as any draft went."""
        longest = max((drafted for drafted, _ in self.lengths), default=0)
        found = [Place() for _ in range(longest)]
        for (drafted, accepted), times in self.lengths.items():
            for i, place in enumerate(found[:drafted]):
                place.drafts += times
                place.tested += times * (i <= accepted)
                place.accepted += times * (i < accepted)
        return found


@dataclass(slots=True)
class Place:
    """A place in drafts."""

    drafts: int = 0  # that were so long
    tested: int = 0  # of these, with all tokens before it right
    accepted: int = 0  # of these, right

    @property
    def rate(self) -> float:
        """How often it is right where those before it are; 0 where they never were."""
        return self.accepted / self.tested if self.tested else 0.0


def rate_of(places: Iterable[Place]) -> float | None:
    """α: of the guesses that were compared, the share that was right; None where none was."""
    all_of = list(places)
    tested = sum(place.tested for place in all_of)
    return sum(place.accepted for place in all_of) / tested if tested else None


def geometric_tokens(alpha: float, length: float) -> float:
    """What a step with a draft of `length` gives, each place right with `alpha`."""
    if alpha >= 1.0:
        return length + 1.0
    return (1.0 - math.pow(alpha, length + 1.0)) / (1.0 - alpha)


def tokens_by_place(places: Sequence[Place], length: int) -> float:
    """The same with a rate for each place."""
    total, reached = 1.0, 1.0
    for place in places[:length]:
        reached *= place.rate
        total += reached
    return total


def drafted_of(size: StepSize) -> list[int]:
    """The length of each sequence's draft in a step that decodes."""
    return [count - 1 for count in size.queries]


def speedup_of(
    sizes: Iterable[StepSize],
    tokens: Callable[[int], float],
    seconds: Callable[[StepSize], float],
    plain_s: float,
) -> float:
    """Of steps that give each sequence `tokens` of its draft's length, and take `seconds` each.

    plain_s: a step without drafts, which gives each sequence one token.
    """
    plain = spent = 0.0
    for size in sizes:
        given = sum(map(tokens, drafted_of(size)))
        plain += plain_s * given / len(size.queries)
        spent += seconds(size)
    return plain / spent


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds of a full batch's steps."""

    batch: int
    plain_s: float  # a step of the plain engine
    by_drafted: Sequence[float]  # a step that verifies 0, 1, … tokens, drafting apart
    draft_s: float  # for each token of a draft, or for the whole draft …
    by_passes: bool  # … where no token takes a pass

    def drafting_s(self, length: int) -> float:
        """Drafts of `length` tokens."""
        return self.draft_s * length if self.by_passes else self.draft_s * (length > 0)

    def best(self, alpha: float, most: int) -> tuple[float, int]:
        """The best speed-up with drafts at a rate of `alpha`, and their length, 1 … `most`."""
        return max(
            (geometric_tokens(alpha, length) * self.by_drafted[0] / self._seconds(length), length)
            for length in range(1, most + 1)
        )

    def _seconds(self, length: int) -> float:
        return self.by_drafted[length * self.batch] + self.drafting_s(length)

    def break_even(self, most: int) -> float | None:
        """The least rate at which some length is as fast as plain steps; None where none is."""
        if self.best(1.0, most)[0] < 1.0:
            return None
        low, high = 0.0, 1.0
        if self.best(low, most)[0] >= 1.0:
            return low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.best(middle, most)[0] < 1.0:
                low = middle
            else:
                high = middle
        return high
