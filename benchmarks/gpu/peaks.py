"""Section: what this machine is, and what its GPU can do."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.gpu.document import Context, Item

from penstock.bench.environment import environment
from penstock.hardware import Gpu, detect, detect_gpu, why_no_gpu
from penstock.roofline.gpu_peaks import Sizes, measure_gpu

PACKAGES = ("triton", "transformers", "accelerate", "numpy", "safetensors", "tokenizers")


def items(context: Context) -> Iterator[Item]:
    yield "environment", lambda: facts(context)
    yield "peaks", lambda: measured(context)


def facts(context: Context) -> dict[str, Any]:
    """Hardware, versions and commit, which go to the document's head as well."""
    found = environment(detect())
    gpu = None if context.dry else detect_gpu()
    found |= {
        "gpu": None if gpu is None else asdict(gpu),
        "why_no_gpu": why_no_gpu(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "system": platform.platform(),
        "nvidia_smi": _nvidia_smi(),
    }
    found["versions"] |= {name: _version(name) for name in PACKAGES}
    context.document.set(environment=found)
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi() -> str:
    """Clocks, power and temperature before the run."""
    asked = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {error}"
    return done.stdout.strip()


def measured(context: Context) -> dict[str, Any]:
    """The GPU's peaks, measured now; in a dry run the same of a tiny buffer on the CPU."""
    if not context.dry:
        return asdict(measure_gpu())
    stand_in = Gpu("a CPU", 0, (0, 0), 1, (1 << 30) + (65 << 20), (1 << 30) + (65 << 20), 0, "", "")
    sizes = Sizes(read_bytes=1 << 16, copy_bytes=1 << 16, side=32, launches=5)
    return asdict(measure_gpu(stand_in, repeats=1, device=context.device, sizes=sizes))
