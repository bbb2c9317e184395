"""Where a figure comes from: machine, commit and versions, kept with every result."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

import penstock
from penstock.hardware import AnyPeaks, GpuPeaks, Hardware, Peaks
from penstock.kernels import native

P = TypeVar("P", Peaks, GpuPeaks, AnyPeaks)


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


def median_of(measured: Sequence[P]) -> P:
    """The middle of several measurements of one machine, peak by peak."""
    middle = {
        f.name: statistics.median(getattr(p, f.name) for p in measured)
        for f in fields(measured[-1])
        if f.name.endswith(("_per_s", "_flops", "_ops", "_s"))
    }
    return replace(measured[-1], **middle)
