"""Timing what runs on a GPU: by events on its own clock, in medians, from a cold cache.

Work is queued behind a kernel that keeps the GPU busy, so that the host, which is slower than small
kernels, is ahead of it and no event waits for a launch. On a CPU the same functions read the
host's clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]

AHEAD_CYCLES = 2_000_000
"""About a millisecond of the GPU's clock, in which the host queues what is timed."""


class Flush:
    """Empties the L2 by reading a buffer twice its size: what is read needn't be written back."""

    def __init__(self, device: torch.device) -> None:
        size = 0
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            size = 2 * getattr(properties, "L2_cache_size", 64 << 20)
        self._buffer = torch.zeros(size // 4, dtype=torch.int32, device=device)

    def __call__(self) -> None:
        if len(self._buffer):
            self._buffer.amax()


def times(
    run: Run,
    device: torch.device,
    *,
    repeats: int = 20,
    warm_up: int = 3,
    flush: Flush | None = None,
    ahead_cycles: int = AHEAD_CYCLES,
) -> list[float]:
    """Seconds of each of `repeats` calls of `run`, which only queues work.

    flush: before each call, so that it reads memory and not the L2. ahead_cycles: how long the host
    has for its launches before the GPU begins; 0: it begins at the first, and waits for the others.
    """
    for _ in range(warm_up):
        run()
    if device.type != "cuda":
        return [_on_host(run) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        if ahead_cycles:
            torch.cuda._sleep(ahead_cycles)
        else:
            torch.cuda.synchronize(device)
        if flush is not None:
            flush()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in marks]


def _on_host(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def median(run: Run, device: torch.device, **how: Any) -> float:
    """The middle of `times`, seconds."""
    return statistics.median(times(run, device, **how))


@dataclass(frozen=True, slots=True)
class Timed:
    """One of several that were timed in turns."""

    median_s: float
    least_s: float
    spread: float  # between its own rounds' medians, of its median: a smaller difference is noise


def side_by_side(
    runs: Mapping[str, Run],
    device: torch.device,
    *,
    rounds: int = 3,
    repeats: int = 10,
    warm_up: int = 3,
    flush: Flush | None = None,
) -> dict[str, Timed]:
    """Time each in turn, `rounds` times over: A B, B A, A B.

    Clocks and neighbours change slowly, and so for all of them.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in runs}
    for number in range(rounds):
        names = list(runs) if number % 2 == 0 else list(runs)[::-1]
        for name in names:
            how = {"repeats": repeats, "warm_up": warm_up if number == 0 else 1, "flush": flush}
            found[name].append(times(runs[name], device, **how))  # type: ignore[arg-type]
    return {name: _timed(seconds) for name, seconds in found.items()}


def _timed(rounds: list[list[float]]) -> Timed:
    every = [s for seconds in rounds for s in seconds]
    middles = [statistics.median(seconds) for seconds in rounds]
    middle = statistics.median(every)
    return Timed(middle, min(every), (max(middles) - min(middles)) / middle)
