"""Where a GPU stood still, from a profiler's trace: for want of a launch, or between kernels.

A trace is Kineto's, in Chrome's Trace Event Format. What the GPU did are its kernels, copies and
fills; a call of the host's that queued one has the same correlation number. A gap before a kernel
whose launch had not ended when the gap began is a launch gap up to that end: the host was late.
What is left of it is the GPU's own: a kernel's end, and the beginning of the next.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import KernelError

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cuda_runtime", "cuda_driver")
_WAITS = ("Synchronize", "cudaEventQuery", "cudaStreamQuery")
"""Calls in which the host only waits for the GPU."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gaps:
    """A GPU's time from its first kernel's start to its last one's end, in seconds."""

    kernels: int  # copies and fills included
    launches: int  # calls of the host that queued them: one for a whole graph
    wall_s: float
    busy_s: float  # at least one kernel runs
    launch_s: float  # nothing runs, as the next kernel wasn't launched yet
    other_s: float  # nothing runs, though the next kernel was launched
    waiting_s: float  # the host waits for the GPU

    @property
    def idle_s(self) -> float:
        """Nothing runs."""
        return self.wall_s - self.busy_s

    @property
    def busy_share(self) -> float:
        return self.busy_s / self.wall_s if self.wall_s else 0.0

    @property
    def launch_share(self) -> float:
        """Of the time, launch gaps."""
        return self.launch_s / self.wall_s if self.wall_s else 0.0

    @property
    def host_s(self) -> float:
        """The host works, whether the GPU does or not."""
        return max(self.wall_s - self.waiting_s, 0.0)

    @property
    def hidden(self) -> float:
        """The share of the host's work for which the GPU didn't wait."""
        return max(1.0 - self.launch_s / self.host_s, 0.0) if self.host_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "idle_s": self.idle_s,
            "busy_share": self.busy_share,
            "launch_share": self.launch_share,
            "host_s": self.host_s,
            "host_hidden": self.hidden,
        }


def gaps(events: Iterable[Event]) -> Gaps:
    """What the events of a trace say. Raises KernelError where no kernel is among them."""
    device, launched, waits = _sorted(events)
    if not device:
        raise KernelError("The trace has no kernels: nothing ran on a GPU while it was taken.")
    first, end = device[0][0], device[0][0]
    busy = launch = other = 0.0
    for start, stop, correlation in device:
        if start > end:
            late = min(max(launched.get(correlation, end) - end, 0.0), start - end)
            launch += late
            other += start - end - late
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    waiting = sum(max(min(b, end) - max(a, first), 0.0) for a, b in waits)
    return Gaps(
        kernels=len(device),
        launches=len({c for _, _, c in device if c in launched}),
        wall_s=(end - first) / 1e6,
        busy_s=busy / 1e6,
        launch_s=launch / 1e6,
        other_s=other / 1e6,
        waiting_s=waiting / 1e6,
    )


def _sorted(
    events: Iterable[Event],
) -> tuple[list[tuple[float, float, Any]], dict[Any, float], list[tuple[float, float]]]:
    """The GPU's (start, end, correlation) in order; ends of launches by correlation; waits."""
    device: list[tuple[float, float, Any]] = []
    launched: dict[Any, float] = {}
    waits: list[tuple[float, float]] = []
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or (category not in _DEVICE and category not in _HOST):
            continue
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        correlation = event.get("args", {}).get("correlation")
        if category in _DEVICE:
            device.append((start, end, correlation))
        elif any(part in str(event.get("name")) for part in _WAITS):
            waits.append((start, end))
        else:
            launched[correlation] = max(launched.get(correlation, 0.0), end)
    return sorted(device, key=lambda one: one[:2]), launched, waits


def profiled(run: Callable[[], Any], trace: Path | None = None) -> Gaps:
    """Run it under torch's profiler and look at its gaps. trace: keep the trace there.

    Only what reaches the GPU is recorded, which slows the host down least.
    """
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return gaps(json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"])
