"""Measuring what a GPU can do: what bounds a floor there, read, multiplied and launched."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from torch import Tensor

from penstock.errors import KernelError
from penstock.hardware import (
    AnyPeaks,
    Gpu,
    GpuPeaks,
    Hardware,
    detect_gpu,
    load_gpu_peaks,
    save_gpu_peaks,
    why_no_gpu,
)
from penstock.roofline.peaks import kept_peaks, measure, peaks
from penstock.roofline.timing import median
from penstock.roofline.turns import turn

logger = logging.getLogger("penstock")

_SPARE = 1 << 30
"""Bytes that are left free beside the buffers."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of what is measured with: buffers far beyond any L2, work for all multiprocessors."""

    read_bytes: int = 4 << 30
    copy_bytes: int = 2 << 30  # of each of two buffers
    side: int = 8192  # of the matrices
    launches: int = 2000


def measure_gpu(
    gpu: Gpu | None = None,
    *,
    repeats: int = 10,
    device: torch.device | None = None,
    sizes: Sizes = Sizes(),
) -> GpuPeaks:
    """Measure bandwidth and matrix rates, each a median; takes about a second.

    device: where to measure, `gpu`'s by default. Buffers are as large as its free memory allows.
    """
    gpu = gpu or detect_gpu()
    if gpu is None:
        raise KernelError(f"There is no GPU to measure: {why_no_gpu()}.")
    device = device or torch.device("cuda", gpu.index)
    most = max(gpu.free_bytes - _SPARE, 0)
    if most < 64 << 20:
        raise KernelError(
            f"Only {gpu.free_bytes >> 20} MiB of {gpu.name}'s memory are free; measuring needs "
            f"{(_SPARE >> 20) + 64}."
        )
    side = min(
        sizes.side, 1 << int((most / 16) ** 0.5).bit_length() - 1
    )  # three matrices of 4 bytes
    rates = {name: _rate(name, side, device, repeats) for name in _PRODUCTS}
    return GpuPeaks(
        read_bytes_per_s=_read(min(sizes.read_bytes, most) // 4, gpu, device, repeats),
        copy_bytes_per_s=_copy(min(sizes.copy_bytes, most // 2), device, repeats),
        float32_flops=rates["float32"],
        tf32_flops=rates["tf32"],
        bfloat16_flops=rates["bfloat16"],
        float16_flops=rates["float16"],
        float8_flops=rates["float8"],
        int8_ops=rates["int8"],
        launch_s=_launch(device, sizes.launches),
        name=gpu.name,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _read(count: int, gpu: Gpu, device: torch.device, repeats: int) -> float:
    """Bytes per second of a sum over `count` float32: by Triton's kernel, or where it isn't
    installed by torch's."""
    buffer = torch.ones(count, device=device)
    try:
        from penstock.kernels.triton.bandwidth import PROGRAMS, read_sum
    except ModuleNotFoundError:
        return 4 * count / median(buffer.sum, device, repeats=repeats)
    programs = gpu.multiprocessors * PROGRAMS
    return 4 * count / median(lambda: read_sum(buffer, programs), device, repeats=repeats)


def _copy(size: int, device: torch.device, repeats: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(lambda: target.copy_(source), device, repeats=repeats)


def _rate(name: str, side: int, device: torch.device, repeats: int) -> float:
    """Operations per second of a product of random [side, side]; 0 where it doesn't run here."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "tf32" if name == "tf32" else "ieee"
        run = _PRODUCTS[name](side, device)
        return 2 * side**3 / median(run, device, repeats=repeats)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        first = str(error).partition("\n")[0]
        logger.info("A product in %s wasn't measured: %s", name, first)
        return 0.0
    finally:
        settings.fp32_precision = before


def _random(side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros would multiply faster: they change fewer wires."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(side, side, device=device, generator=generator) for _ in range(2))
    return a, b


def _float(dtype: torch.dtype) -> Callable[[int, torch.device], Callable[[], Tensor]]:
    def make(side: int, device: torch.device) -> Callable[[], Tensor]:
        a, b = (x.to(dtype) for x in _random(side, device))
        return lambda: a @ b

    return make


def _float8(side: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = (x.to(torch.float8_e4m3fn) for x in _random(side, device))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def _int8(side: int, device: torch.device) -> Callable[[], Tensor]:
    a, b = (
        torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device) for _ in range(2)
    )
    return lambda: torch._int_mm(a, b.t())


_PRODUCTS: dict[str, Callable[[int, torch.device], Callable[[], Tensor]]] = {
    "float32": _float(torch.float32),
    "tf32": _float(torch.float32),
    "bfloat16": _float(torch.bfloat16),
    "float16": _float(torch.float16),
    "float8": _float8,
    "int8": _int8,
}


def _launch(device: torch.device, count: int) -> float:
    """The host's seconds for one small kernel of torch's, many in a row."""
    x = torch.zeros(1, device=device)

    def once() -> float:
        start = time.perf_counter()
        for _ in range(count):
            x.add_(1.0)
        queued = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return queued / count

    return statistics.median(once() for _ in range(3))


def kept_gpu_peaks(index: int | None = None) -> GpuPeaks | None:
    """A GPU's peaks, the current one's by default, where an earlier run has kept them."""
    gpu = detect_gpu(index)
    return None if gpu is None else load_gpu_peaks(gpu)


def gpu_peaks(index: int | None = None, *, calibrate: bool = False) -> GpuPeaks | None:
    """A GPU's peaks: kept from an earlier run, else measured now and kept.

    None where there is no GPU. calibrate: measure again.
    """
    gpu = detect_gpu(index)
    if gpu is None:
        return None
    before = load_gpu_peaks(gpu)
    if before is not None and not calibrate:
        return before
    with turn():
        now = load_gpu_peaks(gpu)
        if now is not None and now != before:  # measured meanwhile, by another process
            return now
        measured = measure_gpu(gpu)
        try:
            save_gpu_peaks(gpu, measured)
        except OSError as error:
            logger.warning("The measured peaks can't be kept: %s. Set PENSTOCK_CACHE.", error)
        return measured


# ── of the device that a model runs on ───────────────────────────────────────────────────────


def kept_peaks_on(device: torch.device) -> AnyPeaks | None:
    """What is kept of the CPU, or of the GPU that `device` is."""
    return kept_gpu_peaks(device.index) if device.type == "cuda" else kept_peaks()


def measure_on(device: torch.device, hardware: Hardware | None = None) -> AnyPeaks:
    """Measure the CPU, or the GPU that `device` is, now."""
    if device.type != "cuda":
        return measure(hardware)
    return measure_gpu(detect_gpu(device.index))


def peaks_on(device: torch.device) -> AnyPeaks:
    """What is kept of it, else measured now and kept."""
    found = gpu_peaks(device.index) if device.type == "cuda" else peaks()
    assert found is not None  # a model runs on it
    return found
