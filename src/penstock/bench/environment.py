"""Where a figure comes from: machine, commit and versions, kept with every result."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.hardware import Hardware, Peaks
from penstock.kernels import native


def environment(hardware: Hardware) -> dict[str, Any]:
    """Everything beside the figures that a result must say to be compared with another."""
    return {
        "hardware": asdict(hardware),
        "isa": native.isa or "reference",
        "threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": {
            "penstock": penstock.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def commit() -> str | None:
    """The git commit that this package runs from, `+` where files differ from it.

    None where there is no git, or the package isn't part of a checkout.
    """
    here = Path(penstock.__file__)
    head = _git(here.parent, "rev-parse", "--short=12", "HEAD")
    if head is None or _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def best_of(first: Peaks, second: Peaks) -> Peaks:
    """The higher of two measurements of one machine, peak by peak."""
    return Peaks(
        read_bytes_per_s=max(first.read_bytes_per_s, second.read_bytes_per_s),
        fma_flops=max(first.fma_flops, second.fma_flops),
        tile_flops=max(first.tile_flops, second.tile_flops),
        threads=second.threads,
        measured_at=second.measured_at,
    )
