"""Measured peaks: what one instruction does bounds how they compare with each other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.hardware import Peaks, detect
from penstock.kernels import native
from penstock.roofline import kept_peaks, measure, peaks

module = sys.modules["penstock.roofline.peaks"]  # the package has a function of that name
needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")


def best(tiles: bool, of: str) -> float:
    rounds = 5_000 if tiles else 200_000
    return max(getattr(native, of)(rounds, 1, tiles) for _ in range(15))


@pytest.mark.alone
@needs_native
def test_int8_does_more_than_float32_and_no_more_than_its_width() -> None:
    """A byte is a quarter of a float: AVX-512's one instruction does four times as many
    products, and AVX2's three, two of which multiply, between one and four times.
    """
    ratio = best(False, "int8_peak") / best(False, "matrix_peak")
    assert 1.0 < ratio < 6.0


@needs_native
def test_four_bits_are_no_slower() -> None:
    """One instruction of the two fewer that multiply, on AVX2; elsewhere the same instructions."""
    ratio = best(False, "int4_peak") / best(False, "int8_peak")
    assert 0.8 < ratio < 2.5
    assert native.isa == "avx2" or ratio < 1.25


@needs_native
def test_products_two_at_a_time_where_there_are_such() -> None:
    """Twice those of float32 on Zen 4, as many on Cooper Lake, half on Granite Rapids."""
    if "avx512-bf16" not in native.available_isas():
        assert native.dot_peak(1000, 1) == 0.0
        return
    fastest = max(native.dot_peak(2_000_000, 1) for _ in range(5))
    assert 0.4 < fastest / best(False, "matrix_peak") < 2.6


@pytest.mark.alone
@needs_native
def test_tiles_where_there_are_tiles() -> None:
    if "amx" not in native.available_isas():
        assert native.int8_peak(1000, 1, True) == 0.0
        return
    ratio = best(True, "int8_peak") / best(True, "matrix_peak")
    assert 1.5 < ratio < 2.5


@needs_native
def test_the_best_of_vectors_and_tiles_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def int8_peak(self: object, rounds: int, threads: int, tiles: bool) -> float:
        return 5e12 if tiles else 1e12

    def isas(self: object) -> list[str]:
        return ["avx2", "avx512", "amx"]

    monkeypatch.setattr(type(native), "int8_peak", int8_peak)
    monkeypatch.setattr(type(native), "int4_peak", int8_peak)
    monkeypatch.setattr(module, "BUFFER_BYTES", 1 << 22)
    monkeypatch.setattr(type(native), "matrix_peak", lambda *_: 1e11)
    monkeypatch.setattr(type(native), "dot_peak", lambda *_: 3e11)
    monkeypatch.setattr(type(native), "available_isas", isas)
    found = measure(detect(), repeats=1)
    assert found.int8_ops == 5e12 == found.of("int8") == found.of("int4")
    assert found.of("bfloat16") == found.of("float8") == 3e11 and found.of("float32") == 1e11
    assert found.bfloat16_unit == "vdpbf16ps" and replace(found, dot_flops=0.0).bfloat16_unit == ""
    assert replace(found, tile_flops=7e12).bfloat16_unit == "AMX"
    assert found.threads == torch.get_num_threads()


def test_torch_measures_no_int8() -> None:
    found = module._with_torch(torch.ones(1 << 20), 1)
    assert isinstance(found, Peaks)
    assert (found.int8_ops, found.tile_flops) == (0.0, 0.0)
    assert found.of("int8") == found.of("float8") == found.fma_flops > 0


def test_peaks_of_a_busy_machine_are_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once by each process, until it was quiet for one; what was reached in any of them counts."""

    def begin() -> None:
        monkeypatch.setattr(module, "_measured", threading.Event())

    threads = torch.get_num_threads()
    results = [
        Peaks(2e9, 3e10, 0.0, threads, "busy", 4e10, cpu_share=0.4),
        Peaks(1e9, 5e10, 0.0, threads, "busy", 2e10, cpu_share=0.6),
        Peaks(9e9, 9e10, 0.0, threads, "quiet", 9e10, cpu_share=0.99),
    ]
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "measure", lambda _: results.pop(0))
    begin()
    with caplog.at_level("WARNING", "penstock"):
        assert peaks().read_bytes_per_s == 2e9
        assert "took 60% of the processors' time" in caplog.text
        assert peaks().read_bytes_per_s == 2e9 and len(results) == 2
        begin()
        second = peaks()
    assert (second.read_bytes_per_s, second.fma_flops, second.int8_ops) == (2e9, 5e10, 4e10)
    assert kept_peaks() == second and second.disturbed
    begin()
    third = peaks()
    assert third.measured_at == "quiet" and not third.disturbed and third.fma_flops == 9e10
    begin()
    assert peaks() == third  # not measured again: nothing is left to pop


MEASURING = """
import sys, time
from dataclasses import replace
from pathlib import Path
import torch
from penstock.hardware import Peaks
from penstock.roofline import peaks
module, folder = sys.modules["penstock.roofline.peaks"], Path(sys.argv[1])

def measure(hardware):
    mine = folder / f"measuring-{sys.argv[2]}"
    mine.touch()
    beside = len(list(folder.glob("measuring-*")))
    time.sleep(float(sys.argv[3]))
    mine.unlink()
    with (folder / "measured").open("a") as log:
        log.write(f"{beside}\\n")
    return Peaks(1e9, 1e9, 0.0, torch.get_num_threads(), sys.argv[2], cpu_share=float(sys.argv[4]))

module.measure = measure
(folder / f"ready-{sys.argv[2]}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
print(peaks(calibrate=len(sys.argv) > 5).measured_at)
"""


@pytest.mark.parametrize("options", [["1"], ["0.5"], ["1", "--calibrate"]])
def test_processes_take_turns(tmp_path: Path, options: list[str]) -> None:
    """Two that start at once measure once, and both have the figures."""
    environment = {**os.environ, "PENSTOCK_CACHE": str(tmp_path / "cache")}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURING, str(tmp_path), name, "0.5", *options],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for name in ("one", "other")
    ]  # fmt: skip
    try:
        end = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)
        (tmp_path / "go").touch()
        said = [one.communicate(timeout=60)[0] for one in both]
    finally:
        for one in both:
            one.kill()
            one.communicate()
    assert said[0] == said[1] != ""
    assert (tmp_path / "measured").read_text() == "1\n"


def test_one_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = Peaks(9e9, 9e10, 0.0, torch.get_num_threads(), "quiet", 9e10)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "measure", lambda _: quiet)
    monkeypatch.setattr("penstock.roofline.turns.PATIENCE_S", 0.2)
    code = (
        "import fcntl, sys, time\n"
        "lock = open(sys.argv[1], 'w'); fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "measuring.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        with caplog.at_level("WARNING", "penstock"):
            assert peaks() == quiet
        assert "Another process has been measuring this machine for 0.2 s" in caplog.text
        caplog.clear()
        holder.kill()
    assert peaks(calibrate=True) == quiet and not caplog.text  # the dead one's lock is free


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.touch()
    quiet = Peaks(9e9, 9e10, 0.0, torch.get_num_threads(), "quiet", 9e10)
    monkeypatch.setenv("PENSTOCK_CACHE", str(file))
    monkeypatch.setattr(module, "measure", lambda _: quiet)
    with caplog.at_level("WARNING", "penstock"):
        assert peaks() == quiet
    assert "The measured peaks can't be kept" in caplog.text


@needs_native
def test_a_second_program_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFER_BYTES", 1 << 24)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)
    ]  # on that core as well
    try:
        assert measure(detect(), repeats=1).disturbed
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, cores)
