"""The file that a run writes, and what its sections are given: results survive whatever ends it."""

from __future__ import annotations

import json
import math
import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.hardware import GpuPeaks

FILE = "gpu.json"
FATAL = 3
"""The exit code of a process whose GPU takes nothing more: its errors stay until it ends."""

Item = tuple[str, Callable[[], Any]]
"""A name, and what gives its result: plain data."""


def plain(value: Any) -> Any:
    """What JSON can hold: no NaN, no infinity."""
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class Document:
    """Sections of items, in one file that is whole at any moment."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.file.read_text())
        except FileNotFoundError:
            return {"benchmark": "gpu", "sections": {}}
        return found

    def write(self, data: dict[str, Any]) -> None:
        temporary = self.file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(plain(data), indent=1) + "\n")
        temporary.replace(self.file)

    def items(self, section: str) -> dict[str, Any]:
        """What is known of a section's items."""
        found: dict[str, Any] = self.read()["sections"].get(section, {})
        return found

    def result(self, section: str, item: str) -> Any:
        """An item's result; None where there is none."""
        return self.items(section).get(item, {}).get("result")

    def put(self, section: str, item: str, entry: dict[str, Any]) -> None:
        data = self.read()
        data["sections"].setdefault(section, {})[item] = entry
        self.write(data)

    def set(self, **facts: Any) -> None:
        """Facts beside the sections."""
        self.write({**self.read(), **facts})

    def close(self, section: str, reason: str) -> None:
        """Say of items that were begun and never ended why that is."""
        data = self.read()
        for entry in data["sections"].get(section, {}).values():
            if entry.get("begun"):
                entry.clear()
                entry["error"] = reason
        self.write(data)


@dataclass(slots=True)
class Context:
    """What a section knows."""

    device: torch.device
    dry: bool  # tiny sizes, on a CPU
    quick: bool  # fewer sizes
    document: Document
    deadline: float  # time.monotonic()
    only: str = ""  # items whose name contains it
    scratch: dict[str, Any] = field(default_factory=dict)  # what items of one process share

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def due(self, seconds: float = 0.0) -> bool:
        """Whether there is no time for what takes `seconds`."""
        return self.left_s < seconds

    @property
    def peaks(self) -> GpuPeaks:
        """What this run has measured first; measured now where it hasn't."""
        if "peaks" not in self.scratch:
            found = self.document.result("peaks", "peaks")
            if found is None:
                from benchmarks.gpu.peaks import measured

                found = measured(self)
            self.scratch["peaks"] = GpuPeaks(**found)
        peaks: GpuPeaks = self.scratch["peaks"]
        return peaks


def is_fatal(error: BaseException) -> bool:
    """Whether a CUDA error has left the process's context useless."""
    text = f"{type(error).__name__} {error}"
    marks = ("CUDA error", "AcceleratorError", "illegal memory access", "device-side assert")
    return any(mark in text for mark in marks) and "out of memory" not in text


def perform(context: Context, section: str, items: Iterable[Item]) -> int:
    """Run what hasn't been run, an item after another; 0, or FATAL where the process must end."""
    known = context.document.items(section)
    for name, run in items:
        if name in known or context.only not in name:
            continue
        if context.due():
            context.document.put(section, name, {"skipped": "no time was left"})
            continue
        context.document.put(section, name, {"begun": time.time()})
        start = time.monotonic()
        try:
            entry = {"result": run()}
        except Exception as error:  # whatever a kernel, torch or a peer raises
            entry = {"error": "".join(traceback.format_exception(error, limit=-12))[-6000:]}
            context.document.put(section, name, _ended(entry, start))
            _say(section, name, start, "ERROR " + str(error).strip().partition("\n")[0][:200])
            if is_fatal(error):
                return FATAL
        else:
            context.document.put(section, name, _ended(entry, start))
            _say(section, name, start, "done")
        _free(context.device)
    return 0


def _ended(entry: dict[str, Any], start: float) -> dict[str, Any]:
    return {"seconds": round(time.monotonic() - start, 3), **entry}


def _say(section: str, name: str, start: float, what: str) -> None:
    print(f"{section}: {name}: {time.monotonic() - start:.1f} s, {what}", flush=True)


def _free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
