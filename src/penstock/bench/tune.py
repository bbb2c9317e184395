"""How many sequences at once, and how large a chunk of prompts, keep requests within their levels.

Closed loop: so many clients each wait for their answer and then ask again, so that a batch of that
size is always under way and prompts arrive while others decode. The largest number that keeps the
levels is searched for each size of a step (`max_num_batched_tokens`): a small one bounds how long
others wait while a prompt is read, a large one reads it with fewer passes over the weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.bench.environment import environment
from penstock.bench.meter import Meter
from penstock.bench.workload import (
    engine_config,
    greedy,
    raise_errors,
    random_prompts,
    setup,
)
from penstock.config import EngineConfig
from penstock.engine import RequestOutput
from penstock.hardware import detect
from penstock.runtime import Runtime

CHUNKS = (2048, 1024, 512, 256, 128)
"""Sizes of a step that are tried, the largest first."""

SHARE = 0.99
"""Of the requests, that must keep every level."""

NEAR = 0.97
"""Of the most tokens a second: runs differ by as much."""

FEWEST = 20
"""Requests that a point is judged by, at least."""

PATIENCE = 10
"""A point may take so many times its seconds where requests are slow."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked, and what an answer may take."""

    input_len: int  # tokens
    output_len: int  # tokens, at least two
    levels: dict[str, float]  # seconds by metric: ttft, tpot, itl, e2el
    max_num_seqs: int  # the most clients
    seconds: float = 2.0  # of a point, at least
    chunks: tuple[int, ...] = CHUNKS

    def config(self, model: str, **forms: Any) -> EngineConfig:
        """An engine for the most clients, whose steps are as large as any that is tried."""
        config = engine_config(
            model,
            max_model_len=self.input_len + self.output_len,
            max_num_seqs=self.max_num_seqs,
            **forms,
        )
        return config.suggesting(max_num_batched_tokens=max(*self.chunks, self.max_num_seqs))


@dataclass(frozen=True, slots=True)
class Times:
    """What one request took, seconds."""

    ttft: float
    tpot: float
    itl: float  # the 99th percentile of its gaps between tokens
    e2el: float

    @classmethod
    def of(cls, output: RequestOutput) -> Times:
        """Of a request that has ended."""
        assert output.metrics is not None
        at = np.asarray(output.metrics.token_times) - output.metrics.arrival_time
        gaps = np.diff(at)
        return cls(float(at[0]), float(gaps.mean()), _p99(gaps), float(at[-1]))

    def keeps(self, levels: dict[str, float]) -> bool:
        """Whether none of the levels is exceeded."""
        return all(getattr(self, name) <= limit for name, limit in levels.items())


@dataclass(frozen=True, slots=True)
class Point:
    """So many clients with steps of that size."""

    clients: int
    chunk: int  # max_num_batched_tokens
    requests: int  # that were judged
    kept: float  # share of them that kept every level
    output_tokens_per_s: float
    ttft_p99_s: float | None  # None: none was
    tpot_p99_s: float | None
    itl_p99_s: float | None
    e2el_p99_s: float | None

    @property
    def holds(self) -> bool:
        """Whether enough of the requests kept their levels."""
        return self.requests > 0 and self.kept >= SHARE


@dataclass(frozen=True, slots=True)
class Tuned:
    """Everything that was measured, and what is best of it."""

    setup: dict[str, Any]
    environment: dict[str, Any]
    points: list[Point]

    @property
    def best(self) -> Point | None:
        """Of those that hold and come near the most tokens a second, the one with the most clients;
        None: not even one client holds.
        """
        held = [point for point in self.points if point.holds]
        most = max((point.output_tokens_per_s for point in held), default=0.0)
        fast = [point for point in held if point.output_tokens_per_s >= NEAR * most]
        return max(fast, key=lambda p: (p.clients, p.output_tokens_per_s), default=None)

    def as_dict(self) -> dict[str, Any]:
        """What is kept."""
        return {
            "benchmark": "tune",
            "setup": self.setup,
            "best": None if self.best is None else asdict(self.best),
            "points": [asdict(point) for point in self.points],
            **self.environment,
        }


def tune(
    config: EngineConfig, runtime: Runtime, workload: Workload, watch: Callable[[Point], None]
) -> Tuned:
    """Search; `watch` is told of each point as it is measured."""
    draw, points = np.random.default_rng(0), list[Point]()
    first = Meter(config, runtime)
    for chunk in sorted(workload.chunks, reverse=True):

        def holds(clients: int, chunk: int = chunk) -> bool:
            point = measure(config, runtime, workload, clients, chunk, draw)
            points.append(point)
            watch(point)
            return point.holds

        largest(holds, min(workload.max_num_seqs, chunk))
    return Tuned(
        {**setup(first), **asdict(workload), "share": SHARE}, environment(detect()), points
    )


def largest(holds: Callable[[int], bool], most: int) -> int:
    """About the largest number up to `most` that holds, where smaller ones do; 0: not even one.

    Doubled until one fails, then halved between, to an eighth: runs differ by as much.
    """
    low, high = 0, 1
    while holds(high):
        low = high
        if high == most:
            return high
        high = min(2 * high, most)
    while high - low > max(1, low // 8):
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def measure(
    config: EngineConfig,
    runtime: Runtime,
    workload: Workload,
    clients: int,
    chunk: int,
    draw: np.random.Generator,
) -> Point:
    """One point: requests are judged that end after every client's first has."""
    w = workload
    meter = Meter(
        config.suggesting(max_num_seqs=clients, max_num_batched_tokens=max(chunk, clients)), runtime
    )
    prompts = _prompts(draw, runtime, w.input_len)
    # first answers are of all lengths, so that clients don't go in step
    lengths = draw.integers(2, w.output_len + 1, clients).tolist()
    for i, length in enumerate(lengths):
        meter.engine.add_request(str(i), next(prompts), greedy(length))
    sent, waiting, begun = clients, set(map(str, range(clients))), time.monotonic()
    start: float | None = None
    took: list[Times] = []
    while not _enough(start, begun, took, w, clients):
        outputs = meter.step()
        raise_errors(outputs)
        for output in (output for output in outputs if output.finished):
            if output.request_id in waiting:
                waiting.discard(output.request_id)
            else:
                took.append(Times.of(output))
            meter.engine.add_request(str(sent), next(prompts), greedy(w.output_len))
            sent += 1
        if start is None and not waiting:
            start = time.monotonic()
            meter.take()
            took.clear()
    seconds = time.monotonic() - (begun if start is None else start)
    tokens = sum(record.size.sampled for record in meter.take())
    for i in range(sent):
        meter.engine.abort(str(i), report=False)
    return _point(clients, chunk, took, w.levels, tokens / seconds)


def _enough(
    start: float | None, begun: float, took: Sequence[Times], w: Workload, clients: int
) -> bool:
    now = time.monotonic()
    if start is not None and len(took) >= max(FEWEST, clients):
        return now - start >= w.seconds
    return now - begun >= PATIENCE * max(w.seconds, 0.1)


def _point(
    clients: int, chunk: int, took: Sequence[Times], levels: dict[str, float], rate: float
) -> Point:
    kept = sum(times.keeps(levels) for times in took) / max(len(took), 1)

    def p99(name: str) -> float | None:
        return _p99([getattr(times, name) for times in took]) if took else None

    return Point(
        clients, chunk, len(took), kept, rate, p99("ttft"), p99("tpot"), p99("itl"), p99("e2el")
    )


def _p99(values: Any) -> float:
    return float(np.percentile(values, 99))


def _prompts(draw: np.random.Generator, runtime: Runtime, length: int) -> Iterator[list[int]]:
    while True:
        yield from random_prompts(draw, runtime, 16, length)
