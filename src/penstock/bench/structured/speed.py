"""What masks cost a step, and what tokens spare that take none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.bench.meter import Meter
from penstock.bench.structured.compiling import Show, spread
from penstock.bench.structured.runs import Job, jobs_of, pick
from penstock.bench.structured.schemas import Schema
from penstock.config import EngineConfig
from penstock.engine import RequestOutput
from penstock.errors import ConfigError, InvalidSamplingError
from penstock.roofline import StepRecord
from penstock.runtime import Runtime
from penstock.sampling import SamplingParams
from penstock.sampling.masks import MaskTimes

WAVES: Final = 3
"""Requests for each place in the batch: those that end are followed by others."""

PARTS: Final = ("schedule", "batch", "forward", "sample", "detokenize", "output")


@dataclass(frozen=True, slots=True)
class Pair:
    """One step held to a form, and the same step free, one right after the other."""

    held: StepRecord
    free: StepRecord
    held_cpu_s: float  # of all threads
    free_cpu_s: float
    masks: tuple[MaskTimes, ...]  # of the one that is held


@dataclass(slots=True)
class Overhead:
    """Steps that decode a full batch, held to a form and free, in turns."""

    batch_size: int
    rounds: list[list[Pair]] = field(default_factory=list)

    @property
    def pairs(self) -> list[Pair]:
        return [pair for one in self.rounds for pair in one]

    @property
    def masks(self) -> list[MaskTimes]:
        """Of these steps, not of those beside them that aren't full."""
        return [one for pair in self.pairs for one in pair.masks]

    @property
    def held_s(self) -> float:
        """The median step."""
        return statistics.median(pair.held.seconds for pair in self.pairs)

    @property
    def free_s(self) -> float:
        return statistics.median(pair.free.seconds for pair in self.pairs)

    @property
    def share(self) -> float:
        """What a step takes more when held: the median difference of a pair ÷ a free step."""
        return _share(self.pairs)

    @property
    def shares(self) -> list[float]:
        """The same, round by round."""
        return [_share(one) for one in self.rounds]

    @property
    def share_of_sums(self) -> float:
        """What all steps together take more, the slow ones too."""
        held = sum(pair.held.seconds for pair in self.pairs)
        return held / sum(pair.free.seconds for pair in self.pairs) - 1.0

    @property
    def share_of_fastest(self) -> float:
        """The same of the fastest tenth of each, which other programs have disturbed least."""
        held = np.percentile([pair.held.seconds for pair in self.pairs], 10)
        free = np.percentile([pair.free.seconds for pair in self.pairs], 10)
        return float(held / free) - 1.0

    @property
    def share_of_cpu(self) -> float:
        """The same of processor time, of all threads: what it costs where no core is idle."""
        held = statistics.median(pair.held_cpu_s for pair in self.pairs)
        return held / statistics.median(pair.free_cpu_s for pair in self.pairs) - 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
        fills = [s * 1e3 for one in self.masks for s in one.fill_s]
        waits = [one.wait_s * 1e3 for one in self.masks]
        return {
            "batch_size": self.batch_size,
            "rounds": len(self.rounds),
            "steps": [len(one) for one in self.rounds],
            "held_step_ms": self.held_s * 1e3,
            "free_step_ms": self.free_s * 1e3,
            "overhead": self.share,
            "overhead_by_round": self.shares,
            "overhead_of_sums": self.share_of_sums,
            "overhead_of_fastest": self.share_of_fastest,
            "overhead_of_cpu": self.share_of_cpu,
            "free_cpu_ms": 1e3 * statistics.median(pair.free_cpu_s for pair in self.pairs),
            "held_parts_ms": _parts([pair.held for pair in self.pairs]),
            "free_parts_ms": _parts([pair.free for pair in self.pairs]),
            "more_by_part_ms": self.more_by_part_ms,
            "mask_ms": spread(fills),
            "wait_ms": spread(waits),
            "waited_share": sum(waits) / 1e3 / sum(pair.held.seconds for pair in self.pairs),
            "apply_ms": spread([one.apply_s * 1e3 for one in self.masks]),
        }

    @property
    def more_by_part_ms(self) -> dict[str, float]:
        """The median difference of each part of a step."""
        return {
            part: 1e3
            * statistics.median(
                getattr(pair.held, f"{part}_s") - getattr(pair.free, f"{part}_s")
                for pair in self.pairs
            )
            for part in PARTS
        }


def _share(pairs: Sequence[Pair]) -> float:
    more = statistics.median(pair.held.seconds - pair.free.seconds for pair in pairs)
    return more / statistics.median(pair.free.seconds for pair in pairs)


def _parts(records: Sequence[StepRecord]) -> dict[str, float]:
    """Median milliseconds of each part of a step."""
    return {
        part: 1e3 * statistics.median(getattr(record, f"{part}_s") for record in records)
        for part in PARTS
    }


def run_overhead(
    config: EngineConfig,
    runtimes: tuple[Runtime, Runtime],
    schemas: Sequence[Schema],
    max_tokens: int,
    seed: int,
    rounds: int,
    prompt: Sequence[int],
    show: Show,
) -> Overhead:
    """Time the same steps with masks and without; `config` without jumps, so that they match.

    Two engines take turns, a step each, so that what else the machine does meets both. Free
    requests are as long as the held ones came out. Raises ConfigError where no step had the whole
    batch.
    """
    held, free = (Meter(config, runtime) for runtime in runtimes)
    size = config.scheduler.max_num_seqs
    jobs = jobs_of(pick(schemas, WAVES * size), max_tokens, seed)
    _prepare(held, jobs)
    params = [job.params for job in jobs]
    lengths = [len(one.outputs[0].token_ids) for one in _run(held, params, prompt)[1]]
    like = [_free(job, length) for job, length in zip(jobs, lengths, strict=True)]
    found = Overhead(size)
    for i in range(rounds):
        show("timing masks", i, rounds)
        pairs = _in_turns((held, params), (free, like), prompt)
        found.rounds.append([pair for pair in pairs if _is_full(pair, size)])
    if not all(found.rounds):
        raise ConfigError(
            f"Outputs ended before {size} of them decoded together, so nothing was timed. Lower "
            "--max-num-seqs, or give schemas with longer values."
        )
    return found


def _in_turns(
    held: tuple[Meter, Sequence[SamplingParams]],
    free: tuple[Meter, Sequence[SamplingParams]],
    prompt: Sequence[int],
) -> list[Pair]:
    """Step both to their ends; who goes first alternates."""
    for meter, params in (held, free):
        meter.take()
        for i, one in enumerate(params):
            meter.engine.add_request(str(i), prompt, one)
    held_cpu: list[float] = []
    free_cpu: list[float] = []
    masks: list[tuple[MaskTimes, ...]] = []  # of each step that is held
    taken: list[MaskTimes] = []
    held[0].engine.sampler.masks.watch = taken.append
    order = [(held[0], held_cpu), (free[0], free_cpu)]
    while any(meter.engine.has_unfinished for meter, _ in order):
        for meter, spent in order:
            if meter.engine.has_unfinished:
                start = time.process_time()
                meter.step()
                spent.append(time.process_time() - start)
                if meter is held[0]:
                    masks.append(tuple(taken))
                    taken.clear()
        order.reverse()
    steps = zip(held[0].take(), free[0].take(), held_cpu, free_cpu, masks, strict=False)
    return [Pair(*one) for one in steps]


def _is_full(pair: Pair, size: int) -> bool:
    """Whether all places decode one token, in both."""
    steps = (pair.held.size, pair.free.size)
    return all(len(one.contexts) == size and not one.is_prefill for one in steps)


def _free(job: Job, length: int) -> SamplingParams:
    """The same request without a form, and as long."""
    return SamplingParams(
        temperature=1.0, max_tokens=max(length, 1), seed=job.params.seed, ignore_eos=True
    )


def _prepare(meter: Meter, jobs: Sequence[Job]) -> list[Job]:
    """Compile before the clock starts; those that can be followed, in this form too."""
    found = []
    for job in jobs:
        assert job.params.structure is not None  # of all that are made here
        try:
            meter.engine.intake.compile(job.params.structure)
        except InvalidSamplingError:  # compact, it isn't what was compiled
            continue
        found.append(job)
    return found


def _run(
    meter: Meter, params: Sequence[SamplingParams], prompt: Sequence[int]
) -> tuple[list[StepRecord], list[RequestOutput]]:
    """Every step, and the outputs in the order of the requests."""
    meter.take()
    for i, one in enumerate(params):
        meter.engine.add_request(str(i), prompt, one)
    outputs: dict[int, RequestOutput] = {}
    while meter.engine.has_unfinished:
        done = meter.step()
        outputs |= {int(output.request_id): output for output in done}
    return meter.take(), [outputs[i] for i in range(len(params))]


@dataclass(slots=True)
class JumpRound:
    """One run of the workload."""

    seconds: float
    steps: int
    tokens: int
    jumped: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class Jumps:
    """The same workload with and without jumps, in turns."""

    compact: bool  # no whitespace but what json.dumps writes
    on: list[JumpRound] = field(default_factory=list)
    off: list[JumpRound] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)  # schemas whose outputs aren't equal

    @property
    def gain(self) -> float:
        """Tokens a second with jumps ÷ without, the median over rounds."""
        pairs = zip(self.on, self.off, strict=True)
        return statistics.median(on.tokens_per_s / off.tokens_per_s for on, off in pairs)

    @property
    def jumped_share(self) -> float:
        return self.on[0].jumped / self.on[0].tokens

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "whitespace": "compact" if self.compact else "any",
            "rounds": len(self.on),
            "tokens": self.on[0].tokens,
            "jumped": self.on[0].jumped,
            "jumped_share": self.jumped_share,
            "steps": {"on": self.on[0].steps, "off": self.off[0].steps},
            "tokens_per_s": {
                name: statistics.median(one.tokens_per_s for one in rounds)
                for name, rounds in (("on", self.on), ("off", self.off))
            },
            "gain": self.gain,
            "outputs_equal": not self.differing,
            "differing": self.differing,
        }


def run_jumps(
    configs: tuple[EngineConfig, EngineConfig],
    runtime: Runtime,
    schemas: Sequence[Schema],
    max_tokens: int,
    seed: int,
    rounds: int,
    prompt: Sequence[int],
    show: Show,
    *,
    compact: bool,
) -> Jumps:
    """configs: with jumps, and without."""
    size = configs[0].scheduler.max_num_seqs
    jobs = jobs_of(pick(schemas, WAVES * size), max_tokens, seed, compact=compact)
    jobs = _prepare(Meter(configs[0], runtime), jobs)
    if not jobs:
        raise ConfigError("None of the schemas can be followed without whitespace.")
    found = Jumps(compact)
    expected: list[list[int]] = []
    for i in range(rounds):
        for config, kept in zip(configs, (found.on, found.off), strict=True):
            show("timing jumps", i, rounds)
            one, tokens = _jump_round(Meter(config, runtime), jobs, prompt)
            kept.append(one)
            expected = expected or tokens
            found.differing += [
                job.name for job, a, b in zip(jobs, expected, tokens, strict=True) if a != b
            ]
    return found


def _jump_round(
    meter: Meter, jobs: Sequence[Job], prompt: Sequence[int]
) -> tuple[JumpRound, list[list[int]]]:
    _prepare(meter, jobs)
    start = time.perf_counter()
    records, outputs = _run(meter, [job.params for job in jobs], prompt)
    seconds = time.perf_counter() - start
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    total, jumped = sum(map(len, tokens)), meter.engine.stats()["jumped_tokens"]
    return JumpRound(seconds, len(records), total, jumped), tokens
