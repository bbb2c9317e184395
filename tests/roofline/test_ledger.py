"""The ledger's sums, against sums made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType

import pytest

from penstock.hardware import Hardware, Peaks, load_peaks, save_peaks
from penstock.roofline import CAUSES, Ledger, StepRecord, StepSize, floor_of

from .shapes import costs, qwen

PEAKS = Peaks(1e9, 1e10, 4e10, 2, "")
DECODE = StepSize([1, 1], [10, 20], 2)
PROMPT = StepSize([1, 512], [11, 512], 2, prefill_tokens=512)
MARKS = (10.0, 11.0, 13.0, 23.0, 24.5, 25.0)
"""Schedule 1 s, batch 2 s, forward 10 s, sample 1.5 s, output 0.5 s."""


def test_a_record_splits_the_step_by_cause() -> None:
    ledger = Ledger(costs(qwen()), PEAKS)
    ledger.wait(9.0)
    ledger.wait(9.5)  # was waiting already
    record = ledger.record(DECODE, MARKS, detokenize_s=0.125, draft_s=0.25)
    assert record.lost == {
        "draft": 0.25, "schedule": 0.75, "batch": 2, "sample": 1.5, "detokenize": 0.125,
        "output": 0.375, "wait": 1,
    }  # fmt: skip
    assert tuple(record.lost) == CAUSES and record.forward_s == 10
    assert (record.seconds, record.overhead_s) == (15.0, 5.0)
    assert record.floor == floor_of(record.cost, PEAKS)
    ledger.rest()
    assert ledger.record(DECODE, MARKS).wait_s == 0.0  # nobody was there


def test_the_phases_add_up() -> None:
    ledger = Ledger(costs(qwen()), PEAKS)
    shown: list[StepRecord] = []
    ledger.watch = shown.append
    for size in (PROMPT, DECODE, DECODE):
        ledger.record(size, MARKS, generated=2)
    prefill, decode, both = ledger.prefill, ledger.decode, ledger.total
    assert (prefill.steps, prefill.sequences, prefill.tokens) == (1, 2, 513)
    assert (decode.steps, decode.sequences, decode.tokens) == (2, 4, 4)
    assert (decode.seconds, decode.forward_s, decode.batch_s) == (30.0, 20.0, 4.0)
    assert both.steps == 3 == len(shown)
    assert both.bytes_moved == sum(r.cost.bytes_moved for r in shown)
    assert both.flops == sum(r.cost.flops for r in shown)
    floors = [floor_of(r.cost, PEAKS) for r in shown]
    assert [f.bound for f in floors] == ["compute", "memory", "memory"]
    assert both.floor_s == pytest.approx(sum(f.seconds for f in floors))
    assert both.share == pytest.approx(sum(f.seconds for f in floors) / 45)
    assert (prefill.bound, decode.bound) == ("compute", "memory")
    before = ledger.total
    ledger.record(DECODE, MARKS)
    assert ledger.total.since(before).steps == 1


def test_speed_is_of_what_came_out_not_of_what_was_computed() -> None:
    """Of a draft of four, one guess was right; of two prompts, one token each came."""
    ledger = Ledger(costs(qwen()), PEAKS)
    record = ledger.record(StepSize([5], [30], 5, drafted=4), MARKS, generated=2)
    ledger.record(StepSize([1, 7], [20, 7], 2, prefill_tokens=8), MARKS, generated=2)
    assert (record.generated, record.size.is_prefill) == (2, False)
    assert (ledger.decode.tokens, ledger.decode.generated) == (5, 2)
    assert ledger.decode.tokens_per_s == pytest.approx(2 / 15)
    assert ledger.prefill.tokens_per_s == pytest.approx((8 + 2) / 15)
    found = ledger.snapshot()["decode"]
    assert (found["tokens"], found["prefill_tokens"], found["generated_tokens"]) == (5, 0, 2)


def test_floors_are_none_until_somebody_calibrates() -> None:
    ledger = Ledger(costs(qwen()), None)
    assert ledger.record(DECODE, MARKS).floor is None
    assert ledger.snapshot()["decode"]["floor_s"] is None
    assert (ledger.decode.share, ledger.decode.bound) == (None, None)
    ledger.peaks = PEAKS
    record = ledger.record(DECODE, MARKS)
    assert record.floor is not None
    assert ledger.decode.steps == 2
    assert ledger.decode.share == pytest.approx(record.floor.seconds / 15)  # of that step alone


def test_a_snapshot_is_json() -> None:
    ledger = Ledger(costs(qwen()), PEAKS)
    ledger.record(DECODE, MARKS)
    found = json.loads(json.dumps(ledger.snapshot()))
    assert found["peaks"]["tile_flops"] == 4e10
    assert set(found["decode"]["lost_s"]) == set(CAUSES)
    assert found["decode"]["share_of_floor"] == pytest.approx(ledger.decode.share)
    assert found["prefill"]["steps"] == 0


def calls(ledger: Ledger, size: StepSize) -> int:
    """Python functions that one record calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        ledger.record(size, MARKS)
    finally:
        sys.setprofile(None)
    return count


def test_a_record_costs_the_same_for_any_model_and_batch() -> None:
    """Its work is bounded by counting it: neither layers nor sequences add a call."""
    big, small = Ledger(costs(qwen()), PEAKS), Ledger(costs(qwen()), PEAKS)
    spec = qwen()
    one_layer = type(spec)(**{
        **{name: getattr(spec, name) for name in spec.__slots__}, "layers": spec.layers[:1]
    })  # fmt: skip
    small.costs = costs(one_layer)
    least = calls(small, StepSize([1], [10], 1))
    assert least <= 30
    assert calls(big, StepSize([1] * 256, [10] * 256, 256)) == least


def test_peaks_kept_before_int8_was_measured_are_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    hardware = Hardware("a processor", 2, (), 1, 1)
    peaks = Peaks(1e9, 1e10, 4e10, 2, "then")
    assert peaks.of("int8") == 4e10  # as the reference kernels have it
    file = save_peaks(hardware, peaks, "native")
    assert load_peaks(hardware, 2, "native") == peaks
    file.rename(tmp_path / f"peaks-{hardware.key}-2-native.json")
    assert load_peaks(hardware, 2, "native") is None
