"""Section: other tiles than those in use, for each kind of weights and number of rows.

Tiles change no bit of a result (`kernels.triton.linear_tiles`), so that the best table may be
copied from the result into that file. Candidates are tried on a layer's matrices of the 8B shape;
what is more than a multiprocessor holds is refused by the compiler, and what the time doesn't
suffice for is left out.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.gpu.document import Context, Item
from benchmarks.gpu.ops import call_of, format_called, missing, packed_matrix
from benchmarks.gpu.shapes import LLAMA_8B, TINY, matrices
from benchmarks.gpu.warm import Task, warm

from penstock.roofline.timing import Flush, median

BUCKETS = {1: 16, 32: 32, 64: 64, 128: 128, 2048: 1 << 30}
"""Rows that are tried for each bucket of `linear_tiles`, and its name there."""
_FEW = ((64, 128), (4, 8), (3, 4, 5, 6, 8))
_MANY = ((64, 128, 256), (64, 128, 256), (4, 8), (3, 4))
_KINDS = {"bfloat16": "half", "w4a16-g128": "w4a16", "w8a16": "w8a16", "w8a8": "w8a8"}


def candidates(rows: int) -> list[tuple[int, int, int, int]]:
    """(features, rows, warps, stages) to try where a step has that many rows."""
    if rows <= 128:
        wide = max(16, 1 << (rows - 1).bit_length())
        return [(f, wide, w, s) for f, w, s in itertools.product(*_FEW)]
    return [
        (f, r, w, s)
        for f, r, w, s in itertools.product(*_MANY)
        if f * r <= 128 * 256 and (f * r >= 128 * 128 or w == 4)
    ]


def items(context: Context) -> Iterator[Item]:
    for form in _KINDS:
        yield form, lambda form=form: sweep(context, form)


def sweep(context: Context, form: str) -> dict[str, Any]:
    """The seconds of each candidate, matrices added up; the best, and what stands there now."""
    gone = missing("linear")
    if gone:
        return gone
    tiles = importlib.import_module("penstock.kernels.triton.linear_tiles")
    shape = TINY if context.dry else LLAMA_8B
    layer = {name: of for name, of in matrices(shape).items() if name != "head"}
    found: dict[str, Any] = {}
    for (rows, bucket), twice in itertools.product(BUCKETS.items(), (False, True)):
        if context.due(20.0) or (context.dry and rows > 1):
            break
        mine = tuple(
            (n, k, gated) for n, k, gated in layer.values()
            if tiles.has_two_sums(_KINDS[form], rows, n, k, gated) is twice
        )  # fmt: skip
        if mine:
            key = (_KINDS[form], twice, bucket)
            found["-".join(map(str, key))] = _try(context, tiles, form, mine, rows, key)
    return found


def _try(
    context: Context,
    tiles: Any,
    form: str,
    shapes: tuple[tuple[int, int, bool], ...],
    rows: int,
    key: Any,
) -> dict[str, Any]:
    """Each candidate in one bucket's place; `shapes` are all that it decides about."""
    tried = candidates(rows)[: 2 if context.dry else None]
    tasks = [Task(form, shapes, (rows,), (key, each)) for each in tried]
    said = warm(context, tasks, context.left_s / 2)
    wrong = [f"{each}: {why}" for each, why in zip(tried, said, strict=True) if why]
    able = [each for each, why in zip(tried, said, strict=True) if why == ""]
    stored, runs = format_called(form), []
    for n, k, gated in shapes:
        packed = packed_matrix(stored, n, k, gated, context.device)
        x = torch.randn(rows, k, device=context.device).to(torch.bfloat16)
        runs.append(call_of(stored, packed, x, n, gated))
    results: list[tuple[float, tuple[int, ...]]] = []
    flush = Flush(context.device)
    before = _seconds(runs, context, flush)
    try:
        for each in able:
            if context.due(2.0):
                break
            tiles.override({key: each})
            results.append((_seconds(runs, context, flush), each))
    finally:
        tiles.override({})
    best = sorted(results)[:5]
    return {
        "now_s": before,
        "best": [{"seconds": seconds, "tiles": each} for seconds, each in best],
        "gain": before / best[0][0] if best else None,
        "tried": len(results),
        "left_out": len(tried) - len(results),
        "refused": wrong[:8],
    }


def _seconds(runs: list[Any], context: Context, flush: Flush) -> float:
    how: dict[str, Any] = {"repeats": 12, "warm_up": 2, "flush": flush}
    if context.dry:
        how |= {"repeats": 1, "warm_up": 0}
    return sum(median(run, context.device, **how) for run in runs)
