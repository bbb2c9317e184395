"""Check and time Penstock on a GPU, beside transformers and torch's own kernels.

    PYTHONPATH=src python benchmarks/gpu/run.py --out results

From a plain checkout: nothing is installed, neither the native library is needed nor what only the
server needs. Each section is a process of its own with its part of the time; `gpu.json` is written
after every item, so that a run that is ended keeps what it has, and a section whose GPU has failed
goes on behind the item that did it. README.md beside this says what is measured.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = {
    "peaks": 4, "checks": 22, "ops": 22, "engine": 25, "traffic": 9, "peers": 18, "sweep": 4,
}  # fmt: skip
"""Parts of the time; what one leaves is shared by those after it."""
RESTARTS = 6
GRACE_S = 5.0
"""A section notices its deadline between items; this long after it, it is ended."""


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder for gpu.json")
    parser.add_argument("--only", default="", help="sections, or section:part of an item's name, …")
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, the 1B shape for peers")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--in-process", action="store_true", help="all sections in this process")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--deadline-s", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def chosen(only: str) -> dict[str, str]:
    """Sections to run, each with a part of the names of its items."""
    if not only:
        return dict.fromkeys(SECTIONS, "")
    found = {}
    for each in only.split(","):
        section, _, item = each.strip().partition(":")
        if section not in SECTIONS:
            sys.exit(f"error: --only {section!r} isn't one of {', '.join(SECTIONS)}.")
        found[section] = item
    return {section: found[section] for section in SECTIONS if section in found}


def prepare(dry: bool) -> None:
    """What must be set before torch and Triton are imported."""
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [str(ROOT), str(ROOT / "src"), *(p for p in sys.path if p not in ("", here))]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if dry:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def check_gpu() -> None:
    """Ends the program where there is none to measure; nothing of this process stays on a GPU."""
    import torch

    from penstock.hardware import why_no_gpu

    if not torch.cuda.is_available():
        sys.exit(f"error: no GPU to measure: {why_no_gpu()}. --dry-run tries this on a CPU.")


def perform_section(wanted: argparse.Namespace, section: str, seconds: float, only: str) -> int:
    """Run a section's items here."""
    import torch
    from benchmarks.gpu.document import Context, Document, perform

    device = torch.device("cpu" if wanted.dry_run else "cuda")
    context = Context(
        device, wanted.dry_run, wanted.quick, Document(wanted.out), time.monotonic() + seconds, only
    )
    try:
        items = list(importlib.import_module(f"benchmarks.gpu.{section}").items(context))
    except Exception:  # the others may run
        context.document.put(section, "start", {"error": traceback.format_exc()[-6000:]})
        return 0
    return perform(context, section, items)


def run_section(wanted: argparse.Namespace, section: str, seconds: float, only: str) -> None:
    """The same in processes of its own, until it is through or its time is over."""
    from benchmarks.gpu.document import FATAL, Document

    document, end = Document(wanted.out), time.monotonic() + seconds
    for _ in range(RESTARTS):
        left = end - time.monotonic()
        if left <= 0:
            break
        command = [sys.executable, str(Path(__file__).resolve()), "--out", str(wanted.out),
                   "--section", section, "--deadline-s", f"{left:.1f}",
                   "--only", f"{section}:{only}"]  # fmt: skip
        command += ["--quick"] * wanted.quick + ["--dry-run"] * wanted.dry_run
        try:
            code = subprocess.run(command, timeout=left + GRACE_S, check=False).returncode
        except subprocess.TimeoutExpired:
            document.close(section, f"was ended with its section, after {seconds:.0f} s")
            break
        if code == 0:
            break
        document.close(section, f"its process ended with code {code}")
        if code != FATAL and not document.items(section):  # it fails before any item
            document.put(section, "start", {"error": f"exit code {code}; see the log"})
            break


def main(arguments: list[str] | None = None) -> int:
    """0: everything ran; 1: an item failed. What was measured isn't judged by it."""
    wanted = options(arguments)
    prepare(wanted.dry_run)
    if wanted.section:
        only = chosen(wanted.only)[wanted.section]
        return perform_section(wanted, wanted.section, wanted.deadline_s, only)
    from benchmarks.gpu import summary
    from benchmarks.gpu.document import Document

    sections = chosen(wanted.only)
    if not wanted.dry_run:
        check_gpu()
    end = time.monotonic() + wanted.budget_s
    document = Document(wanted.out)
    document.set(
        arguments={k: str(v) for k, v in vars(wanted).items()},
        begun=time.time(),
        dry=wanted.dry_run,
    )
    for section, only in sections.items():
        rest = sum(part for name, part in SECTIONS.items() if name in _after(sections, section))
        seconds = (end - time.monotonic()) * SECTIONS[section] / rest
        if wanted.in_process:
            perform_section(wanted, section, seconds, only)
        else:
            run_section(wanted, section, seconds, only)
        document.set(summary=summary.lines(document), ended=time.time())
    print(summary.text(document))
    return 1 if summary.errors(document) else 0


def _after(sections: dict[str, Any], section: str) -> list[str]:
    """A section and those that follow."""
    names = list(sections)
    return names[names.index(section) :]


if __name__ == "__main__":
    sys.exit(main())
