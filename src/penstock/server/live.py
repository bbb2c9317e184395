"""The engine as the page shows it: an event a quarter of a second, while somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from itertools import groupby
from typing import Any

from penstock.engine import AsyncLLM
from penstock.roofline import StepRecord
from penstock.server.service import Service
from penstock.server.sse import event

PERIOD_S = 0.25
SPEED_S = 1.0
"""The speed is of so much of the past."""
MOST_STEPS, MOST_RUNNING = 200, 64


async def events(service: Service) -> AsyncIterator[bytes]:
    """What changed, until the server shuts down."""
    since = time.perf_counter() - PERIOD_S
    while service.state != "draining":
        llm = service.engine_or_none
        if llm is not None:
            found, since = snapshot(service, llm, since)
            yield event(found)
        else:
            yield b": the model is being loaded\n\n"
        await asyncio.sleep(PERIOD_S)


def snapshot(service: Service, llm: AsyncLLM, since: float) -> tuple[dict[str, Any], float]:
    """(the state now with the steps after `since`, when the last of these began)."""
    stats = llm.stats()
    kept = list(service.recent.steps)
    steps = [step for step in kept if step.start > since][-MOST_STEPS:]
    if steps:
        since = steps[-1].start
    busy = kept[-MOST_STEPS:]
    known = [(s.floor.seconds, s.seconds) for s in busy if s.floor is not None]
    spent = sum(seconds for _, seconds in known)
    return {
        "time": time.time(),
        "uptime_s": time.time() - service.started,
        "model": service.names[0],
        "requests": {
            "running": stats["running"],
            "waiting": stats["waiting"],
            "swapped": stats["swapped"],
            "done": service.done,
            "failed": service.failed,
        },
        "running": _running(llm),
        "steps": [_step(step) for step in steps],
        "blocks": {
            "total": stats["blocks"],
            "size": llm.runtime.layout.block_size,
            "runs": _runs(llm.engine.pool.states()),
        },
        "latency": {
            "ttft_s": list(service.recent.ttft_s)[-64:],
            "itl_s": list(service.recent.itl_s)[-128:],
        },
        "floor_ratio": sum(floor for floor, _ in known) / spent if spent else None,
        "bound": busy[-1].floor.bound if busy and busy[-1].floor is not None else None,
        "tokens_per_s": _speed(kept, service.recent.steps.maxlen, time.perf_counter()),
        "prefix": stats["prefix"],
    }, since


def _running(llm: AsyncLLM) -> list[dict[str, Any]]:
    now = time.monotonic()
    return [
        {
            "id": sequence.request.request_id + (f" #{sequence.index}" if sequence.index else ""),
            "phase": "decode" if sequence.num_output else "prefill",
            "prompt_tokens": sequence.num_prompt,
            "computed_tokens": sequence.num_computed,
            "cached_tokens": sequence.request.metrics.cached_tokens,
            "output_tokens": sequence.num_output,
            "age_s": now - sequence.request.metrics.arrival_time,
        }
        for sequence in list(llm.engine.scheduler.running)[:MOST_RUNNING]
    ]


def _speed(steps: Sequence[StepRecord], most: int | None, now: float) -> float:
    """Tokens generated a second, in the steps that have ended lately.

    most: steps that are kept; where those of a second are more, the speed is of as long as they go
    back.
    """
    made = [step for step in steps if step.start + step.seconds > now - SPEED_S]
    all_there = len(made) < len(steps) or len(steps) != most
    span = SPEED_S if all_there else now - made[0].start
    return sum(step.generated for step in made) / span


def _step(step: StepRecord) -> dict[str, Any]:
    size = step.size
    return {
        "at": step.start,
        "seconds": step.seconds,
        "prefill_tokens": size.prefill_tokens,
        "decode_tokens": size.tokens - size.prefill_tokens,
        "sequences": len(size.queries),
        "floor_s": None if step.floor is None else step.floor.seconds,
    }


def _runs(states: bytes) -> list[tuple[int, int]]:
    return [(state, sum(1 for _ in same)) for state, same in groupby(states)]
