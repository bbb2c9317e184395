"""Batch → forward → sample; on a GPU the step after one is begun before the first has ended.

Sequences that decode need nothing of their next token but itself, and that lies on the GPU as soon
as it is chosen. So the step that follows is laid out while the GPU still runs, takes its tokens
from there, and the GPU finds work waiting when it is done; the CPU appends, detokenizes and
answers meanwhile. A sequence that turns out to have ended was computed for nothing: its row of the
step that follows is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.cache import any_part
from penstock.config import EngineConfig
from penstock.engine.appender import Appender
from penstock.engine.batch import Batch, Batcher
from penstock.engine.guidance import guided
from penstock.engine.pictures import seeing
from penstock.engine.plan import Part, Plan
from penstock.engine.request import Sequence, Status
from penstock.engine.scheduler import Scheduler
from penstock.errors import ConfigError
from penstock.roofline import nvtx
from penstock.runtime import Runner
from penstock.runtime.device import is_fatal
from penstock.runtime.vision import Sight
from penstock.sampling import Pending, Sampled, Sampler, SequenceSampling, prompt_logprobs
from penstock.sampling.transfer import upload
from penstock.sampling.warm_up import warm_up

logger = logging.getLogger("penstock")


@dataclass(slots=True)
class _InFlight:
    """A step that was begun, and what it will have chosen."""

    batch: Batch
    pending: Pending


def overlaps(config: EngineConfig, runner: Runner, speculates: bool) -> bool:
    """Whether steps are begun before those before them have ended. Raises ConfigError."""
    able = runner.graphs is not None and runner.vocabulary is None and not speculates
    asked = config.scheduler.async_scheduling
    if asked and not able:
        beside = "a speculative_config" if speculates else "a reduced vocabulary"
        raise ConfigError(
            "async_scheduling begins a step while a GPU runs the one before, which can't be "
            f"{'on a CPU' if runner.graphs is None else f'with {beside}'}. Leave it out."
        )
    return able and asked is not False


def _rows_of(batch: Batch, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of what was computed for the step's rows, [S, …] each, that of `batch.sampled`."""
    count = len(batch.sampled)
    if count == len(found[0]) and batch.logit_rows == list(range(count)):
        return found
    at = torch.tensor(batch.logit_rows, dtype=torch.int64)
    return tuple(one.index_select(0, upload(at, one.device)) for one in found)


class Computing:
    """Runs what was planned; changes nothing but the cache and prompts' log-probabilities."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        batcher: Batcher,
        sampler: Sampler,
        appender: Appender,
        overlaps: bool,
        sight: Sight | None = None,
    ) -> None:
        """overlaps: steps are begun before those before them have ended, where they can be."""
        self._runner = runner
        self._scheduler = scheduler
        self._batcher = batcher
        self.sampler = sampler
        self._appender = appender
        self._overlaps = overlaps
        self._sight = sight
        graphs = runner.graphs
        if graphs is not None and graphs.on_gpu:
            graphs.enter()  # a thread's GPU may be another one
            warm_up(sampler.vocab_size, any_part(runner.kv).device)
        self._next: _InFlight | None = None
        self.overlapped = 0  # steps that were begun so

    def run(self, plan: Plan, marks: list[float]) -> tuple[Batch, Sampled]:
        """A plan's step, from its layout to its tokens."""
        with nvtx.span("batch"):
            batch = self._batcher.build(plan.parts)
        marks.append(time.perf_counter())
        rows = [state for sequence in batch.drawn for state in sequence.states]
        self.sampler.prepare(rows)
        if self._only_largest(batch, rows):
            with seeing(self._sight, batch):
                largest = self._runner.largest(batch.step)
            marks.append(time.perf_counter())
            tokens, peaks = _rows_of(batch, largest)
            sampled = self.sampler.of_largest(tokens, peaks)
            marks.append(time.perf_counter())
            return batch, sampled
        with nvtx.span("forward"), seeing(self._sight, batch):
            logits = self._runner.forward(batch.step)
        if self._runner.graphs is None:
            marks.append(time.perf_counter())
        for sequence, first, count in batch.prompt_rows:
            self._read_prompt(sequence, logits[first : first + count])
        (logits,) = _rows_of(batch, (logits,))
        for beams in batch.searches:
            beams.read(batch.sampled, logits)
        if batch.drawn_at is not None:
            logits = guided(batch.sampled, batch.drawn_at, logits)
        if not self._overlaps:
            sampled = self.sampler(logits, rows)
            if self._runner.graphs is not None:  # a GPU has computed and chosen by now
                marks.append(time.perf_counter())
            marks.append(time.perf_counter())
            return batch, sampled
        with nvtx.span("sample"):
            flight = _InFlight(batch, self.sampler.begin(logits, rows))
        return batch, self._land(flight, marks)

    def _only_largest(self, batch: Batch, rows: Seq[SequenceSampling]) -> bool:
        """Whether each row's largest logit is all that this step's logits are wanted for."""
        drawn_alone = not batch.prompt_rows and not batch.searches and batch.drawn_at is None
        drawn_alone = drawn_alone and batch.step.runs is None  # a native call finds the largest
        return drawn_alone and self._runner.finds_largest and self.sampler.takes_largest(rows)

    def land(self, marks: list[float]) -> tuple[list[Part], Batch, Sampled] | None:
        """What the step has chosen that was begun before; None where there is no such.

        Of the sequences that have ended since, nothing is left in it.
        """
        flight, self._next = self._next, None
        if flight is None:
            return None
        alive = [s.status is Status.RUNNING for s in flight.batch.drawn]
        if not any(alive):
            return None
        marks += [time.perf_counter()] * 2  # nothing was planned or laid out
        sampled = self._land(flight, marks)
        batch = flight.batch
        if not all(alive):
            kept = [i for i, lives in enumerate(alive) if lives]
            batch = batch.of([batch.drawn[i] for i in kept])
            sampled = sampled.take(kept)
        return [(sequence, 1) for sequence in batch.drawn], batch, sampled

    def _land(self, flight: _InFlight, marks: list[float]) -> Sampled:
        """Begin with what follows, then wait."""
        with nvtx.span("follow"):
            try:
                self._next = self._follow(flight)
            except Exception as error:  # the step that lands is whole: what follows is planned
                if is_fatal(error):
                    raise
                logger.warning("A step couldn't be begun ahead: %r", error)
                self._next = None
        with nvtx.span("wait"):
            sampled = flight.pending.result()
        marks += [time.perf_counter()] * 2  # choosing is part of what the GPU did
        return sampled

    def forget(self) -> None:
        """Drop what was begun: its sequences are to be computed otherwise."""
        self._next = None

    def _follow(self, flight: _InFlight) -> _InFlight | None:
        """Begin the step after one that decodes, where its tokens are all that isn't known."""
        batch = flight.batch
        if not batch.only_decodes or self._scheduler.admits:
            return None
        drawn = set(batch.drawn)
        if any(sequence not in drawn for sequence in self._scheduler.running):
            return None  # it would stand still for as long as steps are begun ahead
        rows, members = [], []
        for row, sequence in enumerate(batch.drawn):
            if sequence.status is not Status.RUNNING or self._appender.ends_next(sequence):
                continue
            if sequence.sampling.looks_back:
                return None
            rows.append(row)
            members.append(sequence)
        if not members or not all(self._scheduler.has_room(sequence) for sequence in members):
            return None
        following = self._batcher.following(members, rows)
        tokens = flight.pending.device_tokens
        logits = self._runner.follow(following.step, tokens)
        if len(rows) < len(tokens):
            at = torch.tensor(rows, dtype=torch.int64)
            tokens = tokens.index_select(0, upload(at, tokens.device))
        states = [sequence.sampling for sequence in members]
        self.overlapped += 1
        return _InFlight(following, self.sampler.begin(logits, states, given=tokens))

    def _read_prompt(self, sequence: Sequence, logits: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow these rows."""
        request = sequence.request
        assert request.prompt_logprobs is not None  # batch.build checked
        first = sequence.num_computed + 1
        # a recomputed prompt (after preemption) is read again from its start
        del request.prompt_logprobs[first:]
        next_ids: Seq[int] = sequence.tokens[first : min(first + len(logits), sequence.num_prompt)]
        k = request.params.prompt_logprobs
        if next_ids and k is not None:
            ids = torch.tensor(next_ids, device=logits.device)
            found = prompt_logprobs(logits[: len(next_ids)], ids, k)
            for entry in found:
                self._appender.name(entry)
            request.prompt_logprobs += found
