"""Timing what may be chosen freely: threads for each size of a step, and the tokens of a step with
prompts. No choice changes a bit of any result.

What was measured is kept for this user's later builds of the same operators on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.hardware import cache_folder
from penstock.runtime.engine_folder import Limits
from penstock.runtime.program import Program
from penstock.runtime.tuned import Tuned
from penstock.step import KV, Step

VERSION = 1
"""Of what is timed and how it is chosen."""

CONTEXT = 64
"""Tokens that a decoding sequence has behind it while it is timed."""

MARGIN = 0.9
"""Fewer threads, or a smaller step, are chosen where they take at most this much of the time, or
give at least this much of the speed: what is less is noise."""

DISTURBED = 0.1
"""Of a measurement during which threads waited for longer than this share of their work, nothing
is chosen: steps run as without timing."""

_TRIAL_S = 1.0
_BEYOND_DOUBT = 5 * DISTURBED
"""A measurement whose threads have waited for so much of more than _TRIAL_S of work ends early."""

_ENOUGH_S = 0.3
_MOST_RUNS = 20
_HOPELESS = 1.5

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """The shortest time of a step of some tokens on some threads."""

    tokens: int
    threads: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Timings:
    """All that were measured, and how long the threads waited for a processor meanwhile."""

    steps: tuple[Timing, ...]
    waited: float  # seconds per second of their work

    @property
    def disturbed(self) -> bool:
        """Whether other programs ran meanwhile: on an idle machine other choices may be best."""
        return self.waited > DISTURBED


def step_sizes(profile: tuple[int, int, int]) -> list[int]:
    """The steps that are timed: the profile's three, and powers of two between its ends."""
    low, usual, most = profile
    powers = [1 << i for i in range(most.bit_length())]
    return sorted({low, usual, most, *(p for p in powers if low < p < most)})


def thread_counts(available: int) -> list[int]:
    """The numbers of threads that are tried: all, and powers of two below."""
    return sorted(
        {available, *(1 << i for i in range(available.bit_length()) if 1 << i < available)}
    )


def blocks_needed(limits: Limits, block_size: int) -> int:
    """Blocks of the cache that the timed steps write to."""
    one = -(-(min(CONTEXT, limits.max_model_len - 1) + 1) // block_size)
    spans = -(-limits.profile[2] // limits.max_model_len)
    return max(limits.max_num_seqs * one, spans * -(-limits.max_model_len // block_size))


def measure(
    program: Program,
    kv: KV,
    limits: Limits,
    block_size: int,
    progress: Progress | None = None,
) -> Timings:
    """Time every size of step on every sensible number of threads, larger steps on fewer numbers:
    those that were far behind in a smaller step don't catch up in a larger one.

    Ends early where other programs take so much of the processors that nothing can be said.
    """
    sizes, counts = step_sizes(limits.profile), thread_counts(torch.get_num_threads())
    found: list[Timing] = []
    waited, spent = _waited(), time.process_time()
    done, total = 0, sum(sizes)
    for tokens in sizes:
        step = make_step(tokens, limits, block_size)
        times = {}
        for threads in counts:
            program.use_threads([(tokens, threads)])
            times[threads] = _shortest(lambda step=step: program(step, kv))  # type: ignore[misc]
            found.append(Timing(tokens, threads, times[threads]))
        best = min(times.values())
        counts = [c for c in counts if times[c] <= _HOPELESS * best]
        done += tokens
        if progress is not None:
            progress(done, total)
        work = time.process_time() - spent
        if work > _TRIAL_S and _waited() - waited > _BEYOND_DOUBT * work:
            break
    program.use_threads([])
    spent = time.process_time() - spent
    return Timings(tuple(found), (_waited() - waited) / max(spent, 1e-9))


def _waited() -> float:
    """Seconds that this process' threads have waited for a processor (proc(5), schedstat)."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # a thread that has just ended
            continue
    return total / 1e9


def _shortest(run: Callable[[], Tensor]) -> float:
    """Of a few runs; of one alone where it takes long."""
    times: list[float] = []
    while True:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
        if len(times) >= _MOST_RUNS or sum(times) >= _ENOUGH_S:
            return min(times)


def choose(timings: Timings, profile: tuple[int, int, int]) -> Tuned:
    """The threads of each size of step, and the smallest step, from the usual size on, that gives
    prompts nearly the best speed: others wait less for it. Nothing of a disturbed measurement.
    """
    if timings.disturbed:
        return Tuned()
    by_size: dict[int, dict[int, float]] = {}
    for t in timings.steps:
        by_size.setdefault(t.tokens, {})[t.threads] = t.seconds
    threads: list[tuple[int, int]] = []
    speed: dict[int, float] = {}
    for tokens, times in sorted(by_size.items()):
        most, best = max(times), min(times, key=lambda count: times[count])
        chosen = best if times[best] <= MARGIN * times[most] else most
        threads.append((tokens, chosen))
        speed[tokens] = tokens / times[chosen]
    large = [tokens for tokens in speed if tokens >= profile[1]]
    top = max(speed[tokens] for tokens in large)
    return Tuned(tuple(threads), min(t for t in large if speed[t] >= MARGIN * top))


def make_step(tokens: int, limits: Limits, block_size: int) -> Step:
    """A step of so many tokens: one of each sequence while there are enough of those, else parts of
    prompts.
    """
    if tokens <= limits.max_num_seqs:
        behind = min(CONTEXT, limits.max_model_len - 1)
        lengths, starts = [1] * tokens, [behind] * tokens
    else:
        full, rest = divmod(tokens, limits.max_model_len)
        lengths = [limits.max_model_len] * full + [rest] * (rest > 0)
        starts = [0] * len(lengths)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = max(-(-end // block_size) for end in ends)
    table = torch.arange(len(ends) * width, dtype=torch.int32).reshape(len(ends), width)
    positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(ends)), torch.tensor(lengths))
    slots = table[owner, positions // block_size] * block_size + positions % block_size
    query_start = torch.tensor([0, *lengths]).cumsum(0)
    return Step(
        tokens=torch.zeros(tokens, dtype=torch.int32),
        positions=positions.to(torch.int32),
        slots=slots.to(torch.int32),
        query_start=query_start.to(torch.int32),
        context_len=torch.tensor(ends, dtype=torch.int32),
        block_table=table,
        sample_at=(query_start[1:] - 1).to(torch.int32),
    )


# ── the cache of timings ─────────────────────────────────────────────────────────────────────────


def cache_key(facts: Mapping[str, Any]) -> str:
    """Of everything that timings depend on: `facts`, the threads, and how they are taken."""
    whole = {"version": VERSION, "threads": torch.get_num_threads(), **facts}
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:32]


def _cache_file(key: str) -> Path:
    return cache_folder() / f"timings-{key}.json"


def replay(key: str) -> Timings | None:
    """What an earlier build measured undisturbed; None where none did, or it can't be read."""
    try:
        data = json.loads(_cache_file(key).read_text())
        steps = tuple(Timing(int(a), int(b), float(c)) for a, b, c in data["steps"])
        found = Timings(steps, float(data["waited"]))
        return None if found.disturbed or not steps else found
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(key: str, timings: Timings) -> None:
    """Keep them for later builds. Raises OSError."""
    file = _cache_file(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    steps = [(t.tokens, t.threads, t.seconds) for t in timings.steps]
    temporary.write_text(json.dumps({"steps": steps, "waited": timings.waited}))
    temporary.replace(file)
