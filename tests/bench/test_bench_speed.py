"""`penstock bench`: runs what it says, and its figures follow from each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from penstock.bench import environment, latency, throughput
from penstock.bench.meter import Meter
from penstock.bench.report import Column, above
from penstock.bench.workload import setup, title
from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.config.parallel import ParallelConfig
from penstock.hardware import Hardware, Peaks
from penstock.roofline import StepRecord, StepSize, floor_s
from penstock.runtime import load_runtime
from penstock.sampling import SamplingParams

PEAKS = Peaks(2e10, 1e11, 1e12, 2, "2026-11-21T00:00:00+00:00")


@pytest.fixture
def fake_peaks(monkeypatch: pytest.MonkeyPatch) -> Peaks:
    """Instead of two seconds of measuring."""

    def measure(device: torch.device, hardware: Hardware) -> Peaks:
        return PEAKS

    monkeypatch.setattr(latency, "measure_on", measure)
    monkeypatch.setattr(throughput, "measure_on", measure)
    return PEAKS


def meter(model: Path, **options: object) -> Meter:
    config = EngineConfig.of(model=model, skip_tokenizer_init=True, **options)
    return Meter(config, load_runtime(config))


def test_every_step_is_recorded(tiny: Path) -> None:
    """Prompts of 5 and 40 in chunks of at most 32 tokens, then one token each."""
    run = meter(tiny, max_num_batched_tokens=32, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=3, detokenize=False)
    run.engine.add_request("a", range(5), params)
    run.engine.add_request("b", range(40), params)
    while run.engine.has_unfinished:
        run.step()
    records = run.take()
    assert [sorted(r.size.queries) for r in records] == [[5, 27], [1, 13], [1, 1], [1]]
    assert [sorted(r.size.contexts) for r in records] == [[5, 27], [6, 40], [7, 41], [42]]
    assert [r.size.is_prefill for r in records] == [True, True, False, False]
    assert all(r.seconds >= r.forward_s > 0 for r in records)
    assert run.take() == []


def record(meter: Meter, seconds: float, size: StepSize) -> StepRecord:
    """A step whose time was all in the forward pass, but a fifth."""
    cost = meter.engine.ledger.costs.cost(size)
    made = len(size.queries)
    return StepRecord(0.0, seconds, 0, 0, 0, 0.8 * seconds, 0, 0, 0, 0, size, cost, None, made)


def test_a_phase_adds_its_steps_up(tiny: Path) -> None:
    run = meter(tiny)
    records = [
        record(run, 0.5, StepSize([1, 1], [10, 20], 2)),
        record(run, 0.25, StepSize([1], [11], 1)),
    ]
    phase = run.phase(records, PEAKS)
    costs = [record.cost for record in records]
    assert (phase.steps, phase.sequences, phase.tokens, phase.seconds) == (2, 3, 3, 0.75)
    assert phase.bytes_moved == sum(cost.bytes_moved for cost in costs)
    assert phase.floor_s == pytest.approx(sum(floor_s(cost, PEAKS) for cost in costs))
    assert phase.share == pytest.approx(phase.floors_s / 0.75)
    assert phase.tokens_per_s == pytest.approx(4.0)
    assert phase.bound == "memory"
    assert records[0].overhead_s == pytest.approx(0.1)
    empty = run.phase([], PEAKS)
    assert (empty.share, empty.tokens_per_s) == (None, 0.0)


def test_tiles_do_not_count_for_float32(tiny: Path) -> None:
    size = StepSize([512], [512], 1)
    half, full = meter(tiny), meter(tiny, dtype="float32")
    a, b = record(half, 1.0, size), record(full, 1.0, size)
    assert half.phase([a], PEAKS).compute_s == pytest.approx(a.cost.flops / 1e12)
    assert full.phase([b], PEAKS).compute_s == pytest.approx(b.cost.flops / 1e11)
    assert b.cost.weight_bytes == 2 * a.cost.weight_bytes
    assert (half.compute, full.compute) == ("bfloat16", "float32")


@pytest.mark.usefixtures("fake_peaks")
@pytest.mark.parametrize("context", [32, 100])
def test_latency(tiny: Path, context: int) -> None:
    workload = latency.Workload(
        input_len=32, output_len=8, batch_size=3, context=context, repeats=2
    )
    config = workload.config(str(tiny))
    report = latency.run(config, load_runtime(config), workload)
    prefill, decode = report.results["prefill"], report.results["decode"]
    assert (prefill["steps"], prefill["tokens"]) == (1, 96)
    assert decode["steps"] == 2 * (7 - latency.WARM_UP_STEPS)
    # weights; keys and values of 2 layers with 2 heads of 16 in 2 bytes: read, and one written
    contexts = range(context + 1 + latency.WARM_UP_STEPS, context + 8)
    kv = sum(3 * 2 * 2 * 2 * 16 * 2 * (c + 1) for c in contexts) / len(contexts)
    assert decode["bytes_per_step"] == pytest.approx(report.setup["weight_bytes"] + kv)
    assert decode["tokens_per_s"] == pytest.approx(3 / decode["step_s"])
    assert decode["share_of_floor"] == pytest.approx(
        decode["bytes_per_step"] / PEAKS.read_bytes_per_s / decode["step_s"]
    )
    assert prefill["share_of_matrix_peak"] == pytest.approx(
        prefill["flops"] / prefill["seconds"] / PEAKS.tile_flops
    )


def test_ranks_stand_in_the_heading(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, where = meter(tiny), {"isa": "avx2", "threads": 2}
    assert setup(run)["ranks"] == 1 and title("X", run, where).endswith(", 2 threads")
    monkeypatch.setattr(ParallelConfig, "size", 3)
    assert setup(run)["ranks"] == 3
    assert title("X", run, where).endswith(", 2 threads, 3 ranks")


@pytest.mark.usefixtures("fake_peaks")
def test_throughput(tiny: Path) -> None:
    workload = throughput.Workload(num_prompts=10, input_len=16, output_len=6, max_num_seqs=4)
    config = workload.config(str(tiny))
    report = throughput.run(config, load_runtime(config), workload)
    found = report.results
    prompts, decode = found["steps_with_prompts"], found["decode_steps"]
    assert prompts["tokens"] + decode["tokens"] == 10 * 16 + 10 * 5  # the last token isn't computed
    assert found["output_tokens_per_s"] * found["elapsed_s"] == pytest.approx(60)
    assert found["total_tokens_per_s"] * found["elapsed_s"] == pytest.approx(220)
    assert 1 < found["sequences_per_step"] <= 4
    assert 0 < found["share_of_floor"] < 1


def test_the_middle_of_the_peaks_counts() -> None:
    low = replace(PEAKS, read_bytes_per_s=1e10, fma_flops=2e11)
    last = replace(PEAKS, read_bytes_per_s=9e10, measured_at="later")
    middle = environment.median_of([low, PEAKS, last])
    assert middle == replace(PEAKS, measured_at="later")


def test_the_command_prints_and_writes(tiny: Path, tmp_path: Path) -> None:
    """With real peaks, so this is what a user sees."""
    file = tmp_path / "results" / "latency.json"
    options = ["--input-len", "48", "--output-len", "6", "--repeats", "1", "--json", str(file)]
    result = CliRunner().invoke(app, ["bench", "latency", str(tiny), *options])
    assert result.exit_code == 0, result.output
    for word in ("prefill 1 × 48", "decode 1 × 1 @ 48", "share of the floor", "%", "GB/s",
                 "outside the forward pass (schedule", "Measured peaks"):  # fmt: skip
        assert word in result.stdout
    found = json.loads(file.read_text())
    assert set(found) == {
        "benchmark", "setup", "results", "peaks", "hardware", "isa", "threads", "commit",
        "versions", "measured_at",
    }  # fmt: skip
    assert found["setup"]["input_len"] == 48
    assert found["peaks"]["read_bytes_per_s"] > 1e8


@pytest.mark.usefixtures("fake_peaks")
def test_the_throughput_command(tiny: Path) -> None:
    options = ["--num-prompts", "4", "--input-len", "8", "--output-len", "4"]
    result = CliRunner().invoke(app, ["bench", "throughput", str(tiny), *options])
    assert result.exit_code == 0, result.output
    for word in ("whole run", "share of the floor", "4 requests", "sequences a step"):
        assert word in result.stdout


def test_every_sequence_decodes_in_the_steps_that_count(tiny: Path) -> None:
    """Prompts of four steps, and fewer tokens than these: nobody has ended before all decode."""
    workload = latency.Workload(input_len=8, output_len=3, batch_size=64, context=100, repeats=1)
    assert workload.ahead == 3
    config = workload.config(str(tiny))
    meter = Meter(config, load_runtime(config))
    _, decode = latency.run_once(meter, np.random.default_rng(0), workload)
    assert decode and all(len(r.size.queries) == r.size.tokens == 64 for r in decode)
    assert all(100 < context <= 107 for r in decode for context in r.size.contexts)


@pytest.mark.parametrize(("share", "told"), [(0.9, False), (1.04, False), (1.3, True)])
def test_a_share_above_all_is_explained(share: float, told: bool) -> None:
    column = Column("decode", "1 ms", "1", "1 GB/s", "1%", "1 ms", share)
    assert (above([column]) is not None) is told
