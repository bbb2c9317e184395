"""`penstock doctor`: facts as JSON and as text, and the faults it finds."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from safetensors.torch import load_file, save_file
from tests.cli.test_cli_main import refused
from tests.models.stories import LAYERS, VOCAB
from typer.testing import Result

from penstock import ops
from penstock.cli import diagnosis
from penstock.cli.diagnosis import Kernels, diagnose
from penstock.cli.examined import examine
from penstock.config import KvCacheDtype
from penstock.errors import KernelError, get_extra
from penstock.hardware import Gpu, GpuPeaks, Hardware, Peaks, detect, detect_gpu, save_peaks
from penstock.kernels import native, report_cache, report_linear
from penstock.kernels.triton import launchers
from penstock.models.hub import NAMED
from penstock.pipeline.vocabulary import reduce_vocabulary

Run = Callable[..., Result]
MACHINE = Hardware("a processor", 4, ("avx2",), 8 << 30, 6 << 30)


def test_json(penstock: Run, known_peaks: Peaks) -> None:
    result = penstock("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {
        "versions", "hardware", "load", "threads", "affinity", "machine_cores", "waiting",
        "cpu_quota", "kernels", "peaks", "now", "gpu", "models", "extras", "environment",
        "warnings",
    }  # fmt: skip
    assert found["hardware"]["processor"] == detect().processor
    assert found["peaks"]["read_bytes_per_s"] == known_peaks.read_bytes_per_s
    assert {row["operator"] for row in found["kernels"]["operators"]} == set(ops.op_names())
    assert found["kernels"]["isa"] == native.isa
    named = ("weights", "few_rows", "many_rows")
    assert found["kernels"]["linear"] == [
        dict(zip(named, row, strict=True)) for row in report_linear()
    ]
    assert found["affinity"] == sorted(os.sched_getaffinity(0))
    assert found["machine_cores"] == os.cpu_count()
    assert found["extras"]["hub"]["get"] == get_extra("hub")
    assert [model["name"] for model in found["models"]] == list(NAMED)


def test_less_than_was_kept_is_told_and_more_is_kept(
    penstock: Run, known_peaks: Peaks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another guest's work shows in no counter of this system."""
    for factor, warned in ((0.5, True), (0.9, False), (1.5, False), (0.9, True)):
        now = replace(known_peaks, read_bytes_per_s=factor * known_peaks.read_bytes_per_s)
        module = importlib.import_module("penstock.roofline.peaks")
        monkeypatch.setattr(module, "measure", lambda hardware, *, repeats, now=now: now)
        found = json.loads(penstock("doctor", "--json").stdout)
        assert found["now"]["read_bytes_per_s"] == now.read_bytes_per_s
        assert any("memory" in told and "GB/s" in told for told in found["warnings"]) == warned
    assert found["peaks"]["read_bytes_per_s"] == 1.5 * known_peaks.read_bytes_per_s
    assert found["peaks"]["fma_flops"] == known_peaks.fma_flops
    save_peaks(detect(), known_peaks, "native" if native.handle else "reference")


GPU = Gpu("NVIDIA H200", 0, (9, 0), 132, 139 << 30, 100 << 30, 60 << 20, "580.1", "13.0")
GPU_PEAKS = GpuPeaks(
    4.1e12, 4.3e12, 5.1e13, 4e14, 7.88e14, 7.9e14, 1.4e15, 1.5e15, 4.2e-6, "NVIDIA H200", "then"
)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, known_peaks: Peaks) -> list[bool]:
    """There seems to be one, whose peaks are known; how they were asked for."""
    asked: list[bool] = []

    def peaks(*, calibrate: bool) -> GpuPeaks:
        asked.append(calibrate)
        return GPU_PEAKS

    monkeypatch.setattr(diagnosis, "detect_gpu", lambda: GPU)
    monkeypatch.setattr("penstock.kernels.why_not_on", lambda device: None)
    monkeypatch.setattr("penstock.roofline.peaks", lambda *, calibrate: known_peaks)
    monkeypatch.setattr("penstock.roofline.gpu_peaks", peaks)
    return asked


def test_no_gpu(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "detect_gpu", lambda: None)
    monkeypatch.setattr(diagnosis, "why_no_gpu", lambda: "there is no NVIDIA driver")
    assert "none: there is no NVIDIA driver" in penstock("doctor").stdout
    gpu = json.loads(penstock("doctor", "--json").stdout)["gpu"]
    assert gpu == {
        "gpu": None, "why_none": "there is no NVIDIA driver", "peaks": None, "operators": [],
    }  # fmt: skip


def test_a_gpu(penstock: Run, a_gpu: list[bool]) -> None:
    shown = penstock("doctor").stdout
    for words in ("NVIDIA H200, sm_90, 132 multiprocessors", "driver 580.1, CUDA 13.0",
                  "139.0 GiB, 100.0 free", "4.10 TB/s", "788.0 TFLOP/s", "1500.0 TOP/s",
                  "4.2 µs of the host's time a kernel", "operator on the GPU"):  # fmt: skip
        assert words in shown, words
    gpu = json.loads(penstock("doctor", "--json", "--calibrate").stdout)["gpu"]
    assert a_gpu == [False, True]
    assert gpu["gpu"]["capability"] == [9, 0] and gpu["peaks"]["copy_bytes_per_s"] == 4.3e12
    runs = {row["operator"]: row["runs"] for row in gpu["operators"]}
    assert set(runs) == set(ops.op_names())
    assert runs["rms_norm"].startswith("Triton") and runs["rms_norm"].endswith(", norm")
    kernels = {name for name, how in runs.items() if how != "reference"}
    assert kernels == set(launchers())


def test_a_gpu_without_its_kernels(
    penstock: Run, a_gpu: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def peaks(*, calibrate: bool) -> GpuPeaks:
        raise KernelError("Only 12 MiB of its memory are free.")

    monkeypatch.setattr("penstock.roofline.gpu_peaks", peaks)
    monkeypatch.setattr(diagnosis, "_is_there", lambda module: module != "triton")
    monkeypatch.setattr("penstock.kernels.why_not_on", lambda device: "Triton isn't installed")
    found = json.loads(penstock("doctor", "--json").stdout)
    assert found["gpu"]["operators"] == [] and found["gpu"]["peaks"] is None
    said = " ".join(found["warnings"])
    assert (
        "Models can't run on NVIDIA H200: Triton isn't installed." in said and "Only 12 MiB" in said
    )


def test_triton_is_not_imported_without_a_gpu() -> None:
    code = "from penstock.cli.diagnosis import _gpu; import sys; _gpu(False); "
    code += "sys.exit(3 if 'triton.language' in sys.modules else 0)"
    if detect_gpu() is None:
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_text(penstock: Run) -> None:
    result = penstock("doctor")
    assert result.exit_code == 0
    for word in ("Processor", "Instruction sets", "Threads", "Memory read", "20.0 GB/s",
                 "Matrix, float32", "0.10 TFLOP/s", "paged_attention",
                 "Model stories"):  # fmt: skip
        assert word in result.stdout


def test_calibrate_measures_again(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def peaks(*, calibrate: bool) -> Peaks:
        asked.append(calibrate)
        return Peaks(3e10, 1e11, 7e12, 2, "now")

    monkeypatch.setattr("penstock.roofline.peaks", peaks)
    assert "7.00 TFLOP/s (AMX" in penstock("doctor", "--calibrate").stdout
    assert asked == [True]


def test_int8_peak_is_shown(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = Peaks(3e10, 1e11, 7e12, 2, "now", int8_ops=1.4e13)
    monkeypatch.setattr("penstock.roofline.peaks", lambda *, calibrate: peaks)
    assert "14.00 TOP/s" in penstock("doctor").stdout


def test_linear_is_shown_by_weights(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("w8a8", "vpdpbusd", "tdpbssd")]
    monkeypatch.setattr("penstock.kernels.report_linear", lambda: rows)
    shown = penstock("doctor").stdout
    for word in ("below 4 rows", "from 4 rows", "vpdpbusd", "tdpbssd"):
        assert word in shown
    monkeypatch.setattr("penstock.kernels.report_linear", lambda: [("w8a8", "x", "x")])
    assert "any number of rows" in penstock("doctor").stdout
    monkeypatch.setattr("penstock.kernels.report_linear", list)
    assert "linear by weights" not in penstock("doctor").stdout


def test_caches_are_shown(penstock: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(penstock("doctor", "--json").stdout)["kernels"]["cache"]
    names = [row["kv_cache_dtype"] for row in rows]
    assert {"auto", "fp8_e4m3", *names} == set(get_args(KvCacheDtype))
    kind = "reference" if native.handle is None else f"native, {native.isa}"
    assert all(row["runs"].startswith(kind) for row in rows if row["activations"] == "bfloat16")
    monkeypatch.setattr(ops, "has_native", lambda name: name != "rotary_cache")
    assert all(runs.startswith("reference") for _, _, runs, _ in report_cache())
    shown = penstock("doctor").stdout
    assert "keys and values" in shown and "kivi" in shown


def test_a_model(penstock: Run, base_model: Path) -> None:
    shown = penstock("doctor", base_model)
    assert shown.exit_code == 0, shown.output
    for words in ("Architecture", "512 tokens", "stored as", "runs as", "far as its headers say"):
        assert words in " ".join(shown.stdout.split())
    assert examine("stories").kind == "model"
    assert [(row.stored, row.matrices, row.runs_as) for row in examine("stories").weights] == [
        ("bfloat16", 7 * LAYERS + 1, "bfloat16")
    ]


def test_an_export(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--quant", "w4a16-g32", "--special", "layers.0.*=w8a16", "--kv-cache-dtype", "int8")
    assert penstock("export", base_model, "-o", out, *options).exit_code == 0
    found = examine(str(out))
    assert found.kind == "export" and found.runs and "cache in int8" in found.facts["Exported"]
    runs = {row.stored: (row.runs_as, row.how) for row in found.weights}
    kernel = "native, " if native.handle is not None else "reference: "
    for scheme in ("w4a16-g32", "w8a16"):
        assert runs[scheme][0] == scheme and runs[scheme][1].startswith(kernel)
    file = out / "graph.pt2"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    broken = penstock("doctor", out)
    assert broken.exit_code == 1
    assert "graph.pt2hasbeenchangedsince" in "".join(broken.stdout.split())  # lines are folded


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    reduce_vocabulary("stories", tmp_path / "small", size=700, texts=["Once upon a time."])
    words = examine(str(tmp_path / "small")).facts["Vocabulary"]
    assert words == f"700 of {VOCAB:,} tokens (reduced)"


def test_a_model_that_is_not_built(penstock: Run, base_model: Path, tmp_path: Path) -> None:
    shutil.copytree(base_model, tmp_path / "model")
    config = json.loads((base_model / "config.json").read_text()) | {
        "architectures": ["MambaForCausalLM"]
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    found = penstock("doctor", tmp_path / "model", "--json")
    assert found.exit_code == 1
    examined = json.loads(found.stdout)["examined"]
    assert examined["kind"] == "model" and "Mamba" in examined["why"]


def test_tensors_that_dont_fit_by_their_headers(base_model: Path, tmp_path: Path) -> None:
    """Missing, in the way, of another shape: what loading would say, and nothing is read."""
    shutil.copytree(base_model, tmp_path / "m")
    [file] = (tmp_path / "m").glob("*.safetensors")
    for index in (tmp_path / "m").glob("*.index.json"):
        index.unlink()
    whole = load_file(file)
    down = "model.layers.0.mlp.down_proj.weight"
    for change, said in (
        ({down: None}, r"lacks 1 of the tensors of .*layers\.0\.mlp\.down_proj\.weight"),
        (
            {"model.layers.9.mlp.down_proj.weight": whole[down].clone()},
            "1 of the .* have no place",
        ),
        ({down: whole[down][:, 1:].contiguous()}, "layers.0.mlp.down.weight needs shape"),
        ({}, "^$"),
    ):
        tensors = {**whole, **change}
        save_file({name: t for name, t in tensors.items() if t is not None}, file)
        found = examine(str(tmp_path / "m"))
        assert found.runs is (not change)
        assert re.search(said, found.why)


def test_what_is_nothing_of_ours(penstock: Run, tmp_path: Path) -> None:
    refused(penstock("doctor", tmp_path / "no"), 1, "There is no file or folder", "or an embedded")
    (tmp_path / "notes.txt").write_text("mine")
    refused(penstock("doctor", tmp_path), 1, "is no engine", "has 1 entries: notes.txt")
    refused(penstock("doctor", tmp_path / "notes.txt"), 1, "is a file, but no GGUF")
    refused(penstock("doctor", "some/model"), 1, "There is no file or folder some/model")


@pytest.mark.parametrize(
    ("affinity", "shown"),
    [([0], "core 0 of 8"), ([0, 1], "cores 0–1 of 8"), ([0, 2, 3, 5], "cores 0, 2–3, 5 of 8")],
)
def test_cores_are_named(
    penstock: Run, monkeypatch: pytest.MonkeyPatch, affinity: list[int], shown: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr("penstock.roofline.peaks", lambda *, calibrate: None)
    assert f"on {shown}" in penstock("doctor").stdout


def test_more_threads_than_this_process_may_use_cores() -> None:
    (text,) = diagnosis._processor_warnings(MACHINE, 8, None, 0.1, 16)
    assert "share 4 cores of the machine's 16, to which this process is confined" in text
    (text,) = diagnosis._processor_warnings(MACHINE, 8, None, 0.1, 4)
    assert "confined" not in text


def test_how_threads_wait_is_said_as_it_is() -> None:
    pool = (Path(__file__).parents[2] / "csrc" / "cpu" / "parallel.cpp").read_text()
    said = diagnosis._waiting(True)
    for name, words in (("kLook", "for {} µs"), ("kKeep", "from {} µs on")):
        (us,) = re.findall(rf"{name} = std::chrono::microseconds\((\d+)\)", pool)
        assert words.format(us) in said
    assert "OpenMP" in diagnosis._waiting(False)


def test_no_memory_to_measure_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks(*, calibrate: bool) -> Peaks:
        raise KernelError("Only 3 MiB of memory are free; measuring needs 64.")

    monkeypatch.setattr("penstock.roofline.peaks", peaks)
    found = diagnose()
    assert found.peaks is None
    assert any("Only 3 MiB" in text for text in found.warnings)


def test_environment_is_shown_and_warned_about(
    penstock: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    found = json.loads(penstock("doctor", "--json").stdout)
    assert found["environment"]["OMP_WAIT_POLICY"] == "active"
    assert any("OMP_WAIT_POLICY=active" in text for text in found["warnings"])
    assert not any("PENSTOCK_CACHE" in text for text in found["warnings"])


@pytest.mark.parametrize(
    ("threads", "quota", "load", "words"),
    [
        (4, None, 0.1, []),
        (2, None, 0.1, ["2 threads run on 4 cores"]),
        (8, None, 0.1, ["8 threads share 4 cores"]),
        (4, 1.5, 0.1, ["1.5 cores' time", "OMP_NUM_THREADS=1"]),
        (4, None, 3.0, ["Other programs want 3.0 of 4 cores"]),
    ],
)
def test_processor_warnings(
    threads: int, quota: float | None, load: float, words: list[str]
) -> None:
    found = diagnosis._processor_warnings(MACHINE, threads, quota, load)
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (Kernels("amx", ["avx2", "avx512", "amx", "amx-emulated"], "", []), []),
        (Kernels("avx2", ["avx2", "avx512", "amx-emulated"], "", []), ["can avx512"]),
        (Kernels(None, [], "no compiler", []), ["reference kernels run", "no compiler"]),
        (Kernels("avx2", ["avx2"], "", [("gelu", "reference", "none")]), ["gelu"]),
    ],
)
def test_kernel_warnings(kernels: Kernels, words: list[str]) -> None:
    found = diagnosis._kernel_warnings(kernels)
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


def test_little_memory_is_warned_about() -> None:
    assert not diagnosis._memory_warnings(MACHINE)
    (text,) = diagnosis._memory_warnings(Hardware("p", 2, (), 8 << 30, 300 << 20))
    assert "300 MiB" in text


def test_drafts_are_looked_at(penstock: Run) -> None:
    asked = '{"method": "ngram", "num_speculative_tokens": 2}'
    result = penstock("doctor", "stories", "--speculative-config", asked, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["speculation"]
    assert told["method"] == "ngram" and told["checks"] == ["temperature", "raw text", "cache"]
    assert set(told["rates"]) == {"temperature 0", "temperature 1", "conversation"}
    assert all(one["level"] == "hint" for one in told["findings"]) and told["positions"] > 0
    shown = penstock("doctor", "--speculative-config", asked)
    assert shown.exit_code == 0
    assert "Right, of guesses compared" in shown.stdout and "Computed again" in shown.stdout
    assert "Instruction sets" not in shown.stdout  # the answer stands first


def test_drafts_by_another_vocabulary_fail(penstock: Run, chat_model: Path) -> None:
    result = penstock("doctor", "--speculative-config", json.dumps({"model": str(chat_model)}))
    assert result.exit_code == 1
    assert "mismatch, tokenizer:" in result.stdout and "ids are other tokens" in result.stdout


def test_drafts_that_are_no_json(penstock: Run) -> None:
    refused(penstock("doctor", "--speculative-config", "ngram"), 1, "isn't JSON")
