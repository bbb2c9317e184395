"""What a pass of so many rows takes on this machine, beside its floor.

A floor says how the bytes and FLOPs of a step grow with the tokens that it verifies, not how far
from it the kernels are at so many rows: one that waits for memory comes near it, one that
multiplies a few rows doesn't. So passes of the target are timed at each number of rows that steps
have, on sequences that mean nothing and that nobody decodes, and so is sampling so many rows: each
time after a run, so that what else the machine does falls on them as on the runs.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Final

import numpy as np
import torch
from numpy.typing import ArrayLike

from penstock.hardware import AnyPeaks
from penstock.roofline import Cost, CostModel, StepSize, floor_s
from penstock.runtime import Runtime
from penstock.sampling import Sampler, SamplingParams, SequenceSampling
from penstock.step import StatefulStep, Step

MOST_COUNTS: Final = 8
"""Numbers of rows that are timed after a run, the most frequent; between them, by the line."""

LEAST, MOST, SPENT_S = 3, 20, 0.1
"""Passes of each, after each run; more than the least where all have not taken so long."""


@dataclass(frozen=True, slots=True)
class Like:
    """What passes are like."""

    batch: int  # sequences
    tokens: Sequence[int]  # ids that they may have
    context: int  # what a sequence sees, where the cache lets one begin in the middle
    params: SamplingParams


@dataclass(slots=True)
class Passes:
    """Seconds of passes, by the number of rows."""

    forward: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sampling: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    costs: dict[int, Cost] = field(default_factory=dict)  # of the pass that was timed last

    def shares(self, peaks: AnyPeaks) -> dict[int, float]:
        """Of its floor, what a pass reaches: floor ÷ time, by rows."""
        return {
            rows: floor_s(self.costs[rows], peaks) / fmean(took)
            for rows, took in sorted(self.forward.items())
        }

    def share(self, rows: int, peaks: AnyPeaks) -> float:
        """The same for any number of them."""
        return _at(rows, self.shares(peaks))

    def sample_s(self, rows: int) -> float:
        """What it takes to sample so many rows."""
        return _at(rows, {count: fmean(took) for count, took in self.sampling.items()})

    def time(self, runtime: Runtime, costs: CostModel, counts: Iterable[int], like: Like) -> None:
        """Time passes; the cache must be nobody's. counts: rows, of each step that was run."""
        sampler = Sampler(runtime.vocab_size)
        state = SequenceSampling(like.params, like.tokens[:1], runtime.vocab_size, 0, frozenset())
        steps = [
            _step(rows, like, runtime) for rows in [like.batch, *_frequent(counts, like.batch)]
        ]
        began = time.perf_counter()
        for number, step in product(range(MOST), steps):
            if number >= LEAST and time.perf_counter() - began > SPENT_S:
                return
            rows = step.num_tokens
            self.costs[rows] = costs.cost(StepSize.of(step))
            states = [state] * rows
            start = time.perf_counter()
            logits = runtime.runner.forward(step)
            if logits.is_cuda:
                torch.cuda.synchronize(logits.device)
            middle = time.perf_counter()
            sampler.prepare(states)
            sampler(logits, states)
            self.forward[rows].append(middle - start)
            self.sampling[rows].append(time.perf_counter() - middle)

    def plus(self, other: Passes) -> Passes:
        """Both together."""
        both = Passes(costs={**self.costs, **other.costs})
        for one in (self, other):
            for rows in one.forward:
                both.forward[rows] += one.forward[rows]
                both.sampling[rows] += one.sampling[rows]
        return both


def _frequent(counts: Iterable[int], batch: int) -> list[int]:
    """Those of a run that are timed, ascending."""
    often = Counter(count for count in counts if count > batch).most_common(MOST_COUNTS)
    return sorted(count for count, _ in often)


def _at(rows: int, values: Mapping[int, float]) -> float:
    """By the line between what was measured."""
    counts = sorted(values)
    return float(np.interp(rows, counts, [values[count] for count in counts]))


def _step(rows: int, like: Like, runtime: Runtime) -> Step:
    """A step of so many sequences with `rows` tokens in all, each in blocks of its own."""
    batch, size = like.batch, runtime.layout.block_size
    queries = [rows // batch + (i < rows % batch) for i in range(batch)]
    longest = max(queries)
    past = max(min(like.context, runtime.model.max_model_len) - longest, 0)
    if runtime.layout.recent_window:  # such a cache can't be entered in the middle
        past = 0
    width = min(-(-(past + longest) // size), runtime.num_blocks // batch)
    past = min(past, width * size - longest)
    table = np.arange(batch * width).reshape(batch, width)
    starts = np.cumsum([0, *queries])
    owner = np.repeat(np.arange(batch), queries)
    positions = np.arange(rows) - starts[owner] + past
    arrays = (
        _whole([like.tokens[i % len(like.tokens)] for i in range(rows)]),
        _whole(positions),
        _whole(table[owner, positions // size] * size + positions % size),
        _whole(starts),
        _whole([past + count for count in queries]),
        _whole(table),
        _whole(np.arange(rows)),
    )
    states = runtime.layout.states
    if states is None:
        return Step(*arrays)
    kept = np.arange(min(rows, states.slots - batch))  # as many as are left after guesses
    return StatefulStep(
        *arrays, _whole(np.arange(batch)), _whole(np.stack((kept, batch + kept), axis=1))
    )


def _whole(values: ArrayLike) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))
