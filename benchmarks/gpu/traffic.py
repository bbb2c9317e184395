"""Section: requests that come at random, as long as recorded ones: when their tokens come.

Lengths are those of the Azure trace of 2023 (code; Patel et al. 2024, arXiv:2311.18677) where its
file lies in `../shared/data`, else drawn from log-normal distributions that were fitted to it.
Arrivals are a Poisson process at each of three rates.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu.document import Context, Item
from benchmarks.gpu.models import Made, make
from benchmarks.gpu.shapes import LLAMA_8B, TINY

from penstock.bench.workload import greedy, raise_errors

TRACE = Path(__file__).resolve().parents[3] / "shared/data/traces/azure"
TRACE_FILE = "AzureLLMInferenceTrace_code.csv"
CONTEXT_FIT, GENERATED_FIT = (7.00, 1.36), (2.79, 0.85)
"""Means and standard deviations of the logarithms of the trace's 8,819 rows."""
MOST_CONTEXT, MOST_GENERATED = 7437, 1899
RATES = (2.0, 6.0, 12.0)
"""Requests a second. The last asks for 25,000 prompt tokens a second: three quarters of what an
H200 reads of the 8B shape at 0.65 of its matrix rate."""
SEATS = 128
CACHE_TOKENS = 400_000
"""52 GB of the 8B shape: all seats at a request's mean length, and half as much more."""


def items(context: Context) -> Iterator[Item]:
    for rate in RATES:
        yield f"rate-{rate:g}", lambda rate=rate: at_rate(context, rate)


def lengths(count: int, seed: int, folder: Path = TRACE) -> tuple[list[tuple[int, int]], str]:
    """Tokens of `count` prompts and of what follows them, and where they are from."""
    draw = np.random.default_rng(seed)
    file = folder / TRACE_FILE
    if file.exists():
        with file.open(encoding="utf-8", newline="") as lines:
            rows = [
                (max(1, int(r["ContextTokens"])), max(1, int(r["GeneratedTokens"])))
                for r in csv.DictReader(lines)
            ]
        first = int(draw.integers(0, max(len(rows) - count, 1)))
        return rows[first : first + count], "the trace"
    given = np.exp(draw.normal(*CONTEXT_FIT, count)).clip(1, MOST_CONTEXT).astype(int)
    made = np.exp(draw.normal(*GENERATED_FIT, count)).clip(1, MOST_GENERATED).astype(int)
    return list(zip(given.tolist(), made.tolist(), strict=True)), "log-normal fits to the trace"


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}


def _made(context: Context) -> Made:
    """One engine for all rates."""
    if "traffic" not in context.scratch:
        longest = 512 if context.dry else MOST_CONTEXT + MOST_GENERATED + 1
        shape = TINY if context.dry else LLAMA_8B
        seats = 4 if context.dry else SEATS
        context.scratch["traffic"] = make(
            context,
            shape,
            max_model_len=longest,
            batch=seats,
            tokens_a_step=2048,
            graphs_of=(4, 16, 64, SEATS),
            cache_tokens=seats * longest if context.dry else CACHE_TOKENS,
        )
    made: Made = context.scratch["traffic"]
    return made


def at_rate(context: Context, rate: float) -> dict[str, Any]:
    """Serve arrivals at `rate` for some seconds, then the rest to its end."""
    made = _made(context)
    seconds = 0.1 if context.dry else max(min(15.0, context.left_s / 4), 5.0)
    count = 6 if context.dry else max(int(rate * seconds), 8)
    sizes, source = lengths(count, int(rate))
    if context.dry:
        sizes = [(min(a, 40), min(b, 4)) for a, b in sizes]
    engine = made.meter().engine
    draw = np.random.default_rng(int(rate))
    vocabulary = made.runtime.vocab_size
    prompts = [draw.integers(0, vocabulary, a).tolist() for a, _ in sizes]
    due = np.cumsum(draw.exponential(seconds / count if context.dry else 1 / rate, count))
    _warm_up(engine, prompts)
    begun, sent, outputs = time.monotonic(), 0, []
    while sent < count or engine.has_unfinished:
        now = time.monotonic() - begun
        while sent < count and due[sent] <= now:
            params = greedy(sizes[sent][1])
            arrival = begun + float(due[sent])
            engine.add_request(str(sent), prompts[sent], params, arrival_time=arrival)
            sent += 1
        if not engine.has_unfinished:
            time.sleep(max(min(due[sent] - now, 0.01), 0.0))
            continue
        step = engine.step()
        raise_errors(step)
        outputs += step
        if context.left_s < -2.0:
            break
    wall = time.monotonic() - begun
    return _figures(outputs, wall, rate, source, count)


def _warm_up(engine: Any, prompts: list[list[int]]) -> None:
    """Some of the prompts at once, so that kernels are compiled and graphs recorded."""
    for i, prompt in enumerate(sorted(prompts[:SEATS], key=len)):
        engine.add_request(f"warm-up-{i}", prompt, greedy(4 + i % 5))
    while engine.has_unfinished:
        raise_errors(engine.step())


def _figures(
    outputs: list[Any], wall: float, rate: float, source: str, count: int
) -> dict[str, Any]:
    metrics = [output.metrics for output in outputs]
    ttft = [m.ttft_s for m in metrics if m.ttft_s is not None]
    tpot = [
        (m.token_times[-1] - m.token_times[0]) / (len(m.token_times) - 1)
        for m in metrics
        if len(m.token_times) > 1
    ]
    between = [gap for m in metrics for gap in m.itl_s]
    tokens = sum(len(m.token_times) for m in metrics)
    return {
        "rate": rate,
        "lengths": source,
        "requests": count,
        "completed": len(outputs),
        "seconds": wall,
        "output_tokens_per_s": tokens / wall if wall else math.nan,
        "ttft_s": percentiles(ttft),
        "tpot_s": percentiles(tpot),
        "itl_s": percentiles(between),
        "preemptions": sum(m.preemptions for m in metrics),
    }
