"""Where a figure comes from: machine, commit and versions, kept with every result."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Sequence
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


def median_of(measured: Sequence[Peaks]) -> Peaks:
    """The middle of several measurements of one machine, peak by peak."""
    return Peaks(
        read_bytes_per_s=statistics.median(p.read_bytes_per_s for p in measured),
        fma_flops=statistics.median(p.fma_flops for p in measured),
        int8_ops=statistics.median(p.int8_ops for p in measured),
        tile_flops=statistics.median(p.tile_flops for p in measured),
        threads=measured[-1].threads,
        measured_at=measured[-1].measured_at,
    )
