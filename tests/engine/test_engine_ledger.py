"""The engine keeps its ledger, and tells each request the floor of the steps it was in."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine import RequestOutput
from penstock.hardware import Peaks, detect, save_peaks
from penstock.kernels import native
from penstock.roofline import StepRecord
from penstock.sampling import SamplingParams

from .toy import toy_engine

PEAKS = Peaks(1e9, 1e10, 0.0, 1, "")


def greedy(tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0 if n == 1 else 1.0, max_tokens=tokens, n=n)


def test_a_request_has_the_floor_of_its_own_steps() -> None:
    """The second comes later and leaves earlier; samples of one request count a step once."""
    engine = toy_engine()
    engine.ledger.peaks = PEAKS
    records: list[StepRecord] = []
    engine.ledger.watch = records.append
    done: dict[str, RequestOutput] = {}
    engine.add_request("long", [1, 2, 3], greedy(6, n=2))
    engine.step()
    engine.add_request("short", [4, 5], greedy(2))
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert len(records) == 6 == engine.stats()["steps"]
    for name, own in (("long", records), ("short", records[1:3])):
        metrics, floors = done[name].metrics, [r.floor for r in own if r.floor is not None]
        assert metrics.floor_s == pytest.approx(sum(f.seconds for f in floors))
        assert metrics.steps_s == pytest.approx(sum(r.seconds for r in own))
        assert metrics.achieved == pytest.approx(metrics.floor_s / metrics.steps_s)
        assert metrics.bound == "memory"
    assert [len(r.size.queries) for r in records] == [1, 3, 3, 2, 2, 2]
    assert [r.size.is_prefill for r in records] == [True, True, False, False, False, False]


def test_no_peaks_no_floor() -> None:
    engine = toy_engine()
    engine.ledger.peaks = None
    engine.add_request("it", [1, 2, 3], greedy(3))
    (metrics,) = {id(o.metrics): o.metrics for _ in range(3) for o in engine.step()}.values()
    assert (metrics.floor_s, metrics.achieved, metrics.bound) == (None, None, None)
    assert engine.ledger.total.steps == 3


def test_waiting_counts_only_while_there_are_requests() -> None:
    engine = toy_engine()
    engine.add_request("a", [1, 2, 3], greedy(2))
    time.sleep(0.01)
    engine.step()
    time.sleep(0.02)
    engine.step()
    assert engine.ledger.prefill.wait_s >= 0.01 and engine.ledger.decode.wait_s >= 0.02
    waited = engine.ledger.total.wait_s
    time.sleep(0.02)  # nobody is there
    engine.add_request("b", [1, 2, 3], greedy(1))
    engine.abort("b", report=False)
    time.sleep(0.02)
    engine.add_request("c", [1, 2, 3], greedy(1))
    engine.step()
    assert engine.ledger.total.wait_s < waited + 0.02


def test_an_engine_never_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the peaks that are kept; where there are none, floors stay unknown."""

    def measure(*arguments: object) -> Peaks:
        raise AssertionError("measured")

    monkeypatch.setattr(sys.modules["penstock.roofline.peaks"], "measure", measure)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert toy_engine().ledger.peaks is None
    kept = replace(PEAKS, threads=torch.get_num_threads())
    save_peaks(detect(), kept, "native" if native.handle else "reference")
    assert toy_engine().ledger.peaks == kept
