"""What the ledger predicts: the time of each step with drafts, from what plain steps have shown.

A step that is the one before it with a token more takes what plain steps take: its floor ÷ the
share of it that their forward passes reached, their sampling, their seconds of the host. Any other,
one with drafts or behind one, is laid out anew and finds less of what it needs in the processor's
caches: its floor ÷ the share that a pass of so many rows reaches (`passes`), the sampling of so
many rows, and the host's seconds of those plain steps that are laid out anew, too, behind a prompt.
Drafting is what the ledger has noted of it; what comes of a draft is by the rate of each place.
Times are means, as in tokens a second: what else the machine does holds some steps up for long.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from penstock.bench.speculate.expected import Place, drafted_of, tokens_by_place
from penstock.bench.speculate.passes import Passes
from penstock.bench.speculate.runs import Round, Step
from penstock.hardware import AnyPeaks
from penstock.roofline import floor_s


@dataclass(frozen=True, slots=True)
class PlainSteps:
    """Means of the plain run's steps of a full batch, in seconds."""

    whole_s: float  # since the step before ended
    floor_s: float
    forward_s: float
    sample_s: float
    host_s: float  # all the rest
    anew_s: float  # the same of those whose arrays were laid out anew

    @property
    def share(self) -> float:
        """Of the floor, what the forward pass reached."""
        return self.floor_s / self.forward_s

    @classmethod
    def of(cls, a_round: Round, batch: int, peaks: AnyPeaks) -> PlainSteps | None:
        """Those of a round; None where none of them decoded a full batch."""
        usual: list[Step] = []
        anew: list[Step] = []
        for before, step in pairwise(a_round.plain):
            if step.is_decode and len(step.record.size.queries) == batch:
                (usual if before.is_decode else anew).append(step)
        usual = usual or anew
        if not usual:
            return None
        records = [step.record for step in usual]
        host = _host_s(usual)
        # there are few that were laid out anew: how much more they take is by medians
        more = statistics.median(_host_s(anew or usual)) / statistics.median(host)
        return cls(
            whole_s=fmean(step.seconds for step in usual),
            floor_s=fmean(floor_s(one.cost, peaks) for one in records),
            forward_s=fmean(one.forward_s for one in records),
            sample_s=fmean(one.sample_s for one in records),
            host_s=fmean(host),
            anew_s=fmean(host) * max(more, 1.0),
        )


def _host_s(steps: Sequence[Step]) -> list[float]:
    return [s.seconds - s.record.forward_s - s.record.sample_s for s in steps]


def predicted_speedup(
    rounds: Iterable[Round], batch: int, peaks: AnyPeaks, places: Sequence[Place]
) -> float:
    """Of the steps with the whole batch: the median over rounds, as of what came."""
    found = (_of_round(one, batch, peaks, places) for one in rounds)
    return statistics.median(gain for gain in found if gain is not None)


def _of_round(a_round: Round, batch: int, peaks: AnyPeaks, places: Sequence[Place]) -> float | None:
    plain = PlainSteps.of(a_round, batch, peaks)
    full = [
        (before, step)
        for before, step in pairwise(a_round.drafted)
        if step.is_decode and len(step.record.size.queries) == batch
    ]
    if plain is None or not full:
        return None
    drafting_s = _drafting(step for _, step in full)
    given = spent = 0.0
    for before, step in full:
        size = step.record.size
        lengths = drafted_of(size)
        moved = size.drafted + before.record.size.drafted > 0 or not before.is_decode
        given += sum(tokens_by_place(places, length) for length in lengths)
        spent += predicted_s(step, plain, a_round.passes, peaks, moved) + drafting_s[max(lengths)]
    return plain.whole_s * given / batch / spent


def _drafting(steps: Iterable[Step]) -> dict[int, float]:
    """Mean seconds of drafting, by the longest draft; 0: none was found, or sought."""
    found = defaultdict[int, list[float]](list)
    for step in steps:
        found[max(drafted_of(step.record.size))].append(step.record.draft_s)
    return {length: fmean(took) for length, took in found.items()}


def predicted_s(
    step: Step, plain: PlainSteps, passes: Passes, peaks: AnyPeaks, moved: bool
) -> float:
    """Of one step, drafting apart. moved: it isn't the one before it with a token more."""
    size, floor = step.record.size, floor_s(step.record.cost, peaks)
    if not moved:
        return floor / plain.share + plain.sample_s + plain.host_s
    rows = size.tokens
    return floor / passes.share(rows, peaks) + passes.sample_s(rows) + plain.anew_s
