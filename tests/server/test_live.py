"""What moves the page: the real server's events have the fields of those it was built with."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.hardware import Peaks
from penstock.roofline import Cost, StepRecord, StepSize
from penstock.server import live
from penstock.server.live import MOST_RUNNING, MOST_STEPS, PERIOD_S
from penstock.server.service import Recent
from tests.server.conftest import Running
from tests.server.page.fake import LOADS, Engine


def _kinds(value: Any, path: str = "") -> dict[str, set[str]]:
    """JSON's types by place; items of a list share one."""
    if isinstance(value, dict):
        found = {path: {"object"}}
        for key, item in value.items():
            _add(found, _kinds(item, f"{path}.{key}"))
        return found
    if isinstance(value, list):
        found = {path: {"array"}}
        for item in value:
            _add(found, _kinds(item, f"{path}[]"))
        return found
    name = {bool: "boolean", str: "string", type(None): "null"}.get(type(value), "number")
    return {path: {name}}


def _add(found: dict[str, set[str]], more: Mapping[str, set[str]]) -> None:
    for path, kinds in more.items():
        found.setdefault(path, set()).update(kinds)


def _promised() -> dict[str, set[str]]:
    """What the page's own tests show it, idle and busy."""
    found: dict[str, set[str]] = {}
    for running, blocks in LOADS.values():
        engine = Engine(running, blocks)
        for _ in range(3):
            _add(found, _kinds(json.loads(json.dumps(engine.event()))))
    found[".floor_ratio"] |= {"number", "null"}
    found[".steps[].floor_s"] |= {"null"}  # where no peaks are known
    return found


def _seen(server: Running, count: int) -> list[dict[str, Any]]:
    events = []
    with server.client() as client, client.stream("GET", "/page/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line[6:]))
            if len(events) == count:
                break
    return events


@pytest.fixture
def busy(server: Running, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Events while three samples and a prompt are computed."""
    monkeypatch.setattr(server.llm.engine.ledger, "peaks", Peaks(1e12, 1e12, 0.0, 1, "", 1e12))
    step = server.llm.engine.step
    slowly = lambda: (time.sleep(0.01), step())[1]  # noqa: E731 – else it has ended by the second
    monkeypatch.setattr(server.llm.engine, "step", slowly)
    body = {"prompt": "Once upon a time", "n": 3, "max_tokens": 400, "ignore_eos": True,
            "stream": True}  # fmt: skip
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        pieces = stream.iter_bytes(1)  # kept, or the connection would be closed
        next(pieces)
        return _seen(server, 3)


def test_busy_events_have_the_fakes_fields_and_types(busy: list[dict[str, Any]]) -> None:
    promised = _promised()
    seen: dict[str, set[str]] = {}
    for event in busy:
        _add(seen, _kinds(event))
    assert seen.keys() == promised.keys()
    assert {path for path, kinds in seen.items() if not kinds <= promised[path]} == set()
    for event in busy:  # each of them, not all together
        assert event.keys() == busy[0].keys()
        for name in ("running", "steps"):
            for item in event[name]:
                assert {f".{name}[].{key}" for key in item} == {
                    path for path in promised if path.startswith(f".{name}[].")
                }


def test_an_idle_server_too(server: Running) -> None:
    server.rest()
    (event,) = _seen(server, 1)
    promised = _promised()
    for path, kinds in _kinds(event).items():
        assert kinds <= promised[path], path
    assert event["requests"]["running"] == event["requests"]["waiting"] == 0
    assert event["running"] == []
    assert event["tokens_per_s"] >= 0


def test_what_a_busy_event_says(server: Running, busy: list[dict[str, Any]]) -> None:
    event = busy[-1]
    assert event["model"] == "stories"
    assert event["requests"]["running"] == 3
    ids = [item["id"] for item in event["running"]]
    assert len(set(ids)) == 3
    assert all(one.startswith("cmpl-") for one in ids)
    for item in event["running"]:
        assert item["phase"] == "decode"
        assert item["output_tokens"] > 0
        assert item["computed_tokens"] >= item["prompt_tokens"] == 5
        assert item["age_s"] > 0
    runs = event["blocks"]["runs"]
    assert sum(length for _, length in runs) == event["blocks"]["total"]
    assert {state for state, _ in runs} <= {0, 1, 2, 3, 4}
    assert all(one[0] != other[0] for one, other in pairwise(runs))
    assert event["blocks"]["size"] == server.llm.runtime.layout.block_size
    assert event["bound"] in ("memory", "compute")
    assert event["floor_ratio"] > 0
    assert event["tokens_per_s"] > 0


def test_steps_are_told_once_and_in_order(busy: list[dict[str, Any]]) -> None:
    starts = [step["at"] for event in busy for step in event["steps"]]
    assert starts == sorted(set(starts))
    for event in busy:
        for step in event["steps"]:
            assert step["prefill_tokens"] + step["decode_tokens"] >= step["sequences"] >= 1
            assert step["floor_s"] > 0
            assert step["seconds"] > 0
    times = [event["time"] for event in busy]
    gaps = [b - a for a, b in pairwise(times)]
    assert min(gaps) > PERIOD_S * 0.9


def test_a_snapshot_has_an_end(server: Running) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 300, "n": 1,
                                             "ignore_eos": True})  # fmt: skip
    server.rest()
    found, since = live.snapshot(server.service, server.llm, 0.0)
    assert len(found["steps"]) == MOST_STEPS
    assert since == found["steps"][-1]["at"]
    assert len(found["running"]) <= MOST_RUNNING
    again, still = live.snapshot(server.service, server.llm, since)
    assert again["steps"] == []
    assert still == since


def test_rates_count_tokens_that_came_out(server: Running) -> None:
    """A prompt in chunks gives one token at its end, and an embedding none."""
    server.rest()
    recent = server.service.recent.steps
    recent.clear()
    with server.client() as client:
        client.post("/v1/embeddings", json={"input": ["a dog", "the sea"]})
    server.rest()
    assert len(recent) > 0
    found, _ = live.snapshot(server.service, server.llm, 0.0)
    assert found["tokens_per_s"] == 0


LAYOUT = SimpleNamespace(block_size=16)
IDLE = SimpleNamespace(
    stats=lambda: {"blocks": 1, "running": 1, "waiting": 0, "swapped": 0, "prefix": {}},
    runtime=SimpleNamespace(layout=LAYOUT),
    engine=SimpleNamespace(
        pool=SimpleNamespace(states=lambda: b""), scheduler=SimpleNamespace(running=[])
    ),
)
"""As much of an engine as a snapshot asks."""


def _of(steps: list[StepRecord]) -> dict[str, Any]:
    recent = Recent()
    recent.steps.extend(steps)
    service = SimpleNamespace(recent=recent, started=0.0, names=["m"], done=0, failed=0)
    return live.snapshot(service, IDLE, 0.0)[0]  # type: ignore[arg-type]


def _record(ago: float, size: StepSize, generated: int) -> StepRecord:
    """A step of a hundredth of a millisecond."""
    start = time.perf_counter() - ago
    cost = Cost(1, 1, {})
    return StepRecord(start, 1e-5, 0, 0, 0, 1e-5, 0, 0, 0, 0, size, cost, None, generated)


@pytest.mark.parametrize("per_s", [50, 1000, 10_000])
def test_the_speed_has_no_ceiling(per_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the steps that an event shows nor those that are kept are one."""
    monkeypatch.setattr(time, "perf_counter", lambda: 1000.0)  # making so many takes a while
    steps = [_record(i / per_s, StepSize([1], [9], 1), 1) for i in range(2 * per_s, 0, -1)]
    assert _of(steps)["tokens_per_s"] == pytest.approx(per_s, rel=0.1)
    assert _of(steps[-20:])["tokens_per_s"] == pytest.approx(20)


def test_the_speed_is_of_tokens_that_came_out() -> None:
    """Not of rows that had logits: of a draft, or of a prompt whose log-probabilities are read."""
    draft = _record(0.1, StepSize([5], [10], 5, drafted=4), 2)
    prompt = _record(0.2, StepSize([8], [8], 8, prefill_tokens=8), 1)
    found = _of([prompt, draft])
    assert found["tokens_per_s"] == 3
    tokens = [(step["prefill_tokens"], step["decode_tokens"]) for step in found["steps"]]
    assert tokens == [(8, 0), (0, 5)]


def test_while_the_model_is_loaded_there_is_only_a_comment() -> None:
    class Loading:
        engine_or_none = None
        state = "loading"

    async def first() -> bytes:
        return await anext(live.events(Loading()))  # type: ignore[arg-type]

    assert asyncio.run(first()).startswith(b": ")
