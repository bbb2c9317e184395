"""This machine: processor, cores, memory, GPU, and the peaks that were measured on them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, assert_never

_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
              "amx_tile", "amx_bf16", "amx_int8")  # fmt: skip

_PEAKS_VERSION = 2  # of what is measured: peaks kept by another one are measured anew
_GPU_PEAKS_VERSION = 1

Compute = Literal["float32", "bfloat16", "int8", "float8"]
"""What products run in; sums are float32, or int32 for int8. float8: E4M3."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the operating system says."""

    processor: str
    cores: int  # that this process may use
    flags: tuple[str, ...]  # the instruction sets that matter here
    memory_bytes: int
    available_bytes: int

    @property
    def key(self) -> str:
        """Identifies this kind of machine in the cache of peaks."""
        text = f"{self.processor}|{self.cores}|{','.join(self.flags)}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Peaks:
    """What was measured, with all threads."""

    read_bytes_per_s: float  # of a buffer far beyond the last cache
    fma_flops: float  # float32 FMA out of registers
    tile_flops: float  # bfloat16 AMX fed from L1; 0 where there is none
    threads: int
    measured_at: str  # ISO 8601
    int8_ops: float = 0.0  # int8, two a multiply-add: vectors or AMX tiles; 0: not measured
    cpu_share: float = 1.0  # of the threads' time that other programs left while it was measured

    @property
    def disturbed(self) -> bool:
        """Whether other programs ran meanwhile, so that the machine can do more than this."""
        return self.cpu_share < 0.9

    def of(self, compute: Compute) -> float:
        """FLOPs per second of products in `compute`.

        AMX has no float32, and bfloat16 without AMX runs as float32 does. int8 that wasn't
        measured counts as the fastest of the others. float8 is widened to bfloat16.
        """
        match compute:
            case "float32":
                return self.fma_flops
            case "bfloat16" | "float8":
                return max(self.tile_flops, self.fma_flops)
            case "int8":
                return self.int8_ops or max(self.tile_flops, self.fma_flops)
            case _:
                assert_never(compute)


@dataclass(frozen=True, slots=True)
class Gpu:
    """An NVIDIA GPU, as its driver describes it."""

    name: str
    index: int
    capability: tuple[int, int]  # 9.0: Hopper
    multiprocessors: int
    memory_bytes: int
    free_bytes: int
    l2_bytes: int  # 0 where torch doesn't say
    driver: str  # its version; empty where the system doesn't say
    runtime: str  # the CUDA version that torch was built for

    @property
    def key(self) -> str:
        """Identifies this kind of GPU, and what drives it, in the cache of peaks."""
        text = f"{self.name}|{self.capability}|{self.multiprocessors}|{self.memory_bytes}"
        text += f"|{self.driver}|{self.runtime}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class GpuPeaks:
    """What was measured on a GPU: medians, of random data."""

    read_bytes_per_s: float  # a sum over a buffer far beyond the L2
    copy_bytes_per_s: float  # from device to device, bytes read and written
    float32_flops: float  # without TF32
    tf32_flops: float
    bfloat16_flops: float
    float16_flops: float
    float8_flops: float  # E4M3; 0: the GPU has none, or torch doesn't multiply it there
    int8_ops: float  # two a multiply-add; 0: not measured
    launch_s: float  # the host's time for one small kernel
    name: str  # of the GPU
    measured_at: str  # ISO 8601

    def of(self, compute: Compute) -> float:
        """FLOPs per second of products in `compute`.

        float32 is full float32, as the kernels compute it. int8 and float8 that weren't measured
        count as bfloat16.
        """
        match compute:
            case "float32":
                return self.float32_flops
            case "bfloat16":
                return self.bfloat16_flops
            case "int8":
                return self.int8_ops or self.bfloat16_flops
            case "float8":
                return self.float8_flops or self.bfloat16_flops
            case _:
                assert_never(compute)


AnyPeaks = Peaks | GpuPeaks
"""What a floor is taken with: both have `read_bytes_per_s` and `of`."""


def _first(path: str, key: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        return ""
    return ""


def _kilobytes(key: str) -> int:
    value = _first("/proc/meminfo", key)
    return int(value.split()[0]) * 1024 if value else 0


def _limit() -> tuple[int | None, int]:
    """The cgroup's memory limit (None where there is none) and what it uses."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            value = Path(limit).read_text().strip()
            if value != "max" and int(value) < 1 << 60:
                return int(value), int(Path(used).read_text())
        except (OSError, ValueError):
            continue
    return None, 0


def detect() -> Hardware:
    """Look at this machine."""
    flags = set(_first("/proc/cpuinfo", "flags").split())
    total, free = _kilobytes("MemTotal"), _kilobytes("MemAvailable")
    limit, used = _limit()
    if limit is not None:
        total, free = min(total, limit), min(free, max(limit - used, 0))
    return Hardware(
        processor=_first("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        cores=len(os.sched_getaffinity(0)),
        flags=tuple(f for f in _ISA_FLAGS if f in flags),
        memory_bytes=total,
        available_bytes=free,
    )


def why_no_gpu() -> str:
    """Why torch can't use a GPU here; empty where it can."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    if said:
        return str(said[-1].message).partition("\n")[0]
    if not _driver():
        return "there is no NVIDIA driver"
    return "the driver shows no GPU: look at CUDA_VISIBLE_DEVICES"


def detect_gpu(index: int | None = None) -> Gpu | None:
    """Look at a GPU: torch's current one, or one by its number. None where torch can use none.

    CUDA is initialised only where there is a GPU.
    """
    import torch

    if why_no_gpu():
        return None
    at = torch.cuda.current_device() if index is None else index
    found = torch.cuda.get_device_properties(at)
    free, total = torch.cuda.mem_get_info(at)
    return Gpu(
        name=found.name,
        index=at,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
        memory_bytes=total,
        free_bytes=free,
        l2_bytes=getattr(found, "L2_cache_size", 0),
        driver=_driver(),
        runtime=torch.version.cuda or "",
    )


def _driver() -> str:
    """The version of NVIDIA's kernel module; empty where the system has or shows none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found.group() if found else ""


def cache_folder() -> Path:
    """Where measurements are kept: PENSTOCK_CACHE, else the user's cache folder."""
    if "PENSTOCK_CACHE" in os.environ:
        return Path(os.environ["PENSTOCK_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "penstock"


def _peaks_file(hardware: Hardware, threads: int, kernels: str) -> Path:
    return cache_folder() / f"peaks-{_PEAKS_VERSION}-{hardware.key}-{threads}-{kernels}.json"


def cpu_quota() -> float | None:
    """Cores that the cgroup allows, which the number of visible cores doesn't tell."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    folder = Path("/sys/fs/cgroup/cpu")
    try:
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return limit / int((folder / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None


def load_peaks(hardware: Hardware, threads: int, kernels: str) -> Peaks | None:
    """The peaks kept for this machine, number of threads and kind of kernels.

    None where none were measured, or they can't be read.
    """
    file = _peaks_file(hardware, threads, kernels)
    try:
        return Peaks(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def save_peaks(hardware: Hardware, peaks: Peaks, kernels: str) -> Path:
    """Keep `peaks` for later runs on this machine."""
    return _keep(_peaks_file(hardware, peaks.threads, kernels), peaks)


def _gpu_peaks_file(gpu: Gpu) -> Path:
    return cache_folder() / f"gpu-peaks-{_GPU_PEAKS_VERSION}-{gpu.key}.json"


def load_gpu_peaks(gpu: Gpu) -> GpuPeaks | None:
    """The peaks kept for this kind of GPU, driver and CUDA version; None as for `load_peaks`."""
    try:
        return GpuPeaks(**json.loads(_gpu_peaks_file(gpu).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def save_gpu_peaks(gpu: Gpu, peaks: GpuPeaks) -> Path:
    """Keep `peaks` for later runs on this kind of GPU."""
    return _keep(_gpu_peaks_file(gpu), peaks)


def _keep(file: Path, peaks: AnyPeaks) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(peaks)))
    temporary.replace(file)
    return file
