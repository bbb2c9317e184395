"""Figures of hand-made records."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from penstock.bench.serve.charts import Axis, Series, chart, thin
from penstock.bench.serve.figures import (
    Distribution,
    concurrency,
    figures,
    meets,
    parse_goodput,
    throughput,
)
from penstock.bench.serve.load import LoadResult
from penstock.bench.serve.page import charts, html_page
from penstock.bench.serve.record import RequestRecord
from penstock.bench.serve.result import ServeResult
from penstock.bench.serve.workload import Lengths, Workload, random_prompts
from penstock.errors import ConfigError


def answered(index: int, intended: float, *times: float, **more: object) -> RequestRecord:
    """Sent when intended; its chunks at `times`."""
    made = RequestRecord(
        index, 0, 100, len(times), intended,
        ready_s=intended, slot_s=intended, sent_s=intended, token_times_s=list(times),
        last_s=times[-1], end_s=times[-1] + 0.01, completion_tokens=len(times),
        prompt_tokens=100, finish_reason="length",
    )  # fmt: skip
    for name, value in more.items():
        setattr(made, name, value)
    return made


def refused(index: int, at: float, kind: str) -> RequestRecord:
    return RequestRecord(
        index, 0, 100, 5, at, ready_s=at, slot_s=at, sent_s=at, end_s=at + 0.1,
        error=kind, message=f"{kind}!",
    )  # fmt: skip


RECORDS = [
    answered(0, 0.0, 0.4, 0.44, 0.48),  # TTFT 400 ms, TPOT 40 ms
    answered(1, 1.0, 1.6, 1.62, 1.64),  # 600, 20
    answered(2, 2.0, 2.1, 2.2),  # 100, 100
    answered(3, 3.0, 3.5),  # 500, none
    refused(4, 3.5, "HTTP 503"),
    refused(5, 3.6, "timeout"),
    refused(6, 3.7, "HTTP 503"),
]
WORK = random_prompts(8, Lengths(100), Lengths(3), vocab_size=99, seed=0)
LOAD = LoadResult(RECORDS, duration_s=4.0, loop_lags_s=[0.001, 0.002], client_cpu_s=0.2)


def test_goodput() -> None:
    chat = parse_goodput(["chat"])
    assert chat == {"ttft": 0.5, "tpot": 0.05}
    assert [meets(r, chat) for r in RECORDS] == [True, False, False, True, False, False, False]
    found = figures(LOAD, WORK, goodput=chat)
    assert found.good == 2 and found.as_dict()["goodput"]["requests_per_s"] == 0.5
    assert parse_goodput(["voice", "tpot:45 e2el:1e3"]) == {"ttft": 0.2, "tpot": 0.045, "e2el": 1}
    assert figures(LOAD, WORK, goodput={"e2el": 0.5}).good == 3


@pytest.mark.parametrize(
    "word", ["ttft", "ttft:", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "chta", "x:1"]
)
def test_bad_goodputs(word: str) -> None:
    with pytest.raises(ConfigError, match="--goodput"):
        parse_goodput([word])


def test_sums() -> None:
    found = figures(LOAD, WORK)
    assert (found.completed, found.failed, found.unfinished, found.not_sent) == (4, 3, 0, 1)
    assert found.requests_per_s == 1.0 and found.input_tokens == 400
    assert found.output_tokens == 9 and found.rate(found.output_tokens) == 2.25
    assert found.errors == {"HTTP 503": (2, "HTTP 503!"), "timeout": (1, "timeout!")}
    assert found.client_cpu == 0.05 and found.counted_by_server
    ttft, tpot, itl = (found.latencies[name] for name in ("ttft", "tpot", "itl"))
    assert ttft is not None and tpot is not None and itl is not None
    assert ttft.mean == pytest.approx(0.4) and ttft.percentiles["p50"] == pytest.approx(0.45)
    assert tpot.count == 3 and tpot.mean == pytest.approx(0.16 / 3)
    assert itl.count == 5 and itl.percentiles["p50"] == pytest.approx(0.04)
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=1001)
    found = Distribution.of(values.tolist(), [50, 90, 99, 99.9])
    assert found is not None
    for name, q in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)]:
        assert found.percentiles[name] == pytest.approx(np.quantile(values, q), rel=1e-12)
    assert (found.mean, found.std) == (values.mean(), values.std())
    assert Distribution.of([], [50]) is None


def test_nothing_answered() -> None:
    found = figures(LoadResult([refused(0, 0.0, "connect")], 0.1), WORK, goodput={"ttft": 1})
    assert found.completed == 0 and found.latencies["ttft"] is None and found.good == 0
    assert json.dumps(found.as_dict())
    empty = figures(LoadResult(), WORK)
    assert empty.requests_per_s == 0 and empty.not_sent == 8


def test_tokens_of_chunks() -> None:
    """A chunk may hold several tokens; who doesn't count them is named."""
    several = answered(0, 0.0, 0.1, 0.3, completion_tokens=5)
    assert several.tpot_s == pytest.approx(0.2 / 4)
    found = figures(LoadResult([several], 1.0), WORK)
    assert found.tokens_per_chunk == 2.5
    silent = answered(0, 0.0, 0.1, 0.3, completion_tokens=None)
    found = figures(LoadResult([several, silent], 1.0), WORK)
    assert not found.counted_by_server and found.output_tokens == 7
    assert found.as_dict()["output_tokens_counted_by"] == "chunks"


def test_prefix_hits() -> None:
    told = [answered(0, 0.0, 1.0, cached_tokens=0), answered(1, 0.5, 1.0, cached_tokens=60)]
    same = Workload("x", (WORK.conversations[0],) * 2, {})
    found = figures(LoadResult(told, 1.0), same, block_size=16)
    assert found.prefix.server == 0.3
    assert found.prefix.oracle == 96 / 200  # six full blocks of 16 within 100 tokens


def test_a_late_client_is_named() -> None:
    late = [answered(i, float(i), i + 0.1, ready_s=i + 0.02) for i in range(8)]
    assert late[3].lag_s == pytest.approx(0.02)
    assert figures(LoadResult(late, 10.0), WORK).client_was_slow
    assert not figures(LOAD, WORK).client_was_slow
    busy = LoadResult(RECORDS, 4.0, client_cpu_s=3.8)
    assert figures(busy, WORK).client_was_slow
    queued = answered(0, 0.0, 0.5, slot_s=0.3, sent_s=0.301)  # waiting for a slot isn't lateness
    assert queued.lag_s == pytest.approx(0.001) and queued.ttft_s == 0.5


def test_over_time() -> None:
    times, running = concurrency(RECORDS[:3])
    assert running == [1, 0, 1, 0, 1, 0] and times[0] == 0.0
    assert figures(LOAD, WORK).peak_concurrency == 2
    width, rates = throughput(RECORDS, 4.0, 4)
    assert width == 1 and rates == [3, 3, 2, 1]


def result(records: list[RequestRecord], interrupted: bool = False) -> ServeResult:
    load = LoadResult(records, 4.0, interrupted, [0.001], 0.1)
    return ServeResult(
        figures(load, WORK, goodput={"ttft": 0.5}), records, interrupted,
        "host:1", "<m> & co", "closed loop of 2", {"model": "<m>"}, ("a remark",),
    )  # fmt: skip


def test_the_page_is_whole() -> None:
    page = html_page(result(RECORDS, interrupted=True), {"commit": "abc"})
    assert "PARTIAL" in page and "&lt;m&gt; &amp; co" in page and "<m>" not in page
    assert "HTTP 503: 2" in page and "a remark" in page and "TTFT" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "src=" not in page
    pieces = charts(RECORDS, 4.0)
    assert len(pieces) == 4
    for piece in pieces:
        ElementTree.fromstring(piece)
    # a distribution ends at 1, the chart's upper edge
    assert page.count("<svg") == page.count("</svg>") == 4


def test_pages_of_little() -> None:
    for records in ([], [refused(0, 0.0, "timeout")], [answered(0, 0.0, 0.0)]):
        for piece in charts(records, 0.0 if not records else 1.0):
            ElementTree.fromstring(piece)
        assert html_page(result(records), {})


def test_axes() -> None:
    assert Axis("x", 0, 10).ticks() == [0, 2, 4, 6, 8, 10]
    assert Axis("x", 0, 0.7).ticks() == pytest.approx([0, 0.2, 0.4, 0.6])
    assert Axis("x", 9, 110, log=True).ticks() == [10, 20, 50, 100]
    assert Axis("x", 1, 1e4, log=True).share(100) == pytest.approx(0.5)
    assert len(Axis("x", 1e-3, 1e9, log=True).ticks()) > 2
    assert thin([(float(i), 0.0) for i in range(1000)], 11)[::5] == [(0, 0), (500, 0), (999, 0)]
    drawn = chart("t", Axis("x", 0, 10), Axis("y", 0, 10), [Series("s", [(0, 0), (10, 10)])])
    assert "M72.0 308.0L72.0 308.0L620.0 64.0" in drawn
