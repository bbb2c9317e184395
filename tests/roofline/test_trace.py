"""Operators are timed under the row they belong to, and spans make a trace that viewers read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from penstock.nn import Decoder
from penstock.quant import formats_of
from penstock.roofline import OPS, StepSize
from penstock.roofline.trace import OTHER, GpuOpTimer, OpTimer, Rows, Span, chrome_trace
from penstock.step import KV, Step
from tests.models.tiny import FAMILIES, make_tiny

from .shapes import costs, mixed


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(mixed(), formats_of(None, torch.bfloat16), torch.bfloat16)
    for module in model.modules():
        for name, shape in getattr(module, "expected", dict)().items():
            module.load(name, 0.05 * torch.randn(shape))  # type: ignore[operator, union-attr]
    return model


def step(tokens: int) -> Step:
    at = torch.arange(tokens, dtype=torch.int32)
    return Step(
        tokens=at, positions=at, slots=at, query_start=torch.tensor([0, tokens]).int(),
        context_len=torch.tensor([tokens]).int(), block_table=torch.zeros(1, 1).int(),
        sample_at=torch.tensor([tokens - 1]).int(),
    )  # fmt: skip


def cache(decoder: Decoder) -> KV:
    return costs(decoder.spec).layout.allocate(1)  # type: ignore[attr-defined, no-any-return]


def test_every_operator_has_its_row(decoder: Decoder) -> None:
    kv, timer, seven = cache(decoder), OpTimer(Rows(decoder)), step(7)
    with torch.inference_mode(), timer:
        timed = decoder(seven, kv)
    events = timer.take()
    counted = {row.op: row.calls for row in costs(decoder.spec).ops(StepSize([7], [7], 1))}
    calls = {op: sum(e.row == op and e.name.startswith("penstock.") for e in events) for op in OPS}
    assert calls == counted
    linears = [e for e in events if e.name.startswith("penstock.linear")]
    assert [e.row for e in linears] == ["qkv", "out", "up", "down"] * 3 + ["head"]
    assert linears[0].shapes.startswith("[7, 64]")
    assert [e.name for e in events if e.row == OTHER] == []
    assert all(b.start >= a.start + a.seconds for a, b in itertools.pairwise(events))
    assert timer.take() == []
    with torch.inference_mode():
        assert torch.equal(decoder(step(7), kv), timed)  # nothing is changed, nothing is timed
    assert timer.take() == []


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_of_every_family_are_counted(family: str, tmp_path: Path) -> None:
    """As often as the cost of a step says."""
    model = make_tiny(family, tmp_path).load("bfloat16").model
    timer = OpTimer(Rows(model))
    with torch.inference_mode(), timer:
        model(step(7), cache(model))
    events = timer.take()
    counted = {row.op: row.calls for row in costs(model.spec).ops(StepSize([7], [7], 1))}
    calls = {op: sum(e.row == op and e.name.startswith("penstock.") for e in events) for op in OPS}
    assert calls == counted


def test_an_operator_that_raises_leaves_the_timer_usable(decoder: Decoder) -> None:
    timer = OpTimer(Rows(decoder))
    with torch.inference_mode():
        with pytest.raises(RuntimeError), timer:
            decoder.head(torch.zeros(1, 65, dtype=torch.bfloat16))
        timer.take()
        with timer:
            decoder(step(3), cache(decoder))
    assert sum(e.row == "head" for e in timer.take()) == 1
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in decoder.modules())


def test_a_gpu_s_clock(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that tell milliseconds: each mark is 2 ms after the one before."""
    order: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            order.append("mark")
            self.at = 2.0 * order.count("mark")

        def elapsed_time(self, other: Event) -> float:
            assert order[-1] == "waited"
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append("busy"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("waited"))
    plain, timer = OpTimer(Rows(decoder)), GpuOpTimer(Rows(decoder), torch.device("cpu"))
    kv = cache(decoder)
    for each in (plain, timer):
        with torch.inference_mode(), each:
            decoder(step(3), kv)
    events = timer.take()
    assert order[0] == "busy" and order[1] == "mark"
    assert [(e.row, e.name, e.shapes) for e in events] == [
        (e.row, e.name, e.shapes) for e in plain.take()
    ]
    assert all(e.seconds == pytest.approx(2e-3) for e in events)
    assert events[-1].start - events[0].start == pytest.approx(4e-3 * (len(events) - 1))


def test_a_trace_nests_spans_on_one_thread() -> None:
    spans = [
        Span("op", "op", 10.002, 0.001, {"shapes": "[1, 2]"}),
        Span("step", "step", 10.0, 0.005),
        Span("forward", "engine", 10.0, 0.004),
    ]
    found = json.loads(json.dumps(chrome_trace(spans, "a title")))
    names, events = found["traceEvents"][:2], found["traceEvents"][2:]
    assert names[0]["args"]["name"] == "a title"
    assert [e["name"] for e in events] == ["step", "forward", "op"]  # the outer one first
    assert all(e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 1) for e in events)
    assert events[0]["ts"] == 0.0
    assert events[2]["ts"] == pytest.approx(2000)  # microseconds
    assert events[2]["dur"] == pytest.approx(1000)
    assert events[2]["args"] == {"shapes": "[1, 2]"}
    assert chrome_trace([], "nothing")["traceEvents"]
