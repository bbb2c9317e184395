"""What is measured on a GPU, tried on the CPU: the same functions, small sizes, its own clock."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import hardware
from penstock.bench.environment import median_of
from penstock.bench.report import describe_peaks
from penstock.errors import KernelError
from penstock.hardware import (
    Gpu,
    GpuPeaks,
    Peaks,
    detect_gpu,
    load_gpu_peaks,
    save_gpu_peaks,
    why_no_gpu,
)
from penstock.kernels.triton.bandwidth import read_sum
from penstock.roofline.counts import Cost
from penstock.roofline.floor import floor_of
from penstock.roofline.plot import Dot, roofline_svg

module: Any = sys.modules["penstock.roofline.gpu_peaks"]  # the package has a function of that name
GPU = Gpu("a GPU", 0, (9, 0), 4, 96 << 30, 90 << 30, 50 << 20, "580.1", "13.0")
PEAKS = GpuPeaks(4e12, 4.2e12, 5e13, 4e14, 8e14, 8.1e14, 1.5e15, 1.4e15, 5e-6, "a GPU", "then")
CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_of() -> None:
    assert PEAKS.of("float32") == 5e13  # without TF32
    assert PEAKS.of("bfloat16") == 8e14
    assert PEAKS.of("int8") == 1.4e15
    assert replace(PEAKS, int8_ops=0.0).of("int8") == 8e14
    assert PEAKS.of("float8") == PEAKS.float8_flops > 8e14
    assert replace(PEAKS, float8_flops=0.0).of("float8") == 8e14


def test_a_floor_takes_them() -> None:
    cost = Cost(weight_bytes=4 * 10**9, kv_bytes=0, products={"bfloat16": 16 * 10**12})
    floor = floor_of(cost, PEAKS)
    assert (floor.memory_s, floor.compute_s) == (1e-3, 2e-2)
    assert floor.bound == "compute"


@pytest.mark.parametrize("count", [1, 4095, 3 * 4096 + 5, 50_000])
def test_every_byte_is_read_once(count: int) -> None:
    x = torch.randint(-8, 9, (count,)).float()  # sums of integers are exact
    for programs in (1, 3):
        parts = read_sum(x, programs)
        assert parts.shape == (programs,)
        assert parts.sum() == x.sum()


def test_measured_on_the_cpu() -> None:
    sizes = module.Sizes(1 << 16, 1 << 16, 32, 10)
    found = module.measure_gpu(GPU, repeats=1, device=CPU, sizes=sizes)
    rates = asdict(found)
    for name in ("read_bytes_per_s", "copy_bytes_per_s", "float32_flops", "bfloat16_flops",
                 "int8_ops", "launch_s"):  # fmt: skip
        assert rates[name] > 0, name
    assert found.name == "a GPU"


def test_precision_is_given_back() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    seen = []

    def make(side: int, device: torch.device) -> object:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return lambda: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._PRODUCTS, "tf32", make)
        patch.setitem(module._PRODUCTS, "float32", make)
        module._rate("tf32", 8, CPU, 1)
        module._rate("float32", 8, CPU, 1)
    assert seen == ["tf32", "ieee"]
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_what_does_not_run_counts_as_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(side: int, device: torch.device) -> object:
        raise RuntimeError("needs compute capability 8.9\nand more")

    monkeypatch.setitem(module._PRODUCTS, "float8", refuses)
    with caplog.at_level(logging.INFO, "penstock"):
        assert module._rate("float8", 8, CPU, 1) == 0.0
    assert "float8 wasn't measured: needs compute capability 8.9" in caplog.text


def test_too_little_memory() -> None:
    with pytest.raises(KernelError, match="Only 512 MiB of a GPU's memory are free"):
        module.measure_gpu(replace(GPU, free_bytes=512 << 20))


@no_gpu
def test_no_gpu_to_measure() -> None:
    with pytest.raises(KernelError, match=r"There is no GPU to measure: (torch .* CUDA|.*driver)"):
        module.measure_gpu()
    assert module.gpu_peaks() is None and module.kept_gpu_peaks() is None


def test_kept_for_this_gpu_driver_and_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "detect_gpu", lambda index=None: GPU)
    measured = [PEAKS, replace(PEAKS, read_bytes_per_s=5e12)]
    monkeypatch.setattr(module, "measure_gpu", lambda gpu: measured.pop(0))
    assert module.kept_gpu_peaks() is None
    assert module.gpu_peaks() == PEAKS == module.gpu_peaks() == module.kept_gpu_peaks()
    assert module.gpu_peaks(calibrate=True).read_bytes_per_s == 5e12
    for change in ({"name": "another"}, {"driver": "590.2"}, {"runtime": "12.8"}):
        assert load_gpu_peaks(replace(GPU, **change)) is None
    assert load_gpu_peaks(replace(GPU, free_bytes=1)) is not None  # what is free changes
    file = save_gpu_peaks(GPU, PEAKS)
    file.write_text(json.dumps({**asdict(PEAKS), "unknown": 1}))
    assert load_gpu_peaks(GPU) is None
    file.write_text("{")
    assert load_gpu_peaks(GPU) is None


def test_a_cache_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "folder"))
    monkeypatch.setattr(module, "detect_gpu", lambda index=None: GPU)
    monkeypatch.setattr(module, "measure_gpu", lambda gpu: PEAKS)
    assert module.gpu_peaks() == PEAKS
    assert "Set PENSTOCK_CACHE" in caplog.text


@no_gpu
def test_why_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert detect_gpu() is None
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert why_no_gpu() == f"torch {torch.__version__} was built without CUDA"
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(hardware, "_driver", lambda: "")
    assert why_no_gpu() == "there is no NVIDIA driver"
    monkeypatch.setattr(hardware, "_driver", lambda: "580.1")
    assert "CUDA_VISIBLE_DEVICES" in why_no_gpu()

    def warns() -> bool:
        import warnings

        warnings.warn("The NVIDIA driver is too old (found 11000).\nUpdate it.", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warns)
    assert why_no_gpu() == "The NVIDIA driver is too old (found 11000)."


def test_a_gpu_as_its_driver_describes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132
        L2_cache_size = 60 << 20

    monkeypatch.setattr(hardware, "why_no_gpu", lambda: "")
    monkeypatch.setattr(hardware, "_driver", lambda: "580.159.03")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda at: (100 << 30, 139 << 30))
    found = detect_gpu()
    assert found is not None and found.capability == (9, 0) and found.l2_bytes == 60 << 20
    assert (found.free_bytes, found.memory_bytes) == (100 << 30, 139 << 30)
    assert found.key == replace(found, free_bytes=0, index=1).key != replace(found, name="x").key


def test_the_driver_s_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert hardware._driver() == "580.159.03"
    monkeypatch.setattr(Path, "read_text", lambda self: "NVRM version: none\n")
    assert hardware._driver() == ""


def test_peaks_of_the_device_that_a_model_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Peaks(1e9, 1e10, 0.0, 1, "then")
    monkeypatch.setattr(module, "kept_peaks", lambda: None)
    monkeypatch.setattr(module, "measure", lambda hardware: cpu)
    monkeypatch.setattr(module, "peaks", lambda: cpu)
    assert module.kept_peaks_on(CPU) is None
    assert module.measure_on(CPU) == cpu == module.peaks_on(CPU)
    asked: list[int | None] = []

    def detect(index: int | None = None) -> Gpu:
        asked.append(index)
        return GPU

    monkeypatch.setattr(module, "detect_gpu", detect)
    monkeypatch.setattr(module, "load_gpu_peaks", lambda gpu: PEAKS)
    monkeypatch.setattr(module, "measure_gpu", lambda gpu: replace(PEAKS, name="now"))
    gpu = torch.device("cuda", 1)
    assert module.kept_peaks_on(gpu) == PEAKS == module.peaks_on(gpu)
    assert module.measure_on(gpu).name == "now"
    assert asked == [1, 1, 1]


def test_they_are_described_and_drawn() -> None:
    said = describe_peaks(PEAKS, "bfloat16")
    assert "a GPU: read 4,000 GB/s, matrix 800.00 TFLOP/s (bfloat16), 5.0 µs" in said
    middle = median_of([PEAKS, replace(PEAKS, read_bytes_per_s=1e12), replace(PEAKS, name="last")])
    assert middle == replace(PEAKS, name="last")
    page = roofline_svg(PEAKS, [Dot("qkv", "decode", 1.0, 3e12, 0.5, False)], "title", "caption")
    for words in ("float32: 50 TFLOP/s", "bfloat16: 800 TFLOP/s", "int8: 1.4 POP/s"):
        assert words in page, words
