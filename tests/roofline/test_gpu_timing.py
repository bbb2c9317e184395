"""Timing, and where a GPU stood still: made traces, whose gaps are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import KernelError
from penstock.roofline import nvtx, timing
from penstock.roofline.gaps import gaps, profiled

CPU = torch.device("cpu")


def kernel(start: float, seconds: float, correlation: int, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": "k", "ts": start, "dur": seconds,
            "args": {"correlation": correlation}}  # fmt: skip


def call(
    start: float, seconds: float, correlation: int, name: str = "cudaLaunchKernel"
) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "ts": start, "dur": seconds,
            "args": {"correlation": correlation}}  # fmt: skip


def test_late_launches_and_the_gpu_s_own_gaps() -> None:
    """10 µs each; the second was launched 6 µs after the first's end, the third long before."""
    events = [
        kernel(100, 10, 1), kernel(118, 10, 2), kernel(130, 10, 3),
        call(80, 5, 1), call(112, 4, 2), call(116, 2, 3, "cuLaunchKernelEx"),
        {"ph": "M", "name": "process_name"},
        {"ph": "X", "cat": "user_annotation", "name": "step", "ts": 0, "dur": 500},
    ]  # fmt: skip
    found = gaps(events)
    assert (found.kernels, found.launches) == (3, 3)
    assert found.wall_s == pytest.approx(40e-6)
    assert found.busy_s == pytest.approx(30e-6)
    assert found.launch_s == pytest.approx(6e-6)  # from 110 to 116
    assert found.other_s == pytest.approx(4e-6)  # 116–118 and 128–130
    assert found.idle_s == pytest.approx(found.launch_s + found.other_s)
    assert found.busy_share == pytest.approx(0.75)
    assert found.launch_share == pytest.approx(0.15)


def test_a_launch_never_explains_more_than_its_gap() -> None:
    """A launch may be seen to end after its kernel began."""
    found = gaps([kernel(0, 10, 1), kernel(13, 10, 2), call(5, 30, 2)])
    assert found.launch_s == pytest.approx(3e-6) and found.other_s == 0


def test_kernels_side_by_side_count_once() -> None:
    found = gaps(
        [kernel(0, 10, 1), kernel(2, 4, 2), kernel(8, 6, 3), kernel(20, 5, 4, "gpu_memcpy")]
    )
    assert found.busy_s == pytest.approx(19e-6)
    assert found.other_s == pytest.approx(6e-6)  # of unknown launches: the GPU's own
    assert (found.kernels, found.launches) == (4, 0)


def test_one_launch_for_a_whole_graph() -> None:
    found = gaps([kernel(10 + 3 * i, 2, 7) for i in range(5)] + [call(0, 4, 7, "cudaGraphLaunch")])
    assert (found.kernels, found.launches) == (5, 1)
    assert found.launch_s == 0 and found.other_s == pytest.approx(4e-6)


def test_the_host_s_work_that_the_gpu_hides() -> None:
    """The GPU is busy 90 of 100 µs, in 6 of the others it waits for a launch; the host waits 40 of
    them, and works 60."""
    waits = call(50, 40, 0, "cudaStreamSynchronize")
    outside = call(200, 40, 0, "cudaDeviceSynchronize")  # after the last kernel
    late = call(46, 5, 2, "cudaGraphLaunch")
    found = gaps([kernel(0, 45, 1), kernel(55, 45, 2), late, waits, outside])
    assert found.waiting_s == pytest.approx(40e-6)
    assert found.host_s == pytest.approx(60e-6)
    assert (found.launch_s, found.other_s) == pytest.approx((6e-6, 4e-6))
    assert found.hidden == pytest.approx(1 - 6 / 60)
    busy = gaps([kernel(0, 50, 1), kernel(50, 50, 2), waits])
    assert busy.hidden == 1.0
    assert busy.as_dict()["host_hidden"] == 1.0 and busy.as_dict()["kernels"] == 2


def test_a_trace_without_kernels() -> None:
    with pytest.raises(KernelError, match="no kernels"):
        gaps([call(0, 1, 1)])


def test_medians_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def times(run: Any, device: object, **how: Any) -> list[float]:
        run()
        return [1.0, 3.0, 2.0] if order[-1] == "a" else [float(len(order))] * how["repeats"]

    monkeypatch.setattr(timing, "times", times)
    runs = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    found = timing.side_by_side(runs, CPU, rounds=3, repeats=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (found["a"].median_s, found["a"].least_s, found["a"].spread) == (2.0, 1.0, 0.0)
    assert found["b"].median_s == 3.0 and found["b"].spread == pytest.approx(4 / 3)


def test_each_call_is_timed() -> None:
    calls = []
    found = timing.times(
        lambda: calls.append(1), CPU, repeats=5, warm_up=2, flush=timing.Flush(CPU)
    )
    assert len(found) == 5 and len(calls) == 7 and min(found) >= 0


class Clock:
    """A GPU's: what is queued is noted, and a mark is told 1 ms after the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued: list[str] = []
        clock = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                self.at = 0

            def record(self) -> None:
                clock.queued.append("mark")
                self.at = clock.queued.count("mark")

            def elapsed_time(self, other: Event) -> float:
                return float(other.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.queued.append("busy"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.queued.append("wait"))

    def note(self, what: str) -> Any:
        return lambda: self.queued.append(what)


def test_a_gpu_s_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is ahead, the cache is flushed, and nothing is waited for in between."""
    clock, gpu = Clock(monkeypatch), torch.device("cuda")
    flush: Any = clock.note("flush")
    found = timing.times(clock.note("run"), gpu, repeats=2, warm_up=1, flush=flush)
    assert found == [1e-3, 1e-3]
    each = ["busy", "flush", "mark", "run", "mark"]
    assert clock.queued == ["run", "wait", *each, *each, "wait"]
    clock.queued.clear()
    timing.times(clock.note("run"), gpu, repeats=1, warm_up=0, ahead_cycles=0)
    assert clock.queued == ["wait", "wait", "mark", "run", "mark", "wait"]


def test_what_a_profiler_saw(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = Clock(monkeypatch)

    class Profiler:
        def __init__(self, *, activities: list[Any]) -> None:
            assert [a.name for a in activities] == ["CUDA"]

        def __enter__(self) -> Profiler:
            clock.queued.append("profile")
            return self

        def __exit__(self, *_: object) -> None:
            clock.queued.append("end")

        def export_chrome_trace(self, file: str) -> None:
            events = [kernel(0, 10, 1), kernel(15, 5, 2), call(1, 12, 2)]
            Path(file).write_text(json.dumps({"traceEvents": events}))

    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    found = profiled(clock.note("run"), tmp_path / "trace.json")
    assert clock.queued == ["wait", "profile", "run", "wait", "end"]
    assert found.launch_s == pytest.approx(3e-6) and found.other_s == pytest.approx(2e-6)
    assert (tmp_path / "trace.json").exists()
    assert profiled(clock.note("run")) == found


def test_spans_without_a_gpu() -> None:
    with nvtx.span("schedule"):
        assert not nvtx.enabled()
    if not torch.cuda.is_available():
        with pytest.raises(KernelError, match="NVTX ranges lie on a GPU's timeline, but"):
            nvtx.enable()
    nvtx.enable(False)


def test_spans_are_pushed_and_popped(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(nvtx, "why_no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    nvtx.enable()
    try:
        with nvtx.span("forward"):
            said.append("inside")
        with pytest.raises(ValueError, match="x"), nvtx.span("sample"):
            raise ValueError("x")
    finally:
        nvtx.enable(False)
    with nvtx.span("nothing"):
        pass
    assert said == ["forward", "inside", "pop", "sample", "pop"]
