"""`benchmarks/gpu/run.py`: its own code on a CPU, tiny sizes; what becomes of items that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import engine, run, summary, traffic, warm
from benchmarks.gpu.document import FATAL, Context, Document, is_fatal, perform, plain
from benchmarks.gpu.engine import _forward_times, decode_step, removed
from benchmarks.gpu.models import make
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY, matrices
from benchmarks.gpu.sweep import candidates

from penstock.errors import KernelError
from penstock.kernels.triton import launchers
from penstock.roofline.gaps import Gaps

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="dry runs interpret Triton's kernels: the GPU has real ones"
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets, and where it looks for modules, is undone after each test."""
    for name, value in (("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` changes the process it is in; these tests have what it asks for."""
    monkeypatch.setattr(run, "prepare", lambda dry: None)


def go(out: Path, *arguments: str) -> dict[str, Any]:
    run.main(["--out", str(out), "--dry-run", "--in-process", *arguments])
    found: dict[str, Any] = json.loads((out / "gpu.json").read_text())
    return found


def results(found: dict[str, Any], section: str) -> dict[str, Any]:
    items = found["sections"][section]
    assert [name for name, entry in items.items() if "result" not in entry] == [], items
    return {name: entry["result"] for name, entry in items.items()}


@pytest.mark.usefixtures("here")
def test_engine_traffic_and_peaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = go(tmp_path, "--only", "peaks,engine,traffic,peers:penstock")
    peaks = results(found, "peaks")["peaks"]
    assert peaks["read_bytes_per_s"] > 0 < peaks["bfloat16_flops"]
    environment = found["environment"]
    assert {"hardware", "commit", "versions", "gpu", "why_no_gpu"} <= set(environment)
    assert {"torch", "triton", "penstock"} <= set(environment["versions"])

    steps = results(found, "engine")
    one = steps["8b-decode-1"]
    assert one["achieved"] == pytest.approx(one["floor_s"] / one["step_s"])
    assert one["tokens_per_s"] == pytest.approx(1 / one["step_s"])
    assert steps["8b-w4a16-decode-1"]["weights"].startswith("w4a16")
    prefill = steps["8b-prefill-4096"]
    assert prefill["steps"] == 1 and prefill["of_matrix_rate"] > 0
    assert set(steps["modes"]) == {"graphs-1", "graphs-2"}

    for rate in results(found, "traffic").values():
        assert rate["completed"] == rate["requests"] == 6
        assert 0 < rate["ttft_s"]["p50"] <= rate["ttft_s"]["p99"]
    assert results(found, "peers")["penstock"]["output_tokens_per_s"] > 0

    met = {line["target"]: line["met"] for line in found["summary"]}
    assert met["TTFT and TPOT percentiles at three rates"] is True
    assert met["greedy tokens in float32 equal the CPU's, every family"] is None
    assert "not measured" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_operators_and_checks(tmp_path: Path) -> None:
    only = "peaks:peaks,checks:parity,checks:invariance,ops,sweep:bfloat16"
    assert list(run.chosen(only)) == ["peaks", "checks", "ops", "sweep"]
    found = go(tmp_path, "--only", "peaks:peaks,ops,sweep:bfloat16")
    ops = results(found, "ops")
    norm = ops["small"]["rms_norm-2"]
    assert norm["penstock"]["achieved"] == pytest.approx(
        norm["floor_s"] / norm["penstock"]["seconds"]
    )
    needs = dict.fromkeys(("linear-tiny-bfloat16", "linear-tiny-w8a8", "compile"), "linear")
    needs |= dict.fromkeys(("attention-decode", "attention-prefill"), "paged_attention")
    for item, name in needs.items():
        assert ("missing" in ops[item]) is (name not in launchers()), item
    checks = results(go(tmp_path / "more", "--only", "checks:parity"), "checks")
    assert checks["parity"]["all_close"] is True


@pytest.mark.usefixtures("here")
def test_tokens_of_two_devices_and_of_any_batch(tmp_path: Path) -> None:
    found = results(go(tmp_path, "--only", "checks:greedy"), "checks")["greedy-llama"]
    assert found["equal"] is True and found["logprobs_apart"] == 0.0
    assert [len(tokens) for tokens in found["cpu"]] == [24, 24, 24]
    more = results(go(tmp_path / "more", "--only", "checks:invariance"), "checks")
    compared = {"alone": True, "in chunks": True}
    assert more == {"invariance-llama": {"equal": True, "compared": compared}}


# ── what fails ───────────────────────────────────────────────────────────────────────────────


def context(out: Path, seconds: float = 60.0, only: str = "") -> Context:
    end = time.monotonic() + seconds
    return Context(torch.device("cpu"), True, True, Document(out), end, only)


def raises(error: Exception) -> Callable[[], Any]:
    def item() -> Any:
        raise error

    return item


def test_an_item_that_fails_is_recorded_and_the_others_run(tmp_path: Path) -> None:
    items = [("a", lambda: {"x": float("nan")}), ("b", raises(ValueError("no"))), ("c", lambda: 3)]
    assert perform(context(tmp_path), "ops", items) == 0
    found = Document(tmp_path).items("ops")
    assert found["a"]["result"] == {"x": "nan"} and found["c"]["result"] == 3
    assert "ValueError: no" in found["b"]["error"] and "item" in found["b"]["error"]
    assert summary.errors(Document(tmp_path)) == {"ops: b": "ValueError: no"}


def test_our_own_kernel_s_failure_is_an_error(tmp_path: Path) -> None:
    Document(tmp_path).put(
        "ops", "linear", {"result": {"qkv-1": {"penstock": {"error": "bad"}, "floor_s": 1.0},
                                     "qkv-2": {"cublas": {"error": "theirs"}}}}
    )  # fmt: skip
    assert summary.errors(Document(tmp_path)) == {"ops: linear, qkv-1": "bad"}


def test_a_gpu_that_takes_nothing_more_ends_the_process(tmp_path: Path) -> None:
    ran: list[str] = []
    items = [
        ("a", lambda: ran.append("a")),
        ("b", raises(RuntimeError("CUDA error: an illegal memory access was encountered"))),
        ("c", lambda: ran.append("c")),
    ]
    assert perform(context(tmp_path), "ops", items) == FATAL
    assert perform(context(tmp_path), "ops", items) == 0  # another process: behind it
    assert ran == ["a", "c"]
    assert not is_fatal(RuntimeError("CUDA out of memory. CUDA error"))


def test_no_time_and_not_asked_for(tmp_path: Path) -> None:
    items = [("one", lambda: 1), ("two", lambda: 2)]
    assert perform(context(tmp_path, seconds=-1.0, only="tw"), "ops", items) == 0
    assert Document(tmp_path).items("ops") == {"two": {"skipped": "no time was left"}}


class Processes:
    """Stands for sections' processes: exit codes one after another, or a time-out."""

    def __init__(self, codes: Sequence[int | None], document: Document) -> None:
        self.codes, self.document = list(codes), document
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], *, timeout: float, check: bool) -> Any:
        self.commands.append(command)
        self.document.put("ops", f"item-{len(self.commands)}", {"begun": 1.0})
        code = self.codes.pop(0)
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        if code == 0:
            self.document.put("ops", f"item-{len(self.commands)}", {"result": 1})
        return subprocess.CompletedProcess(command, code)


def test_sections_are_begun_again_behind_what_ended_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Document(tmp_path)
    processes = Processes([FATAL, -11, 0], document)
    monkeypatch.setattr(subprocess, "run", processes)
    wanted = run.options(["--out", str(tmp_path), "--quick"])
    run.run_section(wanted, "ops", 60.0, "linear")
    found = document.items("ops")
    assert found["item-1"] == {"error": "its process ended with code 3"}
    assert found["item-2"] == {"error": "its process ended with code -11"}
    assert found["item-3"] == {"result": 1}
    again = run.options(processes.commands[0][2:])
    assert (again.section, again.only, again.quick) == ("ops", "ops:linear", True)
    assert 0 < again.deadline_s <= 60


def test_a_section_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes([None, 0], Document(tmp_path))
    monkeypatch.setattr(subprocess, "run", processes)
    run.run_section(run.options(["--out", str(tmp_path)]), "ops", 30.0, "")
    assert Document(tmp_path).items("ops") == {
        "item-1": {"error": "was ended with its section, after 30 s"}
    }
    assert len(processes.commands) == 1


@pytest.mark.usefixtures("here")
def test_a_section_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.traffic", None)
    found = go(tmp_path, "--only", "traffic,peaks:environment")
    assert "ModuleNotFoundError" in found["sections"]["traffic"]["start"]["error"]
    assert "result" in found["sections"]["peaks"]["environment"]


def test_unknown_sections_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--only 'opps' isn't one of peaks, checks, ops"):
        run.main(["--out", str(tmp_path), "--only", "opps"])


@pytest.mark.usefixtures("here")
def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no GPU to measure: .* --dry-run tries this on a CPU"):
        run.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_as_a_command_of_its_own(tmp_path: Path) -> None:
    """From anywhere, without penstock on the path, in processes of its own."""
    command = [sys.executable, str(ROOT / "benchmarks/gpu/run.py"), "--out", str(tmp_path / "out"),
               "--dry-run", "--only", "peaks:environment"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/gpu.json").read_text())
    assert found["environment"]["versions"]["torch"] == torch.__version__


# ── figures ──────────────────────────────────────────────────────────────────────────────────


def test_targets_are_held_against_figures(tmp_path: Path) -> None:
    document = Document(tmp_path)
    document.put("engine", "8b-decode-1", {"result": {"achieved_of_copy": 0.86}})
    document.put("engine", "8b-decode-64", {"result": {"achieved_of_copy": 0.5}})
    decode = {f"batch-{b}": {"achieved_of_copy": s} for b, s in ((1, 0.9), (8, 0.8), (64, 0.95))}
    document.put("ops", "attention-decode", {"result": decode})
    speeds = {"penstock": 3000.0, "transformers-8": 800.0, "transformers-16": 500.0}
    for name, speed in speeds.items():
        document.put("peers", name, {"result": {"output_tokens_per_s": speed}})
    document.put("peers", "transformers-continuous", {"error": "its thread has ended"})
    document.put("peers", "transformers-32", {"result": {"skipped": "3 s were left"}})
    document.put("checks", "greedy-llama", {"result": {"equal": True}})
    document.put("checks", "greedy-gpt2", {"result": {"equal": False}})
    found = {line["target"]: (line["value"], line["met"]) for line in summary.lines(document)}
    assert found["8B shape, decode, batch 1: of the floor"] == (0.86, True)
    assert found["8B shape, decode, batch 64: of the floor"] == (0.5, False)
    assert found["output tokens a second: times transformers' best"] == (3.75, True)
    assert found["greedy tokens in float32 equal the CPU's, every family"] == (False, False)
    [attention] = [v for name, v in found.items() if name.startswith("decode attention")]
    assert attention == (0.8, False)
    assert "NOT MET    0.500 ≥ 0.7" in summary.text(document)
    document.put("checks", "greedy-gpt2", {"error": "gone"})
    found = {line["target"]: (line["value"], line["met"]) for line in summary.lines(document)}
    assert found["greedy tokens in float32 equal the CPU's, every family"] == (None, None)


def test_what_graphs_remove() -> None:
    eager = {"exposed_s": 4e-3, "launch_s_a_step": 5e-3, "step_s": 9e-3}
    graphs = {"exposed_s": 1e-3, "step_s": 6e-3, "forward_ahead_s": 5e-3, "outside_s": 2e-3}
    found = removed(graphs, eager)  # the profiler saw only one of them
    assert found == {
        "by": "exposed_s", "launch_gaps_removed": 0.75, "host_hidden": pytest.approx(0.5),
    }  # fmt: skip
    found = removed({**graphs, "launch_s_a_step": 5e-4, "host_hidden": 0.97}, eager)
    assert found["by"] == "launch_s_a_step"
    assert found["launch_gaps_removed"] == pytest.approx(0.9) and found["host_hidden"] == 0.97


def test_a_step_that_decodes_runs(tmp_path: Path) -> None:
    """Of any batch: what is timed apart from the engine is a step as the engine makes them."""
    made = make(context(tmp_path), TINY, max_model_len=1056, batch=3)
    runner, step = made.runtime.runner, decode_step(3, 40, made.runtime.layout.block_size)
    logits = runner.forward(step).clone()
    assert logits.shape == (3, TINY["vocab_size"]) and logits.isfinite().all()
    assert step.slots.tolist() == [40, 104, 168]
    times = _forward_times(context(tmp_path), made, 1)
    assert times["exposed_s"] >= 0 < times["forward_s"]


def test_gaps_of_an_engine_s_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is profiled are steps that only decode; without a profiler events say what they can."""
    where = context(tmp_path)
    made = make(where, TINY, max_model_len=1024 + 192, batch=2)
    ran: list[int] = []

    def seen(run: Callable[[], None], trace: Path | None) -> Gaps:
        assert trace is None  # kept of a batch of one only
        run()
        ran.append(1)
        return Gaps(160, 16, 1.6, 1.5, 0.08, 0.02, 0.5)

    monkeypatch.setattr(engine, "profiled", seen)
    found = engine._gaps(where, made, 2, "graphs-2")
    assert ran == [1]
    assert found["launch_s_a_step"] == pytest.approx(0.005) and found["kernels_a_step"] == 10
    assert found["host_hidden"] == pytest.approx(1 - 0.08 / 1.1)
    assert found["forward_s"] > 0 and 0 < found["outside_s"] < found["step_s"]

    def fails(run: object, trace: object) -> Gaps:
        raise KernelError("no kernels")

    monkeypatch.setattr(engine, "profiled", fails)
    again = make(where, TINY, max_model_len=1024 + 192, batch=1)
    found = engine._gaps(where, again, 1, "graphs-1")
    assert found["profiler"] == "KernelError: no kernels" and "launch_s_a_step" not in found
    assert removed(found, {**found, "exposed_s": 1.0})["by"] == "exposed_s"


def test_lengths_of_requests(tmp_path: Path) -> None:
    """The fit has the trace's medians; the trace itself is taken where it is."""
    fitted, source = traffic.lengths(4000, 0, tmp_path)
    assert source == "log-normal fits to the trace"
    contexts, generated = ([pair[i] for pair in fitted] for i in (0, 1))
    assert sorted(contexts)[2000] == pytest.approx(1097, rel=0.1)  # e^7.00
    assert sorted(generated)[2000] == pytest.approx(16.3, rel=0.1)
    assert min(contexts) >= 1 and max(contexts) <= traffic.MOST_CONTEXT
    (tmp_path / traffic.TRACE_FILE).write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\nt,4808,10\nt,3180,0\n"
    )
    assert traffic.lengths(2, 0, tmp_path) == ([(4808, 10), (3180, 1)], "the trace")
    assert traffic.percentiles([]) == {}


def test_shapes_have_the_models_sizes() -> None:
    """Parameters as published: 8.03 and 1.24 billion."""
    for shape, published in ((LLAMA_8B, 8.03e9), (LLAMA_1B, 1.24e9)):
        sizes = matrices(shape)
        layer = sum(n * k * (2 if gated else 1) for n, k, gated in sizes.values())
        head = shape["vocab_size"] * shape["hidden_size"]
        layers = (layer - head) * shape["num_hidden_layers"]
        total = layers + head * (1 if shape["tie_word_embeddings"] else 2)
        assert total == pytest.approx(published, rel=0.005)


def test_candidates_are_tiles() -> None:
    for rows in (1, 64, 2048):
        tried = candidates(rows)
        assert len(set(tried)) == len(tried) > 5
        for features, wide, warps, stages in tried:
            assert features % 64 == 0 and wide & (wide - 1) == 0 and warps in (4, 8) and stages > 2
            assert wide >= min(rows, 64)


def test_compiling_ahead_says_what_went_wrong(tmp_path: Path) -> None:
    task = warm.Task("bfloat16", ((32, 64, False),), (1,), (("no kind", False, 16), (1, 1, 1, 1)))
    [said] = warm.warm(context(tmp_path), [task], 1.0)
    assert said is not None and "Error" in said


def test_plain_data() -> None:
    assert plain({1: (float("inf"), 2.0)}) == {"1": ["inf", 2.0]}


def test_nothing_that_only_the_server_needs(tmp_path: Path) -> None:
    """An engine runs without llguidance, FastAPI, prometheus-client and the native library."""
    code = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("llguidance", "fastapi", "prometheus_client", "uvicorn"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
from penstock import LLM, SamplingParams
from benchmarks.gpu import checks, engine, ops, peers, summary, sweep, traffic
params = SamplingParams(max_tokens=2, temperature=0)
print(LLM(device="cpu").generate([[5, 6, 7]], params)[0].outputs[0].token_ids)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PENSTOCK_KERNELS": "reference", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("]")
