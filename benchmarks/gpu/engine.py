"""Section: whole steps of the engine, on random weights in the shapes of known models.

Times are of the host's clock, from one step's start to a later one's end, schedule and sampling
included. The floor is the ledger's, at the GPU's measured peaks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.document import Context, Item, is_fatal
from benchmarks.gpu.models import MODES, Made, make
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY
from torch import Tensor

from penstock.bench.meter import Meter
from penstock.bench.workload import greedy, raise_errors, random_prompts
from penstock.roofline import StepRecord, floor_of
from penstock.roofline.gaps import profiled
from penstock.roofline.timing import median
from penstock.step import Step

WARM_UP = 4
"""Steps that decode before any counts."""


def items(context: Context) -> Iterator[Item]:
    big, small = (TINY, TINY) if context.dry else (LLAMA_8B, LLAMA_1B)

    def decode(shape: Any, batch: int, quantization: str | None = None, at: int = 1024) -> Any:
        return lambda: decoding(context, shape, batch, quantization, at)

    yield "8b-decode-1", decode(big, 1)
    yield "8b-prefill-4096", lambda: prefill(context, big)
    yield "8b-decode-64", decode(big, 64)
    yield "1b-decode-1", decode(small, 1)
    yield "8b-w4a16-decode-1", decode(big, 1, "w4a16-g128")
    yield "gaps-1", lambda: gaps_of(context, big, 1)
    yield "gaps-8", lambda: gaps_of(context, big, 8)
    yield "modes", lambda: modes(context, small)
    if not context.quick:
        yield "8b-w8a16-decode-1", decode(big, 1, "w8a16")
        yield "8b-decode-1-32k", decode(big, 1, None, 32000)
        yield "1b-decode-64", decode(small, 64)


def shrunk(context: Context, tokens: int) -> int:
    """A length, or little of it in a dry run."""
    return min(tokens, 24) if context.dry else tokens


def run_decode(
    meter: Meter, batch: int, context_tokens: int, steps: int
) -> tuple[float, list[StepRecord]]:
    """Seconds of a step in which `batch` sequences decode, and the records of those that count."""
    draw = np.random.default_rng(0)
    meter.take()
    ahead = steps + WARM_UP + 2
    for i, prompt in enumerate(random_prompts(draw, meter.runtime, batch, context_tokens)):
        meter.engine.add_request(f"{time.monotonic_ns()}-{i}", prompt, greedy(ahead + batch))
    found: list[StepRecord] = []
    while meter.engine.has_unfinished and len(found) < steps + WARM_UP:
        raise_errors(meter.step())
        found += [
            r for r in meter.take()
            if r.size.tokens == len(r.size.queries) == batch and not r.size.is_prefill
        ]  # fmt: skip
    for request_id in list(meter.engine.requests):
        meter.engine.abort(request_id, report=False)
    counted = found[WARM_UP:] or found
    if not counted:
        raise RuntimeError(f"No step decoded {batch} sequences together.")
    last = counted[-1]
    return (last.start + last.seconds - counted[0].start) / len(counted), counted


def decoding(
    context: Context, shape: dict[str, Any], batch: int, quantization: str | None, at: int
) -> dict[str, Any]:
    """A step that decodes, beside its floor."""
    batch = min(batch, 2) if context.dry else batch
    at, steps = shrunk(context, at), 4 if context.dry else 48
    length = at + steps + WARM_UP + batch + 8
    made = make(context, shape, max_model_len=length, batch=batch, quantization=quantization)
    meter = made.meter()
    seconds, records = run_decode(meter, batch, at, steps)
    again, more = run_decode(meter, batch, at, steps)
    best, records = min((seconds, records), (again, more), key=lambda one: one[0])
    floors = [floor_of(r.cost, context.peaks) for r in records]
    floor = statistics.mean(f.seconds for f in floors)
    return {
        "batch": batch,
        "context": at,
        "weights": meter.weight_format,
        "how": made.runtime.runner.how,
        "step_s": best,
        "spread": abs(seconds - again) / best,
        "tokens_per_s": batch / best,
        "floor_s": floor,
        "bound": floors[-1].bound,
        "achieved": floor / best,
        "achieved_of_copy": _floor_by_copying(context, records) / best,
        "parts_s": _parts(records),
    }


def _floor_by_copying(context: Context, records: Sequence[StepRecord]) -> float:
    """Seconds of a step, were its bytes moved as a copy moves them: the slower of both rates."""
    peaks = replace(context.peaks, read_bytes_per_s=context.peaks.copy_bytes_per_s)
    return statistics.mean(floor_of(r.cost, peaks).seconds for r in records)


def _parts(records: Sequence[StepRecord]) -> dict[str, float]:
    """Medians of what the host spends a step's time on."""
    names = ("schedule", "batch", "forward", "sample", "output")
    return {name: statistics.median(getattr(r, f"{name}_s") for r in records) for name in names}


def prefill(context: Context, shape: dict[str, Any]) -> dict[str, Any]:
    """A prompt of 4,096 tokens in one step: its FLOPs over its time, of the matrix rate."""
    tokens = shrunk(context, 4096)
    made = make(context, shape, max_model_len=tokens + 8, batch=1, tokens_a_step=tokens)
    meter, draw = made.meter(), np.random.default_rng(0)
    found = []
    for _ in range(2 if context.dry else 5):
        [prompt] = random_prompts(draw, meter.runtime, 1, tokens)
        meter.take()
        meter.engine.add_request(f"{time.monotonic_ns()}", prompt, greedy(1))
        start = time.perf_counter()
        while meter.engine.has_unfinished:
            raise_errors(meter.step())
        found.append((time.perf_counter() - start, meter.take()))
    seconds = statistics.median(s for s, _ in found[1:])
    records = found[-1][1]
    flops = sum(r.cost.flops for r in records)
    floor = sum(floor_of(r.cost, context.peaks).seconds for r in records)
    return {
        "tokens": tokens,
        "steps": len(records),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "flops_per_s": flops / seconds,
        "of_matrix_rate": flops / seconds / context.peaks.of("bfloat16"),
        "floor_s": floor,
        "achieved": floor / seconds,
    }


def gaps_of(context: Context, shape: dict[str, Any], batch: int) -> dict[str, Any]:
    """Where the GPU stands still while sequences decode: by graphs, and kernel by kernel."""
    if context.dry:
        return {"missing": "a CPU has no gaps"}
    found: dict[str, Any] = {"batch": batch}
    for mode in ("graphs", "eager"):
        made = make(context, shape, max_model_len=1024 + 192, batch=batch, mode=mode)
        found[mode] = _gaps(context, made, batch, f"{mode}-{batch}")
        del made
        torch.cuda.empty_cache()
    return found | removed(found["graphs"], found["eager"])


def removed(graphs: dict[str, Any], eager: dict[str, Any]) -> dict[str, Any]:
    """What graphs do away with, as the profiler saw it, or where it didn't, by events."""
    name = (
        "launch_s_a_step"
        if "launch_s_a_step" in graphs and "launch_s_a_step" in eager
        else ("exposed_s")
    )
    before, after = eager[name], graphs[name]
    hidden = graphs.get("host_hidden")
    if hidden is None:  # the host's work beside the forward pass, and what of the step is not it
        idle = max(graphs["step_s"] - graphs["forward_ahead_s"], 0.0)
        hidden = max(1 - idle / graphs["outside_s"], 0.0)
    return {
        "by": name,
        "launch_gaps_removed": 1 - after / before if before > 0 else None,
        "host_hidden": hidden,
    }


def _gaps(context: Context, made: Made, batch: int, name: str) -> dict[str, Any]:
    """Steps that decode: by the host's clock, their forward pass by events, and profiled."""
    meter, steps = made.meter(), 16
    plain_s, records = run_decode(meter, batch, 1024, steps)
    found: dict[str, Any] = {
        "step_s": plain_s,
        "outside_s": statistics.median(r.overhead_s for r in records),
        **_forward_times(context, made, batch),
    }
    _decode_alone(meter, batch)
    trace = context.document.file.parent / f"trace-{name}.json" if batch == 1 else None

    def run() -> None:
        for _ in range(steps):
            raise_errors(meter.step())

    try:
        seen = profiled(run, trace)
    except Exception as error:  # a system without the driver's profiling interface
        if is_fatal(error):
            raise
        return {**found, "profiler": f"{type(error).__name__}: {error}"}
    return {
        **found,
        **seen.as_dict(),
        "steps": steps,
        "launch_s_a_step": seen.launch_s / steps,
        "idle_s_a_step": seen.idle_s / steps,
        "kernels_a_step": seen.kernels / steps,
    }


def _decode_alone(meter: Meter, batch: int) -> None:
    """Have `batch` sequences come to where each step is one of decoding."""
    draw = np.random.default_rng(1)
    for i, prompt in enumerate(random_prompts(draw, meter.runtime, batch, 1024)):
        meter.engine.add_request(f"{time.monotonic_ns()}-{i}", prompt, greedy(96))
    meter.take()
    done = 0
    while done < WARM_UP:
        raise_errors(meter.step())
        done += sum(r.size.tokens == batch and not r.size.is_prefill for r in meter.take())


def _forward_times(context: Context, made: Made, batch: int) -> dict[str, float]:
    """The forward pass of one step that decodes, again and again: as it is launched, and with all
    of its launches queued before it begins. What lies between the two are launch gaps."""
    runner, step = made.runtime.runner, decode_step(batch, 1024, made.runtime.layout.block_size)

    def again() -> Tensor:
        return runner.forward(step)

    shown = median(again, context.device, repeats=10, ahead_cycles=0)
    ahead = median(again, context.device, repeats=10, ahead_cycles=60_000_000)
    return {"forward_s": shown, "forward_ahead_s": ahead, "exposed_s": max(shown - ahead, 0.0)}


def decode_step(batch: int, at: int, block: int) -> Step:
    """`batch` sequences with `at` tokens in the cache, each with its own blocks, and one more."""
    each = at // block + 1
    table = torch.arange(batch * each, dtype=torch.int32).view(batch, each)
    every = torch.arange(batch + 1, dtype=torch.int32)
    positions = torch.full((batch,), at, dtype=torch.int32)
    return Step(
        tokens=every[1:].clone(),
        positions=positions,
        slots=table[:, -1] * block + at % block,
        query_start=every,
        context_len=positions + 1,
        block_table=table,
        sample_at=every[:-1].clone(),
    )


def modes(context: Context, shape: dict[str, Any]) -> dict[str, Any]:
    """The same steps by graphs, by compiled code, by both and by neither."""
    found: dict[str, Any] = {}
    at, steps = shrunk(context, 512), 4 if context.dry else 32
    for mode in ("graphs",) if context.dry else MODES:
        for batch in (1, 2) if context.dry else (1, 8):
            if context.due(10.0) and not context.dry:
                found[f"{mode}-{batch}"] = {"skipped": "no time was left"}
                continue
            begun = time.perf_counter()
            length = at + steps + WARM_UP + batch + 8
            made = make(context, shape, max_model_len=length, batch=batch, mode=mode)
            ready = time.perf_counter() - begun
            seconds, records = run_decode(made.meter(), batch, at, steps)
            floor = statistics.mean(floor_of(r.cost, context.peaks).seconds for r in records)
            found[f"{mode}-{batch}"] = {
                "ready_s": ready, "step_s": seconds, "achieved": floor / seconds,
            }  # fmt: skip
            del made
    return found
