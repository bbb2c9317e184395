"""Measuring what this machine can do."""

from __future__ import annotations

import logging
import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import torch

from penstock.errors import KernelError
from penstock.hardware import Hardware, Peaks, cpu_quota, detect, load_peaks, save_peaks
from penstock.kernels import native
from penstock.roofline.turns import turn

logger = logging.getLogger("penstock")

BUFFER_BYTES = 1 << 30
"""Far beyond any last-level cache, of which the large ones read as slowly as memory anyway."""


def measure(hardware: Hardware | None = None, *, repeats: int = 5) -> Peaks:
    """Measure read bandwidth (the best of `repeats` passes) and matrix peaks (their median).

    Takes about two seconds. Without native kernels the bandwidth is that of torch's sum, the
    matrix peak that of a float32 product, and int8 isn't measured.
    """
    hardware = hardware or detect()
    threads = torch.get_num_threads()
    size = min(BUFFER_BYTES, hardware.available_bytes // 4)
    # in pages of 2 MB, where the system has them, like weights: small ones are read more slowly
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=torch.float32, count=size // 4).fill_(1.0)
    with_kernels = native.handle is not None
    start, spent = time.perf_counter(), time.process_time()
    found = _measure(buffer, threads, repeats) if with_kernels else _with_torch(buffer, threads)
    given = min(threads, hardware.cores, cpu_quota() or threads)
    wall = (time.perf_counter() - start) * given
    return replace(found, cpu_share=min((time.process_time() - spent) / wall, 1.0))


def _measure(buffer: torch.Tensor, threads: int, repeats: int) -> Peaks:
    read = max(native.read_bandwidth(buffer, threads) for _ in range(repeats))

    def peak(of: Callable[[int, int, bool], float], tiles: bool) -> float:
        rounds = 200_000 if tiles else 20_000_000
        return statistics.median(of(rounds, threads, tiles) for _ in range(repeats))

    has_tiles = "amx" in native.available_isas()
    return Peaks(
        read_bytes_per_s=read,
        fma_flops=peak(native.matrix_peak, False),
        tile_flops=peak(native.matrix_peak, True) if has_tiles else 0.0,
        threads=threads,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        int8_ops=max(peak(native.int8_peak, tiles) for tiles in {False, has_tiles}),
        int4_ops=max(peak(native.int4_peak, tiles) for tiles in {False, has_tiles}),
        dot_flops=peak(lambda rounds, threads, _: native.dot_peak(rounds, threads), False),
    )


def _with_torch(buffer: torch.Tensor, threads: int) -> Peaks:
    from torch.utils.benchmark import Timer

    size = buffer.numel() * 4
    read = Timer("b.sum()", globals={"b": buffer}).timeit(3).mean
    a = torch.ones(1024, 1024)
    product = Timer("a @ a", globals={"a": a}).timeit(10).mean
    return Peaks(
        size / read, 2 * 1024**3 / product, 0.0, threads,
        datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


def kept_peaks() -> Peaks | None:
    """This machine's peaks, where an earlier run has measured and kept them."""
    return load_peaks(detect(), torch.get_num_threads(), _kernels())


def _best(one: Peaks, other: Peaks) -> Peaks:
    """What was reached in either of two measurements."""
    return replace(
        other,
        read_bytes_per_s=max(one.read_bytes_per_s, other.read_bytes_per_s),
        fma_flops=max(one.fma_flops, other.fma_flops),
        tile_flops=max(one.tile_flops, other.tile_flops),
        int8_ops=max(one.int8_ops, other.int8_ops),
        int4_ops=max(one.int4_ops, other.int4_ops),
        dot_flops=max(one.dot_flops, other.dot_flops),
    )


def _kernels() -> str:
    return "reference" if native.handle is None else "native"


def peaks(*, calibrate: bool = False) -> Peaks:
    """This machine's peaks: kept from an earlier run, else measured now and kept.

    What was measured while the machine was busy is measured again the next time. Processes take
    turns, and what another has measured meanwhile counts.
    calibrate: measure again, for instance because the machine was busy the first time.
    """
    hardware = detect()
    if hardware.available_bytes < 64 << 20:
        raise KernelError(
            f"Only {hardware.available_bytes >> 20} MiB of memory are free; measuring needs 64."
        )
    before = kept_peaks()
    if before is not None and not (calibrate or before.disturbed):
        return before
    with turn():
        now = kept_peaks()
        if now is not None and now != before:
            return now
        return _measured_now(hardware, None if calibrate else now)


def _measured_now(hardware: Hardware, kept: Peaks | None) -> Peaks:
    """Kept from now on, as the best of both where there were some."""
    measured = measure(hardware)
    if measured.disturbed:
        logger.warning(
            "Other programs took %.0f%% of the processors' time while their peaks were measured, "
            "so shares of the peak come out too high. They are measured again at the next start.",
            (1 - measured.cpu_share) * 100,
        )
    if kept is not None:
        measured = _best(kept, measured)
    try:
        save_peaks(hardware, measured, _kernels())
    except OSError as error:
        logger.warning("The measured peaks can't be kept: %s. Set PENSTOCK_CACHE.", error)
    return measured
