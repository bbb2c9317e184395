"""How long drafts should be: as long as they are predicted to pay.

A step of B sequences whose drafts hold n tokens in all gives B + Σ P(the first j of draft i are
right) tokens, and takes t(B, n) seconds, and drafting's. Both are measured: how often a guess was
what came, and what steps took. `Controller.choose` takes the guesses in the order of what they
promise, as many as make tokens per second the most; none, where none makes them more than a plain
step does. Then the best of them are tried now and then, for a hundredth of the time, to see whether
they would pay by now; and where guesses cost nothing but their verification, they are made all the
same and compared with what comes.
Source: Leviathan, Kalman & Matias 2023, arXiv:2211.17192, section 3.4, for one sequence and one
rate; the gain of each further token against its cost: Liu et al. 2024, arXiv:2406.14066.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

NOBODY: Rows = np.zeros(0, dtype=np.int64)

FIRST, LATER = 0.6, 0.8
"""How often guesses are right before any was seen: a draft's first token, each one after it."""

MEMORY = 0.95
"""Of what was seen before, after each further draft of a sequence."""

LONG_MEMORY = 0.995
"""The same of all sequences together."""

TRUST = 4.0
"""Guesses' worth of trust in what all sequences showed, against one sequence's own."""

MARGIN = 1.02
"""Speculation must be predicted to be faster than plain steps by this factor."""

BUDGET = 0.01
"""The share of the time that may be spent on finding out whether speculation would pay."""

SAVINGS = 20.0
"""As many steps' time at most is kept for that."""

NEWEST = 0.1
"""The weight of the newest step in the average of those like it."""

PLAIN_STEPS = 3
"""Plain steps that are measured before the first draft, at each size of batch."""

ASSUMED_SLOPE = 0.03
"""What a draft's token adds to a step, as a share of it, until two lengths were measured."""


@dataclass(slots=True)
class Rate:
    """How often something was so, the past weighing less and less."""

    hits: float = 0.0
    trials: float = 0.0

    def see(self, hits: int, trials: int, memory: float) -> None:
        self.hits = self.hits * memory + hits
        self.trials = self.trials * memory + trials

    def after(self, prior: float, weight: float) -> float:
        """The rate, where before anything was seen it was `prior`, as if seen `weight` times."""
        return (self.hits + prior * weight) / (self.trials + weight)


@dataclass(slots=True)
class Record:
    """What became of guesses: a draft's first tokens, and later ones whose elder was right."""

    first: Rate = field(default_factory=Rate)
    later: Rate = field(default_factory=Rate)

    def see(self, right: int, tested: int, memory: float) -> None:
        """Of a draft, the first `tested` tokens were tested, of which the first `right` came."""
        if not tested:
            return
        self.first.see(min(right, 1), 1, memory)
        if right:
            tried = min(right + 1, tested) - 1
            self.later.see(right - 1, tried, memory)


class StepTimes:
    """Seconds of decoding steps, by the number of sequences and of drafts' tokens."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, list[float]]] = {}  # batch → tokens → [seconds, count]

    def see(self, batch: int, drafted: int, seconds: float) -> None:
        """A step took so long; one that was held up counts as half as long again at most."""
        known = self._seen.setdefault(_class_of(batch), {})
        entry = known.setdefault(drafted, [seconds, 0.0])
        bounded = min(max(seconds, 0.5 * entry[0]), 1.5 * entry[0])
        entry[1] += 1.0
        entry[0] += max(NEWEST, 1.0 / entry[1]) * (bounded - entry[0])

    def plain_steps(self, batch: int) -> int:
        """How many steps without drafts were seen."""
        return int(self._seen.get(_class_of(batch), {}).get(0, (0.0, 0.0))[1])

    def seconds(self, batch: int, most: int) -> Floats:
        """Predicted for 0 … `most` tokens in drafts, [most + 1]; never less for more of them."""
        known = self._seen[_class_of(batch)]
        at = sorted(known)
        times = _ascending([(known[n][0], known[n][1]) for n in at])
        if len(at) > 1:
            slope = (times[-1] - times[0]) / (at[-1] - at[0])
        else:
            slope = ASSUMED_SLOPE * times[0]
        wanted = np.arange(most + 1)
        found: Floats = np.interp(wanted, at, times)
        found += slope * np.maximum(wanted - at[-1], 0)
        return found


def _ascending(seen: Sequence[tuple[float, float]]) -> Floats:
    """The values nearest to some that never fall; each with how many times it was seen.

    Neighbours that fall are taken together: Ayer et al. 1955, doi:10.1214/aoms/1177728423.
    """
    pools: list[tuple[float, float, int]] = []  # (mean, weight, places)
    for value, count in seen:
        mean, weight, places = value, min(count, 1.0 / NEWEST), 1
        while pools and pools[-1][0] >= mean:
            before, more, others = pools.pop()
            mean = (mean * weight + before * more) / (weight + more)
            weight, places = weight + more, places + others
        pools.append((mean, weight, places))
    means = [mean for mean, _, _ in pools]
    return np.repeat(np.array(means), [places for _, _, places in pools])


def _class_of(batch: int) -> int:
    """Batches that are taken for alike."""
    return batch if batch <= 4 else 4 + (batch - 1).bit_length()


class Controller:
    """Decides how many of the guesses are verified, or made at all."""

    def __init__(self, most: int, *, adaptive: bool, by_passes: bool) -> None:
        """most: tokens in a draft; by_passes: whether each of them takes a pass of a model."""
        self.most = most
        self.adaptive = adaptive
        self.by_passes = by_passes
        self.times = StepTimes()
        self.overall: defaultdict[int, Record] = defaultdict(Record)  # by kind of draft
        self.pass_s = 0.0  # one token of a draft, or, without passes, all of them
        self._budget_s = 0.0
        self.is_on = True  # whether the last choice had drafts

    # ── before a step ────────────────────────────────────────────────────────────────────────

    def may_guess(self, batch: int) -> bool:
        """Whether to guess at all, before a step of `batch` sequences."""
        if not self.adaptive:
            return True
        if self.times.plain_steps(batch) < PLAIN_STEPS:
            return False
        return self.is_on or self.pass_s <= self._budget_s

    def choose(
        self, batch: int, records: Sequence[Record], room: Sequence[int], kinds: Sequence[int] = ()
    ) -> list[int]:
        """How long the draft of each of some sequences should be, up to its `room`.

        batch: the sequences of the step, those included. records: of each one's own drafts of that
        kind. kinds: of the drafts, where they aren't all of kind 0.
        """
        room = [min(most, self.most) for most in room]
        if not self.adaptive:
            return room
        depth = np.arange(1, max(room) + 1)
        first, later = self._rates(records, kinds or [0] * len(records))
        gains = first[:, None] * later[:, None] ** (depth - 1)
        gains[depth > np.array(room)[:, None]] = 0.0
        seconds = self.times.seconds(batch, sum(room))
        plain = batch / seconds[0]
        best, loss, rows = 0.0, 0.0, NOBODY
        for passes in depth if self.by_passes else depth[-1:]:
            order = np.argsort(-gains[:, :passes], axis=None, kind="stable")
            order = order[: np.count_nonzero(gains[:, :passes])]
            drafting = self.pass_s * passes if self.by_passes else 0.0
            promised = batch + np.cumsum(gains[:, :passes].ravel()[order])
            took = seconds[1 : len(order) + 1] + drafting
            at = int(np.argmax(promised / took))
            if promised[at] / took[at] > best:
                best, rows = promised[at] / took[at], order[: at + 1] // passes
                loss = took[at] - promised[at] / plain
        self.is_on = bool(best > plain * MARGIN)
        if not self.is_on and not self._affords(max(loss, BUDGET * seconds[0])):
            rows = NOBODY
        lengths: list[int] = np.bincount(rows, minlength=len(room)).tolist()
        return lengths

    def _rates(self, records: Sequence[Record], kinds: Sequence[int]) -> tuple[Floats, Floats]:
        first, later = [], []
        for record, kind in zip(records, kinds, strict=True):
            all_of_it = self.overall[kind]
            first.append(record.first.after(all_of_it.first.after(FIRST, TRUST), TRUST))
            later.append(record.later.after(all_of_it.later.after(LATER, TRUST), TRUST))
        return np.array(first), np.array(later)

    def _affords(self, seconds: float) -> bool:
        """Whether to try the best that there is though it won't pay, at the price of so much."""
        if seconds > self._budget_s:
            return False
        self._budget_s -= seconds
        return True

    # ── after it ─────────────────────────────────────────────────────────────────────────────

    def saw_step(self, batch: int, drafted: int, seconds: float) -> None:
        """A decoding step took `seconds`, drafting apart."""
        self.times.see(batch, drafted, seconds)
        self._budget_s = min(self._budget_s + BUDGET * seconds, SAVINGS * seconds)

    def saw_drafting(self, passes: int, seconds: float) -> None:
        """Drafts of up to so many tokens took `seconds`."""
        each = seconds / max(passes, 1) if self.by_passes else seconds
        self.pass_s += 0.2 * (each - self.pass_s) if self.pass_s else each
        if not self.is_on and not self.by_passes:
            self._budget_s = max(self._budget_s - seconds, 0.0)

    def saw_guess(self, record: Record, right: int, tested: int, kind: int = 0) -> None:
        """Of a sequence's draft, `tested` tokens were tested and the first `right` of them came."""
        record.see(right, tested, MEMORY)
        self.overall[kind].see(right, tested, LONG_MEMORY)
