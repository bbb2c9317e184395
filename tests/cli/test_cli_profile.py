"""`penstock profile`: tables, JSON, trace and plot of the embedded and of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch
from tests.models.tiny import make_tiny
from typer.testing import Result

from penstock.bench import profile as benchmark
from penstock.bench.latency import Workload
from penstock.bench.meter import Meter
from penstock.cli.profile import _about_gaps
from penstock.errors import KernelError
from penstock.hardware import Hardware, Peaks
from penstock.kernels import native
from penstock.pipeline.vocabulary import reduce_vocabulary
from penstock.roofline import OPS, StepRecord
from penstock.roofline.gaps import Gaps
from penstock.runtime import load_runtime

Run = Callable[..., Result]


LATENTS = {"q", "q_down", "q_up", "kv", "heads"}
MIXED = {"experts", "shared_up", "shared_down", "narrow", "widen"}
DELTA = {"delta", "gate", "gates", "mixed"}
STATED = DELTA | {"conv", "mamba"}
INPUTS = {"projection", "input_gate", "input_out"}
ROWS = set(OPS) - {"norm", "softcap"} - LATENTS - MIXED - STATED - INPUTS
"""What a Llama shows: its matrices take the norms along, and there are neither cap nor experts."""


@pytest.fixture(autouse=True)
def fake_peaks(known_peaks: Peaks, monkeypatch: pytest.MonkeyPatch) -> Peaks:
    """Instead of two seconds of measuring."""

    def measure(device: torch.device, hardware: Hardware) -> Peaks:
        return known_peaks

    monkeypatch.setattr(benchmark, "measure_on", measure)
    return known_peaks


def test_the_embedded_model(penstock: Run) -> None:
    result = penstock("profile", "--prompt-len", 32, "--steps", 2)
    assert result.exit_code == 0, result.output
    for word in ("prefill: 1 × 32 tokens", "decode: 1 × 1 token @ 32", *ROWS, "between operators",
                 "achieved/floor", "undisturbed", "Measured peaks"):  # fmt: skip
        assert word in result.stdout
    assert max(map(len, result.stdout.splitlines())) > 80  # nothing was cut to a terminal's width


def test_a_reduced_vocabulary(penstock: Run, tmp_path: Path) -> None:
    """Random prompts are of kept tokens, and the program is timed beside the map."""
    reduce_vocabulary("stories", tmp_path / "small", size=640, texts=["Once upon a time"])
    kept = tmp_path / "p.json"
    result = penstock(
        "profile", tmp_path / "small", "--prompt-len", 16, "--steps", 2, "--json", kept
    )
    assert result.exit_code == 0, result.output
    decode = json.loads(kept.read_text())["results"]["decode"]
    (head,) = (op for op in decode["ops"] if op["op"] == "head")
    assert head["bytes_moved"] == 640 * 256 * 2


def test_operators_called_one_by_one_are_the_same(base_model: Path) -> None:
    workload = Workload(input_len=20, output_len=8, batch_size=1, context=20, repeats=1)
    calls = []
    for eager in (False, True):
        config = workload.config(str(base_model))
        config = replace(config, model=replace(config.model, enforce_eager=eager))
        phases = benchmark.run(config, load_runtime(config), workload).phases
        calls.append([(row.op, row.calls, row.flops) for phase in phases for row in phase.rows])
    assert calls[0] == calls[1] and len(calls[0]) > 10


def test_figures_follow_from_each_other(
    penstock: Run, base_model: Path, tmp_path: Path, known_peaks: Peaks
) -> None:
    files = {name: tmp_path / "new" / name for name in ("p.json", "t.json", "r.svg")}
    result = penstock(
        "profile", base_model, "--prompt-len", 40, "--context", 64, "--output-len", 3,
        "--batch-size", 2, "--json", files["p.json"], "--trace", files["t.json"],
        "--svg", files["r.svg"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(files["p.json"].read_text())
    assert found["benchmark"] == "profile" and found["setup"]["context"] == 64
    for phase in found["results"].values():
        outside = sum(phase[f"{part}_s"] for part in benchmark.PARTS)
        whole = phase["ops_s"] + phase["between_ops_s"] + outside
        assert whole == pytest.approx(phase["seconds"])
        assert phase["ops_s"] == pytest.approx(sum(op["seconds"] for op in phase["ops"]))
        for op in phase["ops"]:
            assert op["share"] == pytest.approx(op["seconds"] / phase["seconds"])
    prefill, decode = (
        {op["op"]: op for op in found["results"][name]["ops"]} for name in ("prefill", "decode")
    )
    assert set(prefill) >= ROWS and set(decode) >= ROWS
    assert (prefill["qkv"]["calls"], decode["down"]["calls"], decode["head"]["calls"]) == (2, 2, 1)
    # contexts of 67 to 69: the first step's token and two that warm up came before
    kv = 2 * 2 * 2 * 16 * 2 * 2 * (67 + 68 + 69) / 3
    assert decode["attention"]["bytes_moved"] == pytest.approx(kv)
    assert decode["up"]["bytes_moved"] == 2 * 2 * 256 * 64
    assert decode["up"]["flops"] == 2 * 2 * 2 * 256 * 64
    floor = decode["up"]["bytes_moved"] / known_peaks.read_bytes_per_s
    assert decode["up"]["floor_s"] == pytest.approx(floor)
    assert decode["up"]["achieved"] == pytest.approx(floor / decode["up"]["seconds"])
    assert (decode["up"]["bound"], prefill["embedding"]["bound"]) == ("memory", "cache")
    assert prefill["qkv"]["intensity"] == pytest.approx(80)

    events = json.loads(files["t.json"].read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    steps = [e for e in spans if e["cat"] == "step"]
    assert [e["name"] for e in steps] == ["step (prefill)"] + ["step (decode)"] * 3
    parts = {e["name"] for e in spans if e["cat"] == "engine"}
    assert parts == {"schedule", "batch", "forward", "sample", "detokenize", "output"}
    forwards = [e for e in spans if e["name"] == "forward"]
    for op in (e for e in spans if e["cat"] == "op"):
        assert any(
            f["ts"] <= op["ts"] and op["ts"] + op["dur"] <= f["ts"] + f["dur"] for f in forwards
        )
    assert ET.parse(files["r.svg"]).getroot().tag.endswith("svg")


@pytest.mark.skipif(native.handle is None, reason="nobody counts experts without a program")
def test_a_mixture_of_experts(penstock: Run, tmp_path: Path) -> None:
    """How many a step reads is counted as it runs, of prompts more than of a token."""
    make_tiny("mixtral", tmp_path / "m")
    kept = tmp_path / "p.json"
    result = penstock(
        "profile", tmp_path / "m", "--prompt-len", 40, "--output-len", 3, "--json", kept
    )
    assert result.exit_code == 0, result.output
    assert "decode: 2.0 experts are read in a layer and step." in result.stdout
    found = json.loads(kept.read_text())["results"]
    assert found["decode"]["experts_read"] == 2.0 < found["prefill"]["experts_read"] <= 6.0
    rows = {op["op"]: op for op in found["decode"]["ops"]}
    assert not {"up", "down"} & rows.keys()
    assert (rows["experts"]["calls"], rows["norm"]["calls"]) == (3, 2 * 3)


def test_it_refuses_what_does_not_fit(penstock: Run, base_model: Path) -> None:
    result = penstock("profile", base_model, "--prompt-len", 2047)
    assert result.exit_code == 1
    assert "this model has 2048 positions" in result.stderr
    assert penstock("profile", base_model, "--steps", 0).exit_code == 2
    missing = penstock("profile", base_model.parent / "nothing")
    assert missing.exit_code == 1 and missing.stderr.startswith("error: ")


def test_gaps_of_steps_that_decode(base_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that are looked at only decode, and the engine is left with nothing to do."""
    workload = Workload(input_len=40, output_len=8, batch_size=2, context=40, repeats=1)
    config = workload.config(str(base_model))
    meter = Meter(config, load_runtime(config))
    seen: list[StepRecord] = []

    def profiled(run: Callable[[], None]) -> Gaps:
        meter.take()
        run()
        seen.extend(meter.take())
        return Gaps(10, 2, 1.0, 0.9, 0.06, 0.04, 0.5)

    monkeypatch.setattr(benchmark, "profiled", profiled)
    gaps, why = benchmark._gaps(meter, np.random.default_rng(0), workload)
    assert gaps is not None and not why
    assert [r.size.queries for r in seen] == [[1, 1]] * 5
    assert not meter.engine.requests

    def fails(run: object) -> Gaps:
        raise KernelError("The trace has no kernels.\nMore.")

    monkeypatch.setattr(benchmark, "profiled", fails)
    assert benchmark._gaps(meter, np.random.default_rng(0), workload) == (
        None, "The trace has no kernels.",
    )  # fmt: skip


def test_gaps_are_told(base_model: Path) -> None:
    workload = Workload(input_len=20, output_len=8, batch_size=1, context=20, repeats=1)
    config = workload.config(str(base_model))
    found = benchmark.run(config, load_runtime(config), workload)
    assert found.as_dict()["gaps"] is None and _about_gaps(found) == []
    gaps = Gaps(230, 1, 1.0, 0.9, 0.06, 0.04, 0.5)
    [said] = _about_gaps(replace(found, gaps=gaps))
    assert "busy 90% of the time, waiting for a launch 6.0%, between kernels 4.0%" in said
    assert "230 kernels by 1 launches; 88% of the host's work" in said
    [said] = _about_gaps(replace(found, why_no_gaps="no profiler"))
    assert said == "The GPU's gaps weren't seen: no profiler"


@pytest.mark.skipif(native.handle is None, reason="a program runs its operators one by one")
def test_attention_over_latents(penstock: Run, tmp_path: Path) -> None:
    """Each of its products has its row; those of heads are counted with what rotates queries."""
    make_tiny("deepseek-v3", tmp_path / "m")
    kept = tmp_path / "p.json"
    result = penstock(
        "profile", tmp_path / "m", "--prompt-len", 12, "--output-len", 4, "--json", kept
    )
    assert result.exit_code == 0, result.output
    found = json.loads(kept.read_text())["results"]["decode"]["ops"]
    calls = {row["op"]: row["calls"] for row in found}
    assert {name: calls.get(name, 0) for name in sorted(LATENTS | MIXED)} == {
        "q": 0, "q_down": 3, "q_up": 3, "kv": 3, "heads": 6, "experts": 2, "shared_up": 2,
        "shared_down": 2, "narrow": 0, "widen": 0,
    }  # fmt: skip
    assert "other" not in calls


@pytest.mark.skipif(native.handle is None, reason="a program runs its operators one by one")
def test_layers_with_states(penstock: Run, tmp_path: Path) -> None:
    """Three have one and the first attends; what the delta rule reads is its states."""
    made = make_tiny("qwen3_5", tmp_path / "m")
    kept = tmp_path / "p.json"
    result = penstock(
        "profile", tmp_path / "m", "--prompt-len", 12, "--output-len", 4, "--json", kept
    )
    assert result.exit_code == 0, result.output
    found = {row["op"]: row for row in json.loads(kept.read_text())["results"]["decode"]["ops"]}
    assert {name: found[name]["calls"] for name in sorted(DELTA)} == {
        "delta": 3, "gate": 1, "gates": 3, "mixed": 3,
    }  # fmt: skip
    state = 4 * 4 * 16 * 32 + 4 * 2 * (2 * 2 * 16 + 4 * 32)  # float32, of two inputs before it
    assert made.load().dtype is torch.float32
    assert found["delta"]["bytes_moved"] == 3 * 2 * state
    assert "other" not in found


@pytest.mark.skipif(native.handle is None, reason="a program runs its operators one by one")
def test_layers_with_mamba(penstock: Run, tmp_path: Path) -> None:
    """Three of four layers have one, of 4 heads of 32 with states of 32 each, and one group."""
    make_tiny("granite-hybrid", tmp_path / "m")
    kept = tmp_path / "p.json"
    result = penstock(
        "profile", tmp_path / "m", "--prompt-len", 12, "--output-len", 4, "--json", kept
    )
    assert result.exit_code == 0, result.output
    found = {row["op"]: row for row in json.loads(kept.read_text())["results"]["decode"]["ops"]}
    assert [found[name]["calls"] for name in ("mamba", "mixed", "gates", "qkv")] == [3, 3, 3, 1]
    assert found["mamba"]["bytes_moved"] == 3 * 2 * (4 * 4 * 32 * 32 + 4 * 3 * (4 * 32 + 2 * 32))
    assert "other" not in found


@pytest.mark.skipif(native.handle is None, reason="a program runs its operators one by one")
def test_layers_with_convolutions(penstock: Run, tmp_path: Path) -> None:
    """Three of four layers have one, whose two latest inputs are read and written."""
    make_tiny("lfm2", tmp_path / "m")
    kept = tmp_path / "p.json"
    result = penstock(
        "profile", tmp_path / "m", "--prompt-len", 12, "--output-len", 4, "--json", kept
    )
    assert result.exit_code == 0, result.output
    found = {row["op"]: row for row in json.loads(kept.read_text())["results"]["decode"]["ops"]}
    assert (found["conv"]["calls"], found["mixed"]["calls"], found["qkv"]["calls"]) == (3, 3, 1)
    assert found["conv"]["bytes_moved"] == 3 * 2 * (4 * 2 * 64)
    assert "other" not in found
