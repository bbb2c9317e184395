"""One workload's figures: real and expected speed-up, acceptance, costs, and what was decided."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

from penstock.bench.speculate.expected import (
    Costs,
    Place,
    drafted_of,
    geometric_tokens,
    rate_of,
    speedup_of,
    tokens_by_place,
)
from penstock.bench.speculate.floors import DraftFloor
from penstock.bench.speculate.passes import Passes
from penstock.bench.speculate.predicted import predicted_speedup
from penstock.bench.speculate.runs import Runs, Step, tokens_per_s
from penstock.errors import ConfigError
from penstock.hardware import AnyPeaks
from penstock.roofline import StepRecord, StepSize, floor_of
from penstock.speculate.times import StepTimes

SEEN_OFTEN: Final = 3
"""Steps of a size, before others' costs are taken from theirs."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Speed-ups that should come."""

    geometric: float  # by one rate, and verification for the price of a plain step
    measured: float  # by a rate for each place, and measured costs
    ledger: float  # by what plain steps took, and how floors and their distance grow with rows
    floors: float  # by the floors alone: the most that this machine allows


@dataclass(frozen=True, slots=True)
class StepTime:
    """Steps of one size."""

    seconds: float  # the median, drafting apart
    forward_s: float  # of this, the forward pass
    steps: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What came of one workload."""

    runs: Runs
    places: Sequence[Place]
    costs: Costs
    steps_at: dict[int, StepTime]  # with drafts, by the number of tokens verified
    plain: StepTime
    expected: Expected
    shares: tuple[float, float]  # of the floor: plain, with drafts
    pass_shares: dict[int, float]  # of the floor, by the rows of a pass

    # ── speed ────────────────────────────────────────────────────────────────────────────────

    @property
    def speedup(self) -> float:
        """Tokens a second with drafts ÷ without: the median over rounds."""
        return statistics.median(one.gain for one in self.runs.rounds)

    @property
    def ledger_error(self) -> float:
        """The ledger's prediction beside what came: 0.1 is a tenth too much."""
        return self.expected.ledger / self.speedup - 1.0

    def tokens_per_s(self, *, whole: bool = False) -> tuple[float, float]:
        """Plain, and with drafts; medians over rounds."""
        rounds = self.runs.rounds
        return (
            statistics.median(tokens_per_s(one.plain, whole=whole) for one in rounds),
            statistics.median(tokens_per_s(one.drafted, whole=whole) for one in rounds),
        )

    # ── drafts ───────────────────────────────────────────────────────────────────────────────

    @property
    def alpha(self) -> float | None:
        """Of the guesses that were compared, the share that was right."""
        return rate_of(self.places)

    @property
    def lengths(self) -> Counter[int]:
        """How many drafts were verified of each length."""
        found: Counter[int] = Counter()
        for (drafted, _), times in self.runs.log.lengths.items():
            found[drafted] += times
        return found

    @property
    def drafting(self) -> float:
        """What a guess costs: c, of a plain step."""
        mean = self.runs.log.draft_tokens / max(self.runs.log.drafts, 1)
        each = (
            self.costs.drafting_s(1) if self.costs.by_passes else self.costs.draft_s / max(mean, 1)
        )
        return each / self.costs.plain_s

    @property
    def share_with_drafts(self) -> float:
        """Of the steps that decode, those that verified any guess."""
        decoding = [s for one in self.runs.rounds for s in one.drafted if s.is_decode]
        return sum(step.record.size.drafted > 0 for step in decoding) / len(decoding)

    @property
    def time_with_drafts(self) -> float:
        """The same of the time."""
        decoding = [s for one in self.runs.rounds for s in one.drafted if s.is_decode]
        spent = sum(step.seconds for step in decoding if step.record.size.drafted)
        return spent / sum(step.seconds for step in decoding)

    @property
    def most(self) -> int:
        """Tokens that a draft may have."""
        return self.runs.speculation.controller.most

    @property
    def break_even(self) -> float | None:
        """The rate at which the best length is as fast as plain steps; None where none is."""
        return self.costs.break_even(self.most) if self.places else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        log, control = self.runs.log, self.runs.speculation.controller
        best = None if self.alpha is None else self.costs.best(self.alpha, self.most)
        return {
            "name": self.runs.name,
            "requests": self.runs.requests,
            "batch_size": self.runs.batch,
            "rounds": len(self.runs.rounds),
            "tokens": sum(step.generated for step in self.runs.rounds[0].plain),
            "outputs_given": self.runs.given,
            "outputs_equal": not self.runs.differing,
            "differing": self.runs.differing,
            "tokens_per_s": _pair(self.tokens_per_s()),
            "speedup": self.speedup,
            "speedup_by_round": [one.gain for one in self.runs.rounds],
            "with_prompts": {
                "tokens_per_s": _pair(self.tokens_per_s(whole=True)),
                "speedup": statistics.median(one.whole_gain for one in self.runs.rounds),
            },
            "share_of_floor": {**_pair(self.shares), "passes": self.pass_shares},
            "expected": {
                "geometric": self.expected.geometric,
                "measured_costs": self.expected.measured,
                "ledger": self.expected.ledger,
                "ledger_error": self.ledger_error,
                "floors": self.expected.floors,
            },
            "acceptance": {
                "drafts": log.drafts,
                "draft_tokens": log.draft_tokens,
                "accepted_tokens": log.accepted_tokens,
                "rate": log.acceptance_rate,
                "mean_length": log.mean_acceptance_length,
                "alpha": self.alpha,
                "by_position": [self._place(i, place) for i, place in enumerate(self.places)],
                "draft_lengths": dict(sorted(self.lengths.items())),
            },
            "costs": {
                "plain_step": _milliseconds(self.plain),
                "verification": {n: _milliseconds(took) for n, took in self.steps_at.items()},
                "drafting_ms": 1e3 * self.costs.draft_s,
                "drafting_by_token": self.costs.by_passes,
                "drafting_of_a_plain_step": self.drafting,
            },
            "break_even_acceptance": self.break_even,
            "best_length": None if best is None else best[1],
            "speedup_at_best_length": None if best is None else best[0],
            "control": {
                "adaptive": control.adaptive,
                "most": self.most,
                "share_of_steps_with_drafts": self.share_with_drafts,
                "share_of_time_with_drafts": self.time_with_drafts,
                "on_at_the_end": bool(control.is_on),
            },
        }

    def _place(self, at: int, place: Place) -> dict[str, Any]:
        return {
            "position": at + 1,
            "drafts": place.drafts,
            "accepted": place.accepted,
            "of_all": place.accepted / self.runs.log.drafts,
            "conditional": place.rate if place.tested else None,
        }


def _milliseconds(took: StepTime) -> dict[str, Any]:
    return {"ms": 1e3 * took.seconds, "forward_ms": 1e3 * took.forward_s, "steps": took.steps}


def _pair(values: tuple[float, float]) -> dict[str, float]:
    return {"plain": values[0], "speculating": values[1]}


def figures_of(runs: Runs, peaks: AnyPeaks, draft_floor: DraftFloor) -> Figures:
    """Everything about a workload. Raises ConfigError where nothing of it was decoded."""
    plain = [step for one in runs.rounds for step in one.plain if step.is_decode]
    drafted = [step for one in runs.rounds for step in one.drafted if step.is_decode]
    full = [
        [s for s in steps if len(s.record.size.queries) == runs.batch] for steps in (plain, drafted)
    ]
    if not all(full):
        raise ConfigError(
            f"The outputs of {runs.name} ended before {runs.batch} of them decoded together, so "
            "nothing was timed. Lower --batch-size, or give prompts with longer outputs."
        )
    places = runs.log.places()
    costs, without, steps_at, looking_s = _costs(runs, *full)
    sizes = [step.record.size for step in full[1]]
    floors = (
        _floor_s(plain, peaks, None),
        _floor_s(drafted, peaks, draft_floor),
    )
    tokens = [sum(step.generated for step in steps) for steps in (plain, drafted)]
    expected = Expected(
        _geometric(sizes, places, costs),
        _from_costs(sizes, places, costs, steps_at, looking_s),
        predicted_speedup(runs.rounds, runs.batch, peaks, places),
        floors[0] / tokens[0] / (floors[1] / tokens[1]),
    )
    spent = [sum(step.seconds for step in steps) for steps in (plain, drafted)]
    passes = reduce(Passes.plus, (one.passes for one in runs.rounds))
    shares = (floors[0] / spent[0], floors[1] / spent[1])
    return Figures(
        runs, places, costs, steps_at, without, expected, shares, passes.shares(peaks)
    )  # fmt: skip


def _floor_s(steps: Sequence[Step], peaks: AnyPeaks, draft: DraftFloor | None) -> float:
    found = 0.0
    for step in steps:
        found += floor_of(step.record.cost, peaks).seconds
        if draft is not None and step.record.size.drafted:
            found += draft(step.record.size, peaks)
    return found


def _costs(
    runs: Runs, plain: Sequence[Step], drafted: Sequence[Step]
) -> tuple[Costs, StepTime, dict[int, StepTime], float]:
    """Of steps with the whole batch: what they cost, plain and by tokens that were verified; and
    the seconds that it takes to find no draft.
    """
    control = runs.speculation.controller
    by_drafted: dict[int, list[StepRecord]] = defaultdict(list)
    each, looking = [], []
    for record in (step.record for step in drafted):
        by_drafted[record.size.drafted].append(record)
        longest = max(drafted_of(record.size))
        if longest:
            each.append(record.draft_s / longest if control.by_passes else record.draft_s)
        else:
            looking.append(record.draft_s)
    without = _time_of([step.record for step in plain])
    steps_at = {n: _time_of(records) for n, records in sorted(by_drafted.items())}
    times = _predicted(runs.batch, control.most, without, steps_at)
    draft_s = statistics.median(each) if each else 0.0
    costs = Costs(runs.batch, without.seconds, times, draft_s, control.by_passes)
    return costs, without, steps_at, statistics.median(looking) if looking else 0.0


def _time_of(records: Sequence[StepRecord]) -> StepTime:
    return StepTime(
        statistics.median(one.seconds - one.draft_s for one in records),
        statistics.median(one.forward_s for one in records),
        len(records),
    )


def _predicted(
    batch: int, most: int, plain: StepTime, steps_at: dict[int, StepTime]
) -> list[float]:
    """Steps that verify 0, 1, … tokens: between and beyond what was seen, and never falling."""
    times = StepTimes()
    for count, took in {**steps_at, 0: plain}.items():
        for _ in range(took.steps if took.steps >= SEEN_OFTEN else 0):
            times.see(batch, count, took.seconds)
    if not times.plain(batch)[1]:
        times.see(batch, 0, plain.seconds)
    return times.seconds(batch, most * batch)


def _geometric(sizes: Sequence[StepSize], places: Sequence[Place], costs: Costs) -> float:
    """By the theorem, each step with its own length."""
    rate = rate_of(places) or 0.0  # None where there were no drafts
    return speedup_of(
        sizes,
        lambda length: geometric_tokens(rate, length),
        lambda size: costs.plain_s + costs.drafting_s(max(drafted_of(size))),
        costs.plain_s,
    )


def _from_costs(
    sizes: Sequence[StepSize],
    places: Sequence[Place],
    costs: Costs,
    steps_at: dict[int, StepTime],
    looking_s: float,
) -> float:
    """By a rate for each place and the median step of each size."""

    def seconds(size: StepSize) -> float:
        longest = max(drafted_of(size))
        more = costs.drafting_s(longest) if longest else looking_s
        return steps_at[size.drafted].seconds + more

    return speedup_of(sizes, lambda n: tokens_by_place(places, n), seconds, costs.plain_s)
