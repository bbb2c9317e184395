"""This machine: processor, cores, memory, GPU, and the peaks that were measured on them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import math
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, assert_never

_ISA_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
              "amx_tile", "amx_bf16", "amx_int8")  # fmt: skip

_PEAKS_VERSION = 3  # of what is measured: peaks kept by another one are measured anew
_GPU_PEAKS_VERSION = 1

_TEXTS = ("measured_at", "name")  # of what is kept; the rest are figures
# there is none, or it wasn't measured
_MAY_BE_ZERO = ("tile_flops", "dot_flops", "int8_ops", "int4_ops", "float8_flops")

_GROUPS = Path("/sys/fs/cgroup")
_GROUPS_OF_SELF = Path("/proc/self/cgroup")

Compute = Literal["float32", "bfloat16", "int8", "int4", "float8"]
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
    int4_ops: float = 0.0  # int8 by int4, the same; 0: not measured
    cpu_share: float = 1.0  # of the threads' time that other programs left while it was measured
    dot_flops: float = 0.0  # bfloat16 by vdpbf16ps out of registers; 0 where there is none

    @property
    def bfloat16_flops(self) -> float:
        """The fastest of AMX, vdpbf16ps and float32 FMA, which all give the same sums."""
        return max(self.tile_flops, self.dot_flops, self.fma_flops)

    @property
    def bfloat16_unit(self) -> str:
        """Which of them: `AMX`, `vdpbf16ps`, or empty where bfloat16 runs as float32 does."""
        if self.bfloat16_flops <= self.fma_flops:
            return ""
        return "AMX" if self.tile_flops == self.bfloat16_flops else "vdpbf16ps"

    @property
    def disturbed(self) -> bool:
        """Whether other programs ran meanwhile, so that the machine can do more than this."""
        return self.cpu_share < 0.9

    def of(self, compute: Compute) -> float:
        """FLOPs per second of products in `compute`.

        AMX has no float32, and bfloat16 runs as float32 does where there is neither AMX nor
        AVX512_BF16. int8 that wasn't measured counts as bfloat16, int4 as int8. float8 is widened
        to bfloat16.
        """
        match compute:
            case "float32":
                return self.fma_flops
            case "bfloat16" | "float8":
                return self.bfloat16_flops
            case "int8":
                return self.int8_ops or self.bfloat16_flops
            case "int4":
                return self.int4_ops or self.of("int8")
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
            case "int8" | "int4":
                return self.int8_ops or self.bfloat16_flops
            case "float8":
                return self.float8_flops or self.bfloat16_flops
            case _:
                assert_never(compute)


AnyPeaks = Peaks | GpuPeaks
"""What a floor is taken with: both have `read_bytes_per_s` and `of`."""


def _first(path: str | Path, key: str, between: str = ":") -> str:
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(between)
                if name.strip() == key:
                    return value.strip()
    except OSError:
        return ""
    return ""


def _kilobytes(key: str) -> int:
    value = _first("/proc/meminfo", key)
    return int(value.split()[0]) * 1024 if value else 0


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system doesn't say."""
    value = _first("/proc/self/status", "VmRSS")
    return int(value.split()[0]) * 1024 if value else 0


def resident_file_bytes() -> int:
    """Of these, what files have, such as libraries: other processes that map them have the same."""
    value = _first("/proc/self/status", "RssFile")
    return int(value.split()[0]) * 1024 if value else 0


def _groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Folders of the control groups that this process is in, from its own to the outermost; and
    whether they are version 1's.

    What is named but not there (a container sees its own group as the outermost) is left out.
    """
    try:
        lines = _GROUPS_OF_SELF.read_text().splitlines()
    except OSError:
        lines = []
    lines += ["0::/", f"0:{controller}:/"]  # whatever it says, the outermost may have limits
    seen = set()
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        first = controller in controllers.split(",")
        if controllers and not first:
            continue
        base = _GROUPS / controller if first else _GROUPS
        own = PurePosixPath(path.lstrip("/"))
        if ".." in own.parts:  # outside of what is mounted here
            continue
        for folder in (base / own, *(base / parent for parent in own.parents)):
            if folder not in seen and folder.is_dir():
                seen.add(folder)
                yield folder, first


def _group_memory() -> tuple[int | None, int | None]:
    """The least limit of this process's control groups, and the least that is free in one; bytes.

    None where nothing limits it. What files were read into memory counts as free, as it does in the
    system's MemAvailable: the kernel drops it before a group's limit is exceeded.
    """
    limits, free = [], []
    for folder, first in _groups("memory"):
        most, used, total = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            if first
            else ("memory.max", "memory.current", "")
        )
        try:
            text = (folder / most).read_text().strip()
            if text == "max" or int(text) >= 1 << 60:
                continue
            held = int((folder / used).read_text())
            files = sum(
                int(_first(folder / "memory.stat", f"{total}{kind}_file", " ") or 0)
                for kind in ("inactive", "active")
            )
        except (OSError, ValueError):
            continue
        limits.append(int(text))
        free.append(max(int(text) - max(held - files, 0), 0))
    return min(limits, default=None), min(free, default=None)


def detect() -> Hardware:
    """Look at this machine."""
    flags = set(_first("/proc/cpuinfo", "flags").split())
    total, free = _kilobytes("MemTotal"), _kilobytes("MemAvailable")
    limit, within = _group_memory()
    if limit is not None and within is not None:
        total, free = min(total, limit), min(free, within)
    return Hardware(
        processor=_first("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        cores=len(os.sched_getaffinity(0)),
        flags=tuple(f for f in _ISA_FLAGS if f in flags),
        memory_bytes=total,
        available_bytes=free,
    )


def release_freed_memory() -> None:
    """Give back to the system what was freed, where the C library can: glibc keeps up to 32 MB of
    each allocation that it once had mapped, hundreds of MB after a model was packed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
    """Where measurements are kept: PENSTOCK_CACHE, else the user's cache folder.

    That is XDG_CACHE_HOME's where it is absolute, as its standard wants. Who has no home has a
    folder among the temporary ones.
    """
    chosen = os.environ.get("PENSTOCK_CACHE")
    if chosen:
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):
        return Path(caches) / "penstock"
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    """This user's, that nobody else can write to: what lies in it is trusted."""
    folder = Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if about.st_uid == os.getuid() and not about.st_mode & 0o022 and folder.is_dir():
            return folder
    return Path(tempfile.mkdtemp(prefix="penstock-"))


def _peaks_file(hardware: Hardware, threads: int, kernels: str) -> Path:
    return cache_folder() / f"peaks-{_PEAKS_VERSION}-{hardware.key}-{threads}-{kernels}.json"


def cpu_quota() -> float | None:
    """Cores that the control groups allow, which the number of visible cores doesn't tell."""
    found = []
    for folder, first in _groups("cpu"):
        try:
            if first:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            else:
                quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max" and int(quota) > 0:
                found.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def _sound(peaks: AnyPeaks) -> bool:
    """Whether these are figures to divide by: finite and above 0, or 0 where that says "none"."""
    for name, value in asdict(peaks).items():
        if name in _TEXTS:
            if not isinstance(value, str):
                return False
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if not (0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO)):
            return False
    return True


def load_peaks(hardware: Hardware, threads: int, kernels: str) -> Peaks | None:
    """The peaks kept for this machine, number of threads and kind of kernels.

    None where none were measured, or they can't be read or aren't figures.
    """
    file = _peaks_file(hardware, threads, kernels)
    try:
        found = Peaks(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return found if _sound(found) else None


def save_peaks(hardware: Hardware, peaks: Peaks, kernels: str) -> Path:
    """Keep `peaks` for later runs on this machine."""
    return _keep(_peaks_file(hardware, peaks.threads, kernels), peaks)


def _gpu_peaks_file(gpu: Gpu) -> Path:
    return cache_folder() / f"gpu-peaks-{_GPU_PEAKS_VERSION}-{gpu.key}.json"


def load_gpu_peaks(gpu: Gpu) -> GpuPeaks | None:
    """The peaks kept for this kind of GPU, driver and CUDA version; None as for `load_peaks`."""
    try:
        found = GpuPeaks(**json.loads(_gpu_peaks_file(gpu).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return found if _sound(found) else None


def save_gpu_peaks(gpu: Gpu, peaks: GpuPeaks) -> Path:
    """Keep `peaks` for later runs on this kind of GPU."""
    return _keep(_gpu_peaks_file(gpu), peaks)


def _keep(file: Path, peaks: AnyPeaks) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(peaks)))
    temporary.replace(file)
    return file
