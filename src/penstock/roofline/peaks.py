"""Measuring what this machine can do."""

from __future__ import annotations

import logging
import mmap
import threading
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


_RATES = ("read_bytes_per_s", "fma_flops", "tile_flops", "int8_ops", "int4_ops", "dot_flops")

_measured = threading.Event()
"""By this process."""


def measure(hardware: Hardware | None = None, *, repeats: int = 5) -> Peaks:
    """Measure read bandwidth and matrix peaks, each the best of `repeats` passes.

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
    kinds = (False, True) if "amx" in native.available_isas() else (False,)

    def dot_peak(rounds: int, threads: int, tiles: bool) -> float:
        return native.dot_peak(rounds, threads)

    def peak(of: Callable[[int, int, bool], float], *kinds: bool) -> float:
        return max(
            (of(200_000 if tiles else 20_000_000, threads, tiles) for tiles in kinds), default=0.0
        )

    turns: dict[str, Callable[[], float]] = {
        "read_bytes_per_s": lambda: native.read_bandwidth(buffer, threads),
        "fma_flops": lambda: peak(native.matrix_peak, False),
        "tile_flops": lambda: peak(native.matrix_peak, *kinds[1:]),
        "int8_ops": lambda: peak(native.int8_peak, *kinds),
        "int4_ops": lambda: peak(native.int4_peak, *kinds),
        "dot_flops": lambda: peak(dot_peak, False),
    }
    # in turns, since what others do on the same cores comes and goes within a tenth of a second
    rounds = [{name: run() for name, run in turns.items()} for _ in range(repeats)]
    best = {name: max(each[name] for each in rounds) for name in turns}
    return Peaks(
        **best, threads=threads, measured_at=datetime.now(UTC).isoformat(timespec="seconds")
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
        other, **{name: max(getattr(one, name), getattr(other, name)) for name in _RATES}
    )


def _kernels() -> str:
    return "reference" if native.handle is None else "native"


def peaks(*, calibrate: bool = False) -> Peaks:
    """This machine's peaks: kept from an earlier run, else measured now and kept.

    What was measured while the machine was busy is measured again by the next process. Processes
    take turns, and what another has measured meanwhile counts.
    calibrate: measure again, for instance because the machine was busy the first time.
    """
    hardware = detect()
    if hardware.available_bytes < 64 << 20:
        raise KernelError(
            f"Only {hardware.available_bytes >> 20} MiB of memory are free; measuring needs 64."
        )
    before = kept_peaks()
    if before is not None and not calibrate and (not before.disturbed or _measured.is_set()):
        return before
    with turn():
        now = kept_peaks()
        if now is not None and now != before:
            return now
        return _measured_now(hardware, None if calibrate else now)


def peaks_now(kept: Peaks) -> tuple[Peaks, Peaks]:
    """What the machine gives at this moment, and the better of that and `kept`, kept from now on.

    Less than was kept: others use the same memory and cores, which no counter of this system shows
    where they are other guests of a shared machine. More: they did when it was measured.
    """
    hardware = detect()
    now = measure(hardware, repeats=2)
    if all(getattr(now, name) <= getattr(kept, name) for name in _RATES):
        return now, kept
    best = _best(kept, now)
    _keep(hardware, best)
    return now, best


def _measured_now(hardware: Hardware, kept: Peaks | None) -> Peaks:
    """Kept from now on, as the best of both where there were some."""
    measured = measure(hardware)
    if measured.disturbed:
        logger.warning(
            "Other programs took %.0f%% of the processors' time while their peaks were measured, "
            "so shares of the peak come out too high. The next process measures them again.",
            (1 - measured.cpu_share) * 100,
        )
    if kept is not None:
        measured = _best(kept, measured)
    _keep(hardware, measured)
    _measured.set()
    return measured


def _keep(hardware: Hardware, found: Peaks) -> None:
    try:
        save_peaks(hardware, found, _kernels())
    except OSError as error:
        logger.warning("The measured peaks can't be kept: %s. Set PENSTOCK_CACHE.", error)
