"""The search for a batch that keeps its levels: by hand, and on the embedded model."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.bench.meter import Meter
from penstock.bench.serve.figures import parse_goodput
from penstock.bench.tune import CHUNKS, Point, Times, Tuned, Workload, largest, measure, tune
from penstock.engine import Engine, RequestOutput
from penstock.engine.outputs import RequestMetrics
from penstock.errors import ConfigError
from penstock.runtime import Runtime, load_runtime

W = Workload(24, 8, {"ttft": 10.0, "tpot": 10.0}, max_num_seqs=4, seconds=0.1, chunks=(64, 32))


@pytest.mark.parametrize(("limit", "most"), [(0, 9), (1, 9), (5, 100), (9, 9), (63, 64), (200, 64)])
def test_the_largest_that_holds(limit: int, most: int) -> None:
    tried: list[int] = []

    def holds(count: int) -> bool:
        tried.append(count)
        return count <= limit

    found = largest(holds, most)
    exact = min(limit, most)
    assert exact - max(1, exact // 8) < found <= exact or found == exact == 0
    assert len(tried) == len(set(tried)) <= 2 * most.bit_length()
    assert all(1 <= count <= most for count in tried)


def point(clients: int, rate: float, kept: float = 1.0, requests: int = 30) -> Point:
    return Point(clients, 256, requests, kept, rate, 0.1, 0.01, 0.02, 1.0)


def test_what_is_best() -> None:
    """Nearly the most tokens a second, then the most at once; of those that hold."""
    points = [point(1, 50), point(8, 100), point(16, 98), point(32, 96), point(64, 200, kept=0.98)]
    assert Tuned({}, {}, points).best == points[2]
    assert Tuned({}, {}, points[-1:]).best is None
    assert Tuned({}, {}, [point(3, 10, requests=0)]).best is None


def test_times_of_a_request() -> None:
    metrics = RequestMetrics(arrival_time=5.0, token_times=[6.0, 6.5, 7.5])
    output = RequestOutput("a", None, [], [], True, metrics=metrics)
    times = Times.of(output)
    assert (times.ttft, times.tpot, times.e2el) == (1.0, 0.75, 2.5)
    assert times.itl == pytest.approx(0.5 + 0.99 * 0.5)
    assert times.keeps({"ttft": 1.0, "itl": 1.0, "e2el": 2.5}) and not times.keeps({"tpot": 0.7})


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return load_runtime(W.config("stories"))


STEP_S = 0.005


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes as long, whatever else this machine does: a clock of steps."""
    steps, step = [0], Meter.step

    def counted(meter: Meter) -> list[RequestOutput]:
        steps[0] += 1
        return step(meter)

    def clock() -> float:
        return steps[0] * STEP_S

    monkeypatch.setattr(Meter, "step", counted)
    monkeypatch.setattr("penstock.bench.meter.Engine", partial(Engine, clock=clock))
    monkeypatch.setattr("penstock.bench.tune.time", SimpleNamespace(monotonic=clock))


@pytest.mark.usefixtures("steady")
def test_a_point(runtime: Runtime) -> None:
    found = measure(W.config("stories"), runtime, W, 3, 32, np.random.default_rng(0))
    assert (found.clients, found.chunk, found.kept) == (3, 32, 1.0) and found.holds
    assert found.requests >= 20
    assert 0 < found.tpot_p99_s <= found.e2el_p99_s and 0 < found.ttft_p99_s < found.e2el_p99_s
    # of so many clients each has a token about every tpot
    assert found.tpot_p99_s == pytest.approx(STEP_S)
    assert found.output_tokens_per_s == pytest.approx(3 / found.tpot_p99_s, rel=0.1)


def test_a_point_at_which_nothing_ends(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.tune.PATIENCE", 0)
    found = measure(W.config("stories"), runtime, W, 3, 32, np.random.default_rng(0))
    assert (found.requests, found.ttft_p99_s) == (0, None) and not found.holds
    assert "null" in json.dumps(asdict(found), allow_nan=False)


def test_a_search(runtime: Runtime) -> None:
    told: list[Point] = []
    found = tune(W.config("stories"), runtime, W, told.append)
    assert told == found.points and {p.chunk for p in told} == {64, 32}
    assert [p.clients for p in told] == [1, 2, 4, 1, 2, 4]  # no more were asked for
    assert found.best is not None and found.best.clients == 4
    kept: dict[str, Any] = found.as_dict()
    assert kept["best"]["clients"] == 4 and kept["setup"]["model"] == "stories"
    hard = Workload(24, 8, {"tpot": 1e-9}, max_num_seqs=4, seconds=0.1, chunks=(64,))
    found = tune(W.config("stories"), runtime, hard, told.append)
    assert found.best is None and [p.clients for p in found.points] == [1]


def test_levels() -> None:
    names = ("ttft", "tpot", "itl", "e2el")
    assert parse_goodput(["itl:20 voice"], names) == {"itl": 0.02, "ttft": 0.2, "tpot": 0.03}
    with pytest.raises(ConfigError, match="itl:MS"):
        parse_goodput(["itl:-1"], names)
    with pytest.raises(ConfigError, match=r"'itl:20' isn't one of chat, voice, ttft:MS"):
        parse_goodput(["itl:20"])
    assert list(CHUNKS) == sorted(CHUNKS, reverse=True)
