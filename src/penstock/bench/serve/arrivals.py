"""When conversations begin in an open loop: independent of how fast the server answers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.bench.serve.workload import Workload


def gamma_arrivals(number: int, rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """`number` times in seconds from the first, 0, ascending [number].

    The gaps between them are gamma-distributed with mean 1 / rate and shape `burstiness`: 1 is a
    Poisson process, below 1 comes in bursts, above 1 is more even. An infinite rate: all at 0.
    """
    if math.isinf(rate):
        return np.zeros(number)
    generator = np.random.default_rng([seed, 1])  # apart from the workload's
    gaps = generator.gamma(burstiness, 1.0 / (rate * burstiness), max(number - 1, 0))
    return np.concatenate([np.zeros(min(number, 1)), np.cumsum(gaps)])


def trace_arrivals(workload: Workload, time_scale: float) -> NDArray[np.float64]:
    """The trace's own times, multiplied by `time_scale`."""
    times = [c.arrival_s for c in workload.conversations]
    return np.array(times, np.float64) * time_scale
