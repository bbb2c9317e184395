"""`penstock doctor`: facts as JSON and as text, and the faults it finds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from penstock import ops
from penstock.cli import diagnosis
from penstock.cli.diagnosis import Kernels, diagnose
from penstock.errors import KernelError
from penstock.hardware import Hardware, Peaks, detect
from penstock.kernels import native

Run = Callable[..., Result]
MACHINE = Hardware("a processor", 4, ("avx2",), 8 << 30, 6 << 30)


def test_json(penstock: Run, known_peaks: Peaks) -> None:
    result = penstock("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {
        "versions", "hardware", "load", "threads", "affinity", "machine_cores", "waiting",
        "cpu_quota", "kernels", "peaks", "models", "extras", "environment", "warnings",
    }  # fmt: skip
    assert found["hardware"]["processor"] == detect().processor
    assert found["peaks"]["read_bytes_per_s"] == known_peaks.read_bytes_per_s
    assert {row["operator"] for row in found["kernels"]["operators"]} == set(ops.op_names())
    assert found["kernels"]["isa"] == native.isa
    assert [set(row) for row in found["kernels"]["linear"]] == [
        {"weights", "few_rows", "many_rows"}
    ] * (0 if native.handle is None else 7)
    assert found["affinity"] == sorted(os.sched_getaffinity(0))
    assert found["machine_cores"] == os.cpu_count()
    assert found["extras"]["hub"]["get"] == "pip install penstock[hub]"
    assert [model["name"] for model in found["models"]] == ["stories"]


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
        (4, None, 3.0, ["Other programs keep 3.0 of 4 cores busy"]),
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
