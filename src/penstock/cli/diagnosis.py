"""What `penstock doctor` finds: facts about this machine and installation, and what is off."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.errors import KernelError, ModelNotFoundError
from penstock.hardware import (
    Gpu,
    GpuPeaks,
    Hardware,
    Peaks,
    cpu_quota,
    detect,
    detect_gpu,
    why_no_gpu,
)

EXTRAS = {
    "gpu": ("triton", "runs models on NVIDIA GPUs"),
    "hub": ("huggingface_hub", "fetches models from the hub by their id"),
    "sentencepiece": ("sentencepiece", "reads tokenizer.model files"),
}
"""Optional dependencies: the module that must be there, and what for."""

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_DYNAMIC",
    "OMP_THREAD_LIMIT",
    "GOMP_CPU_AFFINITY",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
)
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
"""How libgomp's threads wait for work."""
_LITTLE_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class Kernels:
    """What runs, for each operator."""

    isa: str | None  # in use; None: the reference kernels
    available: list[str]
    reason: str  # why the native library isn't used; empty when it is
    operators: list[tuple[str, str, str]]  # (operator, what runs, why)
    # `linear`: (weights, what multiplies few rows, and from TILE_MIN_ROWS)
    linear: list[tuple[str, str, str]] = field(default_factory=list)
    # keys and values: (kv_cache_dtype, beside activations in, what runs, how)
    cache: list[tuple[str, str, str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GpuFound:
    """The GPU that torch can use, or why there is none."""

    gpu: Gpu | None
    why_none: str  # empty where there is one
    peaks: GpuPeaks | None = None
    operators: list[tuple[str, str, str]] = field(default_factory=list)
    """(operator, what runs, why), where there is a GPU."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """A model that comes with the package."""

    name: str
    folder: str | None  # None: not in this installation
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything found."""

    versions: dict[str, str]
    hardware: Hardware
    load: float  # runnable threads, average over the last minute
    threads: int
    affinity: list[int]  # cores that this process may use
    machine_cores: int
    waiting: str  # what a thread without work does
    cpu_quota: float | None  # cores that the container may use; None: no limit
    kernels: Kernels
    peaks: Peaks | None
    now: Peaks | None  # what there is of those at this moment; None where nothing was kept before
    gpu: GpuFound
    models: list[Embedded]
    extras: dict[str, bool]
    environment: dict[str, str]
    warnings: list[str]


def diagnose(*, calibrate: bool = False) -> Diagnosis:
    """Look at everything; measure the peaks where none are kept or `calibrate` is set."""
    hardware, load = detect(), os.getloadavg()[0]
    import torch

    import penstock
    from penstock.kernels import native, report, report_cache, report_linear

    available = native.available_isas()
    kernels = Kernels(
        native.isa, available, native.reason, report(), report_linear(), report_cache()
    )
    environment = _environment()
    threads, quota = torch.get_num_threads(), cpu_quota()
    machine_cores = os.cpu_count() or hardware.cores
    found, now, trouble = _peaks(calibrate)
    gpu, gpu_trouble = _gpu(calibrate)
    warnings = [
        *_processor_warnings(hardware, threads, quota, load, machine_cores),
        *_kernel_warnings(kernels),
        *_memory_warnings(hardware),
        *_environment_warnings(environment),
        *trouble,
        *gpu_trouble,
    ]
    return Diagnosis(
        versions={
            "penstock": penstock.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        hardware=hardware,
        load=load,
        threads=threads,
        affinity=sorted(os.sched_getaffinity(0)),
        machine_cores=machine_cores,
        waiting=_waiting(native.handle is not None),
        cpu_quota=quota,
        kernels=kernels,
        peaks=found,
        now=now,
        gpu=gpu,
        models=_models(),
        extras={name: _is_there(module) for name, (module, _) in EXTRAS.items()},
        environment=environment,
        warnings=warnings,
    )


def _peaks(calibrate: bool) -> tuple[Peaks | None, Peaks | None, list[str]]:
    """The best that was ever measured, what there is now where that was before, and faults."""
    from penstock.roofline import kept_peaks, peaks, peaks_now

    try:
        before = None if calibrate else kept_peaks()
        found, now = peaks(calibrate=calibrate), None
        if before is not None and found == before:
            now, found = peaks_now(found)
        return found, now, [] if now is None else _now_warnings(found, now)
    except KernelError as error:
        return None, None, [f"The peaks couldn't be measured. {error}"]
    except OSError as error:
        return None, None, [f"The measured peaks couldn't be kept: {error}. Set PENSTOCK_CACHE."]


def _now_warnings(peaks: Peaks, now: Peaks) -> list[str]:
    """A third less than there was."""
    pairs = (
        ("memory", "GB/s", 1e9, now.read_bytes_per_s, peaks.read_bytes_per_s),
        ("bfloat16", "TFLOP/s", 1e12, now.bfloat16_flops, peaks.bfloat16_flops),
        ("float32", "TFLOP/s", 1e12, now.fma_flops, peaks.fma_flops),
    )
    low = [
        f"{name} {is_now / unit:.2f} of {was / unit:.2f} {label}"
        for name, label, unit, is_now, was in pairs
        if is_now < 2 / 3 * was
    ]
    if not low:
        return []
    return [
        f"At this moment there is less than was measured before: {', '.join(low)}. Other programs, "
        "or other guests of a shared machine, use the same cores and memory; what is measured "
        "meanwhile is lower by as much."
    ]


def _gpu(calibrate: bool) -> tuple[GpuFound, list[str]]:
    """Triton is imported only where there is a GPU to run it on."""
    gpu = detect_gpu()
    if gpu is None:
        return GpuFound(None, why_no_gpu()), []
    import torch

    from penstock.kernels import why_not_on
    from penstock.roofline import gpu_peaks

    reason = why_not_on(torch.device("cuda", gpu.index))
    trouble = [] if reason is None else [f"Models can't run on {gpu.name}: {reason}."]
    operators = _triton_operators() if _is_there("triton") else []
    found = None
    try:
        found = gpu_peaks(calibrate=calibrate)
    except (KernelError, RuntimeError) as error:
        trouble.append(f"The GPU's peaks couldn't be measured. {error}")
    return GpuFound(gpu, "", found, operators), trouble


def _triton_operators() -> list[tuple[str, str, str]]:
    from penstock import ops
    from penstock.kernels.triton import INTERPRETED, launchers

    there = launchers()
    runs = "Triton, interpreted" if INTERPRETED else "Triton"
    why = "TRITON_INTERPRET=1, for tests" if INTERPRETED else "compiled at its first call"
    missing = ("reference", "no Triton kernel for this operator")
    return [
        (name, *((f"{runs}, {there[name].__module__.rpartition('.')[2]}", why)
                 if name in there else missing))
        for name in ops.op_names()
    ]  # fmt: skip


def _models() -> list[Embedded]:
    from penstock.models.hub import NAMED, resolve

    found = []
    for name in NAMED:
        try:
            folder = resolve(name)
        except ModelNotFoundError:
            found.append(Embedded(name, None, 0))
            continue
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        found.append(Embedded(name, str(folder), size))
    return found


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _environment() -> dict[str, str]:
    names = [n for n in os.environ if n.startswith(("PENSTOCK_", "KMP_")) or n in _THREAD_VARIABLES]
    return {name: os.environ[name] for name in sorted(names)}


def _waiting(native: bool) -> str:
    """csrc/cpu/parallel.cpp has the times."""
    if not native:
        return "in torch's OpenMP pool"
    return "look for work for 200 µs, giving way from 20 µs on, then sleep"


def _processor_warnings(
    hardware: Hardware,
    threads: int,
    quota: float | None,
    load: float,
    machine_cores: int | None = None,
) -> list[str]:
    cores, found = hardware.cores, []
    if quota is not None and quota < cores:
        found.append(
            f"The container may use {quota:g} cores' time, but {cores} are visible: threads "
            f"beyond that wait for each other. Set OMP_NUM_THREADS={max(int(quota), 1)}."
        )
    elif threads < cores:
        found.append(
            f"{threads} threads run on {cores} cores. Unset OMP_NUM_THREADS, or set it to {cores}."
        )
    if threads > cores:
        all_cores = machine_cores or cores
        confined = f" of the machine's {all_cores}, to which this process is confined"
        found.append(
            f"{threads} threads share {cores} cores{confined if cores < all_cores else ''} and "
            f"wait for each other. Set OMP_NUM_THREADS={cores}."
        )
    if load > 0.5:
        found.append(
            f"Other programs want {load:.1f} of {cores} cores (average over a minute): what "
            "is measured now is too low. Run doctor --calibrate when they have ended."
        )
    return found


def _kernel_warnings(kernels: Kernels) -> list[str]:
    if kernels.reason:
        return [f"The reference kernels run, which are many times slower: {kernels.reason}."]
    found = []
    slow = [name for name, runs, _ in kernels.operators if runs == "reference"]
    if slow:
        found.append(f"Without a native kernel, and slow: {', '.join(slow)}.")
    best = [isa for isa in kernels.available if isa != "amx-emulated"][-1:]
    if best and kernels.isa != best[0]:
        found.append(f"{kernels.isa} runs, but this processor can {best[0]}. Unset PENSTOCK_ISA.")
    return found


def _memory_warnings(hardware: Hardware) -> list[str]:
    free = hardware.available_bytes
    if free >= _LITTLE_MEMORY:
        return []
    return [
        f"Only {free / (1 << 20):.0f} MiB of memory are free: a larger model won't load. "
        "End other programs, or raise the container's limit."
    ]


def _environment_warnings(environment: Mapping[str, str]) -> list[str]:
    """Of variables that aren't heeded, or confine threads; their number has words of its own."""
    found = []
    for name, value in environment.items():
        if name in _WAITING:
            found.append(f"{name}={value} is for torch's own threads: Penstock's don't heed it.")
        elif not name.startswith("PENSTOCK_") and name != "OMP_NUM_THREADS":
            found.append(f"{name}={value} changes how threads run; unset it unless it is meant.")
    return found
