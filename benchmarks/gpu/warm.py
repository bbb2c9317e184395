"""Kernels compiled side by side before they are timed: Triton keeps them on disk.

Compiling one takes seconds and one core; a machine with a GPU has many.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.document import Context

Tiles = tuple[Any, tuple[int, ...]]
"""A bucket of `linear_tiles`, and what to put in its place."""


@dataclass(frozen=True, slots=True)
class Task:
    """Products that one process runs once each."""

    form: str
    shapes: tuple[tuple[int, int, bool], ...]  # n, k, gated
    rows: tuple[int, ...]
    tiles: Tiles | None = None


def compile_one(task: Task, device: str) -> str:
    """Run a task's products once; what went wrong, empty where nothing did."""
    import torch
    from benchmarks.gpu.ops import call_of, format_called, packed_matrix

    try:
        if task.tiles is not None:
            from penstock.kernels.triton import linear_tiles

            linear_tiles.override(dict([task.tiles]))
        stored = format_called(task.form)
        for n, k, gated in task.shapes:
            packed = packed_matrix(stored, n, k, gated, torch.device(device))
            for rows in task.rows:
                x = torch.zeros(rows, k, device=device, dtype=torch.bfloat16)
                call_of(stored, packed, x, n, gated)()
        if device != "cpu":
            torch.cuda.synchronize()
    except Exception as error:  # reported: a tile may be more than a multiprocessor holds
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def warm(context: Context, tasks: Sequence[Task], seconds: float) -> list[str | None]:
    """Compile for each task, at most for `seconds`; what went wrong, None where time ran out."""
    device = context.device.type
    if device == "cpu":  # interpreted: there is nothing to compile
        return [compile_one(task, device) for task in tasks]
    count = max(1, min(len(os.sched_getaffinity(0)) - 1, len(tasks)))
    end = time.monotonic() + seconds
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = [pool.submit(compile_one, task, device) for task in tasks]
        wait(futures, timeout=max(end - time.monotonic(), 0.0))
        return [_outcome(future) for future in futures]
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        _end(processes)


def _outcome(future: Future[str]) -> str | None:
    if not future.done():
        return None
    error = future.exception()
    return future.result() if error is None else f"{type(error).__name__}: {error}"


def _end(processes: Iterable[Any]) -> None:
    """Those that still compile are not waited for."""
    for process in processes:
        if process.is_alive():
            process.terminate()
