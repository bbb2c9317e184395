"""The same requests plain and with drafts, in turns on one loaded model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

from penstock.bench.meter import Meter
from penstock.bench.speculate.expected import DraftLog
from penstock.bench.speculate.passes import Like, Passes
from penstock.bench.speculate.planted import Planted, PlantedProposer
from penstock.bench.speculate.replayed import ReplayingSampler
from penstock.bench.speculate.whiteboard import Verified, Whiteboard
from penstock.bench.workload import raise_errors
from penstock.config import EngineConfig
from penstock.engine import RequestOptions
from penstock.engine.proposers import proposer_of
from penstock.engine.speculation import Speculation
from penstock.roofline import StepRecord
from penstock.runtime import Runtime
from penstock.sampling import SamplingParams
from penstock.speculate import Controller, Proposer

Show = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and all of it."""

WARM_UP: Final = -1
"""The round before the first."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    said: list[int] | None = None  # to it, where that is known
    expected: list[int] | None = None  # by whoever asks, which is what drafts are made by

    @property
    def options(self) -> RequestOptions:
        """Of the request, where drafts are made."""
        return RequestOptions(prediction=None if self.expected is None else tuple(self.expected))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine."""

    record: StepRecord
    generated: int  # tokens
    seconds: float  # since the step before it ended

    @property
    def is_decode(self) -> bool:
        """Whether it computed no prompt."""
        return not self.record.size.is_prefill


@dataclass(slots=True)
class Round:
    """All requests, once plain and once with drafts."""

    plain: list[Step] = field(default_factory=list)
    drafted: list[Step] = field(default_factory=list)
    passes: Passes = field(default_factory=Passes)  # of as many rows as steps had

    @property
    def gain(self) -> float:
        """Tokens a second with drafts ÷ without, while decoding."""
        return tokens_per_s(self.drafted) / tokens_per_s(self.plain)

    @property
    def whole_gain(self) -> float:
        """The same of whole requests, with their prompts."""
        return tokens_per_s(self.drafted, whole=True) / tokens_per_s(self.plain, whole=True)


def tokens_per_s(steps: Sequence[Step], *, whole: bool = False) -> float:
    """Of the steps that decode, or of all."""
    counted = [one for one in steps if whole or one.is_decode]
    return sum(one.generated for one in counted) / sum(one.seconds for one in counted)


@dataclass(slots=True)
class Runs:
    """What one workload's rounds have shown."""

    name: str
    requests: int
    batch: int
    speculation: Speculation
    log: DraftLog
    rounds: list[Round]
    differing: list[int]  # requests whose outputs aren't equal, from 1
    given: int = 0  # requests whose outputs were known beforehand
    shown: Verified | None = None  # a draft of the round without figures


def in_waves(
    prompts: Sequence[list[int]],
    batch: int,
    max_tokens: int,
    temperature: float,
    seed: int,
    outputs: Sequence[list[int] | None] = (),
    predictions: Sequence[list[int] | None] = (),
) -> list[list[Job]]:
    """Requests that run together; the first come again where the last wave isn't full.

    outputs: what is said to each prompt, where that is known; predictions: what is expected.
    """
    jobs = []
    for i in range(-(-len(prompts) // batch) * batch):
        said = outputs[i % len(prompts)] if outputs else None
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens if said is None else min(max_tokens, len(said)),
            seed=seed + i,
            detokenize=False,
        )
        expected = predictions[i % len(prompts)] if predictions else None
        jobs.append(Job(prompts[i % len(prompts)], params, said, expected))
    return [jobs[at : at + batch] for at in range(0, len(jobs), batch)]


def measure_runs(
    name: str,
    config: EngineConfig,
    runtime: Runtime,
    waves: Sequence[Sequence[Job]],
    rounds: int,
    planted: Planted | None,
    show: Show,
) -> Runs:
    """Run all waves `rounds` times on two engines; who goes first alternates.

    A round without figures comes before: it says what is known to who plants guesses. What a
    proposer has learned is forgotten with each round, which would bring it the same texts again;
    what the controller has, is kept.
    """
    known = {job.params.seed: job.said for wave in waves for job in wave if job.said is not None}
    if planted is not None or known:  # in turn, as where drafts are asked for
        config = replace(config, scheduler=replace(config.scheduler, async_scheduling=False))
    plain = _meter(replace(config, speculative=None), runtime, known)
    expected: list[list[int]] = []
    first = Round()
    for i, wave in enumerate(waves):
        show(f"{name}, plain", i, len(waves))
        expected += _run(plain, wave, first.plain)
    if planted is None:
        drafted = _meter(config, runtime, known)
    else:
        drafted = _meter(replace(config, speculative=None), runtime, known)
        drafted.engine.speculation = _planted(drafted, planted)
    speculation = drafted.engine.speculation
    assert speculation is not None
    proposer = _proposers(drafted, planted, waves, expected, _median_s(first.plain))
    found = Runs(name, sum(map(len, waves)), len(waves[0]), speculation, DraftLog(), [], [])
    speculation.proposer = proposer(WARM_UP)
    found.given = len(known)
    board = Whiteboard()
    speculation.on_verified = lambda s, draft, right, drawn: board.see(
        s.tokens, draft, right, drawn
    )
    found.differing += _unequal(_run(drafted, waves[0], first.drafted), expected, 0)
    speculation.on_verified, found.shown = None, board.best
    speculation.counts = found.log
    for number in range(rounds):
        speculation.proposer = proposer(number)
        found.rounds.append(Round())
        show(f"{name}, in turns", number, rounds)
        found.differing += _take_turns(plain, drafted, waves, number, found.rounds[-1], expected)
    found.differing = sorted(set(found.differing))
    return found


def _meter(config: EngineConfig, runtime: Runtime, known: dict[int | None, list[int]]) -> Meter:
    """An engine that says what is known of a request, by its seed."""
    meter = Meter(config, runtime)
    if known:
        gather = runtime.runner.graphs is not None
        said = {seed: tokens for seed, tokens in known.items() if seed is not None}
        meter.engine.sampler = ReplayingSampler(runtime.vocab_size, gather, said)
    return meter


def _take_turns(
    plain: Meter,
    drafted: Meter,
    waves: Sequence[Sequence[Job]],
    number: int,
    into: Round,
    expected: Sequence[list[int]],
) -> list[int]:
    """One round; returns the requests whose outputs differ from `expected`."""
    differing = []
    for i, wave in enumerate(waves):
        seen = len(into.drafted)
        order = [(plain, into.plain), (drafted, into.drafted)]
        for meter, steps in order if (number + i) % 2 else order[::-1]:
            differing += _unequal(_run(meter, wave, steps), expected, i * len(wave))
        _time_passes(plain, wave, into.drafted[seen:], into.passes)
    return differing


def _time_passes(meter: Meter, wave: Sequence[Job], steps: Sequence[Step], into: Passes) -> None:
    """Passes of as many rows as a wave's steps had, once it has ended."""
    sizes = [s.record.size for s in steps if s.is_decode]
    full = [size for size in sizes if len(size.queries) == len(wave)]
    if full:
        context = statistics.median_high(size.contexts[0] for size in full)
        counts = [size.tokens for size in full]
        like = Like(len(wave), wave[0].prompt, context, wave[0].params)
        into.time(meter.runtime, meter.engine.ledger.costs, counts, like)


def _unequal(came: Sequence[list[int]], expected: Sequence[list[int]], at: int) -> list[int]:
    return [at + i + 1 for i, tokens in enumerate(came) if tokens != expected[at + i]]


def _run(meter: Meter, wave: Sequence[Job], steps: list[Step]) -> list[list[int]]:
    """The outputs of a wave in its order; its steps go into `steps`."""
    engine = meter.engine
    engine.runtime.runner.claim(engine, engine.pool.count)
    meter.take()
    outputs: dict[int, list[int]] = {}
    last = time.perf_counter()
    for i, job in enumerate(wave):
        options = job.options if engine.config.speculative is not None else None
        engine.add_request(str(i), job.prompt, job.params, options=options)
    while engine.has_unfinished:
        before = engine.token_counts.generated
        done = meter.step()
        now = time.perf_counter()
        raise_errors(done)
        outputs |= {int(one.request_id): list(one.outputs[0].token_ids) for one in done}
        generated = engine.token_counts.generated - before
        steps += [Step(record, generated, now - last) for record in meter.take()]
        last = now
    return [outputs[i] for i in range(len(wave))]


# ── who guesses ──────────────────────────────────────────────────────────────────────────────────


def _planted(meter: Meter, planted: Planted) -> Speculation:
    most, runner = planted.num_speculative_tokens, meter.runtime.runner
    controller = Controller(most, adaptive=planted.adaptive, by_passes=planted.cost > 0.0)
    if runner.recent is not None:
        runner.recent.unsure = most
    nobody = PlantedProposer([], 0.0, [], 0)  # until the first round
    return Speculation(nobody, controller, meter.engine.scheduler)


def _proposers(
    meter: Meter,
    planted: Planted | None,
    waves: Sequence[Sequence[Job]],
    expected: Sequence[list[int]],
    plain_s: float,
) -> Callable[[int], Proposer]:
    """A round's proposer, which knows nothing of the other rounds."""
    engine, runtime = meter.engine, meter.runtime
    if planted is None:
        return lambda number: proposer_of(engine.config, runtime)
    jobs = [job for wave in waves for job in wave]
    known = [job.prompt + tokens for job, tokens in zip(jobs, expected, strict=True)]
    kept = runtime.vocab_map
    ids: Sequence[int] = range(runtime.vocab_size) if kept is None else kept.kept.tolist()
    seeds, rate, each_s = Random(0), planted.rate, planted.cost * plain_s
    return lambda number: PlantedProposer(known, rate, ids, seeds.random(), each_s)


def _median_s(steps: Sequence[Step]) -> float:
    return statistics.median([one.record.seconds for one in steps if one.is_decode] or [0.0])
