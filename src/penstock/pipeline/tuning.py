"""Timing what may be chosen freely: threads for each size of a step, how `linear` goes over its
matrices, and the tokens of a step with prompts. No choice changes a bit of any result.

What was measured is kept for this user's later builds of the same operators on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.cache import holds_states
from penstock.hardware import cache_folder
from penstock.runtime.engine_folder import Limits
from penstock.runtime.program import LinearVariant, Program
from penstock.runtime.tuned import Tuned
from penstock.step import KV, StatefulStep, Step

VERSION = 4
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

VARIANT_MARGIN = 0.95
"""A variant is chosen where it takes at most this much of the default's time. Closer than for
threads: variants take turns, and a form's time is a sum over all layers."""

_VARIANTS_S = 2.5
"""Seconds for the variants of one size of step; larger steps, of which that is too few runs, go as
the largest that was timed."""
_FEWEST_RUNS = 2

_FEW_ROWS = 3
"""So many read a panel as fast as memory is, with AVX-512 (csrc/cpu/ahead.h)."""

_ONCE_ROWS = 8
"""At most so many pass over a panel together (csrc/cpu/linear.cpp)."""

_NEVER = 1 << 30

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Timing:
    """The shortest time of a step of some tokens on some threads."""

    tokens: int
    threads: int
    seconds: float


@dataclass(frozen=True, slots=True)
class VariantTiming:
    """The shortest time of all of a step's products of one form, of so many rows."""

    product: str  # `Program.products`
    rows: int
    variant: LinearVariant
    seconds: float


@dataclass(frozen=True, slots=True)
class Timings:
    """All that were measured, and how long the threads waited for a processor meanwhile."""

    steps: tuple[Timing, ...]
    waited: float  # seconds per second of their work
    variants: tuple[VariantTiming, ...] = ()

    @property
    def disturbed(self) -> bool:
        """Whether other programs ran meanwhile: on an idle machine other choices may be best."""
        return self.waited > DISTURBED

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "waited": round(self.waited, 4),
            "measured": [asdict(timing) for timing in self.steps],
            "variants": [asdict(timing) for timing in self.variants],
        }


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


def candidates(rows: int) -> list[LinearVariant]:
    """How `linear` may go over a matrix with so many rows: the default, then one change each."""
    sizes = (64, 512) if rows <= _FEW_ROWS else (128, 2048)
    parts = [LinearVariant(part_bytes=size << 10) for size in sizes]
    if rows <= _ONCE_ROWS:
        ahead = [LinearVariant(ahead_cache=2), LinearVariant(ahead_cache=3)]
        near = [LinearVariant(ahead_bytes=2048), LinearVariant(ahead_bytes=2048, ahead_cache=2)]
        widen = [LinearVariant(widen_rows=_FEW_ROWS), LinearVariant(widen_rows=2 * _ONCE_ROWS)]
        return [LinearVariant(), *ahead, *near, *widen[: 2 * (rows > _FEW_ROWS)], *parts]
    ahead = [LinearVariant(ahead_cache=1), LinearVariant(ahead_cache=3)]
    if rows <= 2 * _ONCE_ROWS:
        widen = [LinearVariant(widen_rows=_ONCE_ROWS), LinearVariant(widen_rows=2 * _ONCE_ROWS)]
        pairs = LinearVariant(pair_rows=_ONCE_ROWS + 1 if rows < 2 * _ONCE_ROWS else _NEVER)
        return [LinearVariant(), *ahead, pairs, *widen, *parts]
    blocks = [LinearVariant(rows_bytes=size << 10) for size in (512, 2048)]
    return [LinearVariant(), *ahead, LinearVariant(pair_rows=_NEVER), *blocks, *parts]


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
    those that were far behind in a smaller step don't catch up in a larger one. Then, on the best
    number, the variants of its products.

    Ends early where other programs take so much of the processors that nothing can be said.
    """
    sizes, counts = step_sizes(limits.profile), thread_counts(torch.get_num_threads())
    found: list[Timing] = []
    variants: list[VariantTiming] = []
    waited, spent = waited_s(), time.process_time()
    done, total = 0, sum(sizes)
    for tokens in sizes:
        step = make_step(tokens, limits, block_size, stated=holds_states(kv))
        times = {}
        for threads in counts:
            program.use_threads([(tokens, threads)])
            times[threads] = _shortest(lambda step=step: program(step, kv))  # type: ignore[misc]
            found.append(Timing(tokens, threads, times[threads]))
        best = min(times.values())
        counts = [c for c in counts if times[c] <= _HOPELESS * best]
        program.use_threads([(tokens, best_threads(times))])
        runs = min(int(_VARIANTS_S / (best * len(candidates(tokens)))), _MOST_RUNS)
        if runs >= _FEWEST_RUNS:
            variants += time_variants(program, kv, step, runs)
        done += tokens
        if progress is not None:
            progress(done, total)
        work = time.process_time() - spent
        if work > _TRIAL_S and waited_s() - waited > _BEYOND_DOUBT * work:
            break
    program.use_threads([])
    spent = time.process_time() - spent
    return Timings(tuple(found), (waited_s() - waited) / max(spent, 1e-9), tuple(variants))


def best_threads(times: Mapping[int, float]) -> int:
    """Of seconds by numbers of threads: the largest number, unless fewer are clearly faster."""
    most, best = max(times), min(times, key=lambda count: times[count])
    return best if times[best] <= MARGIN * times[most] else most


def time_variants(program: Program, kv: KV, step: Step, runs: int) -> list[VariantTiming]:
    """Time the candidates of every form of product in this step, in turns; forms by themselves.

    Of products whose rows aren't the step's tokens, nothing.
    """
    tokens, sampled = step.num_tokens, step.sample_at.shape[0]
    rows_of = {
        product: sampled if program.calls[numbers[0]].shapes.startswith("[S") else tokens
        for product, numbers in program.products.items()
    }
    forms = [product for product, rows in rows_of.items() if rows == tokens]
    clock = torch.zeros(len(program.calls) + 1, dtype=torch.float64)
    shortest: dict[tuple[str, LinearVariant], float] = {}
    tried = candidates(tokens)
    for turn in range(runs):  # each is first once: what came before leaves its mark
        first = turn % len(tried)
        for variant in tried[first:] + tried[:first]:
            program.use_variants([(form, tokens, variant) for form in forms])
            program(step, kv, clock)
            taken = clock.diff()
            for form in forms:
                seconds = float(taken[program.products[form]].sum())
                key = (form, variant)
                shortest[key] = min(seconds, shortest.get(key, seconds))
    program.use_variants([])
    return [VariantTiming(form, tokens, how, s) for (form, how), s in shortest.items()]


def waited_s() -> float:
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
    """The threads of each size of step, how its products go over their matrices, and the smallest
    step, from the usual size on, that gives prompts nearly the best speed: others wait less for it.
    Nothing of a disturbed measurement.
    """
    if timings.disturbed:
        return Tuned()
    by_size: dict[int, dict[int, float]] = {}
    for t in timings.steps:
        by_size.setdefault(t.tokens, {})[t.threads] = t.seconds
    threads: list[tuple[int, int]] = []
    speed: dict[int, float] = {}
    for tokens, times in sorted(by_size.items()):
        chosen = best_threads(times)
        threads.append((tokens, chosen))
        speed[tokens] = tokens / times[chosen]
    large = [tokens for tokens in speed if tokens >= profile[1]]
    top = max(speed[tokens] for tokens in large)
    usual = min(t for t in large if speed[t] >= MARGIN * top)
    return Tuned(tuple(threads), usual, _choose_variants(timings.variants))


def _choose_variants(
    timings: Sequence[VariantTiming],
) -> tuple[tuple[str, int, LinearVariant], ...]:
    """(product, rows, how) of every form and number of rows that was timed."""
    taken: dict[tuple[str, int], dict[LinearVariant, float]] = {}
    for t in timings:
        taken.setdefault((t.product, t.rows), {})[t.variant] = t.seconds
    chosen: list[tuple[str, int, LinearVariant]] = []
    for (product, rows), seconds in taken.items():
        default, best = LinearVariant(), min(seconds, key=lambda how: seconds[how])
        clearly = seconds[best] <= VARIANT_MARGIN * seconds[default]
        chosen.append((product, rows, best if clearly else default))
    return tuple(chosen)


def make_step(tokens: int, limits: Limits, block_size: int, *, stated: bool = False) -> Step:
    """A step of so many tokens: one of each sequence while there are enough of those, else parts of
    prompts. stated: of a model that has states.
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
    last = (query_start[1:] - 1).to(torch.int32)
    arrays = (
        torch.zeros(tokens, dtype=torch.int32),
        positions.to(torch.int32),
        slots.to(torch.int32),
        query_start.to(torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        table,
        last,
    )
    if not stated:
        return Step(*arrays)
    own = torch.arange(len(ends), dtype=torch.int32)  # what each reads; the next ones are written
    began = torch.tensor(starts) > 0
    return StatefulStep(
        *arrays, torch.where(began, own, -1), torch.stack((last, own + len(ends)), dim=1)
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
        variants = tuple(
            VariantTiming(str(product), int(rows), LinearVariant(**how), float(seconds))
            for product, rows, how, seconds in data["variants"]
        )
        found = Timings(steps, float(data["waited"]), variants)
        return None if found.disturbed or not steps else found
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep(key: str, timings: Timings) -> None:
    """Keep them for later builds. Raises OSError."""
    file = _cache_file(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    steps = [(t.tokens, t.threads, t.seconds) for t in timings.steps]
    variants = [(t.product, t.rows, asdict(t.variant), t.seconds) for t in timings.variants]
    data = {"steps": steps, "variants": variants, "waited": timings.waited}
    temporary.write_text(json.dumps(data))
    temporary.replace(file)
