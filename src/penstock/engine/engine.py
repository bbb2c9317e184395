"""The loop: schedule → batch → forward → sample → apply."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from penstock.cache import PinnablePool, Pins, PrefixTree, SwapSpace
from penstock.config import EngineConfig
from penstock.engine.adapting import take_adapter
from penstock.engine.appender import Appender
from penstock.engine.batch import Batch, Batcher
from penstock.engine.beams import Beams, sampling_of
from penstock.engine.computing import Computing, overlaps
from penstock.engine.counters import TokenCounts, stats_of
from penstock.engine.ending import Ending
from penstock.engine.guidance import add_shadow, follow
from penstock.engine.intake import Intake, Start
from penstock.engine.lockstep import together
from penstock.engine.mover import Mover
from penstock.engine.options import RequestOptions, check_time
from penstock.engine.outputs import PreemptionRecord, RequestOutput
from penstock.engine.plan import Part, Plan
from penstock.engine.pooling import Pooler, PoolingParams, checked, pooling_request
from penstock.engine.preemption import CostPredictor, Preemption
from penstock.engine.refusals import check_options, check_prediction
from penstock.engine.remembering import Remembering
from penstock.engine.request import Request, Sequence, Status
from penstock.engine.scheduler import Scheduler
from penstock.engine.speculation import Speculation
from penstock.engine.states import states_of
from penstock.errors import InvalidSamplingError, RequestError
from penstock.hardware import detect
from penstock.roofline import CostModel, Ledger, kept_peaks_on, nvtx
from penstock.runtime import Runtime, plan_swap
from penstock.runtime.device import is_fatal
from penstock.sampling import (
    BeamSearchParams,
    Sampled,
    Sampler,
    SamplingParams,
)

logger = logging.getLogger("penstock")


class Engine:
    """Requests in, outputs out, one step at a time. Not thread-safe: one thread steps it."""

    def __init__(
        self,
        config: EngineConfig,
        runtime: Runtime,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds that never go back, of arrivals, tokens and waiting."""
        config = self.config = runtime.settle(config)
        self.runtime = runtime
        self.vocab_size = runtime.vocab_size
        self.max_model_len = runtime.model.max_model_len
        self.pool = PinnablePool(runtime.num_blocks)
        block_size = runtime.layout.block_size
        caching = config.cache.enable_prefix_caching
        self.tree = PrefixTree(self.pool, block_size) if caching else None
        self.pins = Pins(self.pool, block_size) if caching else None
        self.remembering: Remembering | None = None
        if runtime.disk is not None and self.tree is not None:
            self.remembering = Remembering(runtime.disk, self.tree, self.pool, block_size)
        self.clock = clock
        model = runtime.model
        costs = CostModel(
            model.spec.decoder, model.model.formats, runtime.whole_layout, model.dtype
        )
        self.ledger = Ledger(costs, kept_peaks_on(runtime.device))
        limits, layout = config.scheduler, runtime.layout
        # committed as it is first used, where it isn't a GPU's
        promised = 0 if runtime.device.type == "cuda" else runtime.cache_bytes
        spare_bytes = max(detect().available_bytes - promised, 0)
        self.swap_space = SwapSpace(plan_swap(layout, limits, spare_bytes, runtime.layouts[1:]))
        block_bytes = sum(one.bytes_per_block for one in runtime.layouts)
        self.preemption = Preemption(
            limits,
            CostPredictor(self.ledger, block_bytes, limits.max_num_batched_tokens),
        )
        self.scheduler = Scheduler(
            limits,
            self.pool,
            self.tree,
            block_size,
            self.max_model_len,
            self.swap_space,
            self.preemption,
            clock,
            runtime.horizon,
            states_of(runtime.layout, limits.max_num_seqs, self.tree, self.pins),
        )
        runtime.runner.claim(self, self.pool.count)  # late: a configuration may be refused before
        self.speculation = Speculation.of(config, runtime, self.scheduler)
        self.batcher = Batcher(
            self.scheduler.table,
            block_size,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            0 if runtime.sight is None else runtime.sight.spare,
            self.scheduler.states,
        )
        self.pooler: Pooler | None = None
        self.requests: dict[str, Request] = {}
        self.intake = Intake(model, runtime.tokenizer, runtime.vocab_map, runtime.sight)
        self._ending = Ending(
            self.requests, runtime, self.scheduler, self.intake, clock, self._forget
        )
        self.mover = Mover(runtime.runner, self.scheduler, self._ending.fail)
        self.token_counts = TokenCounts()
        self.appender = Appender(
            self.intake, self.token_counts, self._ending.finish, limits.enable_jump_forward
        )
        if config.model.nvtx:
            nvtx.enable()
        self.computing = Computing(
            runtime.runner,
            self.scheduler,
            self.batcher,
            # interpreted, too, a GPU's steps end as on a GPU
            Sampler(self.vocab_size, gather=runtime.runner.graphs is not None),
            self.appender,
            overlaps=overlaps(config, runtime.runner, self.speculation is not None),
            sight=runtime.sight,
        )
        self._arrivals = 0
        self._seeds = np.random.default_rng(config.model.seed)
        self._ended: list[Request] = []  # outside of a step

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: SamplingParams | BeamSearchParams,
        *,
        prompt: str | None = None,
        stream: bool = False,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> None:
        """Queue a request.

        stream: `step` returns an output for it after every token, not only the last.
        Raises RequestError; nothing is queued then.
        """
        self._check_id(request_id)
        if not isinstance(params, SamplingParams | BeamSearchParams):
            raise InvalidSamplingError(
                f"Sampling parameters must be SamplingParams, not {type(params).__name__}. "
                "SamplingParams.from_kwargs(**arguments) makes them from a dictionary."
            )
        options = options or RequestOptions()
        tokens = self.intake.checked(prompt_token_ids)
        check_options(options, tokens, self.pins, self.runtime.disk)
        check_prediction(options, params, self.config.speculative)
        count = params.beam_width if isinstance(params, BeamSearchParams) else params.n
        self.scheduler.check(count, options)  # before a sequence is made for each
        if params.stop_strings and self.runtime.tokenizer is None:
            raise RequestError("Stop strings need a tokenizer, but skip_tokenizer_init is set.")
        start = self._start(request_id, arrival_time, stream, options)
        if isinstance(params, BeamSearchParams):
            entering = [self._search(start, prompt, tokens, params)]
        else:
            entering = self._samples(start, prompt, tokens, params)
        take_adapter(self.runtime, entering)
        for request in entering:
            self.scheduler.add(request)
            self._arrivals += 1
        self.requests[request_id] = entering[0]
        self.ledger.wait(time.perf_counter())

    def _samples(
        self, start: Start, prompt: str | None, tokens: list[int], params: SamplingParams
    ) -> list[Request]:
        """A request for samples, and what guides them. Raises RequestError."""
        seed = params.seed if params.seed is not None else int(self._seeds.integers(1 << 63))
        request = self.intake.request(start, prompt, tokens, params, seed)
        if params.guidance_scale == 1.0:
            return [request]
        negative = self.intake.negative(params, request.prompt_token_ids)
        lengths = [len(request.prompt_token_ids), len(negative)]
        self.scheduler.refusals.check_together(params.n, lengths, params.max_tokens)
        return [request, add_shadow(request, negative, self.intake)]

    def _search(
        self, start: Start, prompt: str | None, tokens: list[int], params: BeamSearchParams
    ) -> Request:
        """A request for the best of a beam search. Raises RequestError."""
        lengths = [len(tokens)] * params.beam_width
        self.scheduler.refusals.check_together(1, lengths, params.max_tokens)
        request = self.intake.request(start, prompt, tokens, sampling_of(params), 0)
        Beams(request, params, self.intake)
        return request

    def add_pooling_request(
        self,
        request_id: str,
        prompt_token_ids: Seq[int],
        params: PoolingParams | None = None,
        *,
        prompt: str | None = None,
        arrival_time: float | None = None,
        options: RequestOptions | None = None,
    ) -> None:
        """Queue a prompt to embed; a step returns a PoolingRequestOutput when it has ended.

        Raises RequestError; nothing is queued then.
        """
        self._check_id(request_id)
        params = checked(params, self.runtime.model.spec.decoder.hidden)
        options = options or RequestOptions()
        tokens = self.intake.checked(prompt_token_ids, generates=False)
        check_options(options, tokens, self.pins, self.runtime.disk, generates=False)
        check_prediction(options, params, self.config.speculative)
        self.scheduler.check(1, options)
        if self.pooler is None:
            self.pooler = Pooler(self, self._prompt_computed, self._ending)
        start = self._start(request_id, arrival_time, False, options)
        request = pooling_request(start, prompt, tokens, params)
        request.seen = self.intake.seen(tokens, options)
        request.sequences = [self.intake.sequence(request, 0, 0)]
        take_adapter(self.runtime, [request])
        self.scheduler.add(request)
        self._arrivals += 1
        self.requests[request_id] = request
        self.ledger.wait(time.perf_counter())

    def _start(
        self, request_id: str, arrival_time: float | None, stream: bool, options: RequestOptions
    ) -> Start:
        """What a request begins with. Raises RequestError for an arrival that is no time."""
        if arrival_time is None:
            arrival_time = self.clock()
        check_time("arrival_time", arrival_time)
        return Start(request_id, self._arrivals, arrival_time, stream, options)

    def _check_id(self, request_id: str) -> None:
        if request_id in self.requests or any(r.request_id == request_id for r in self._ended):
            raise RequestError(f"Request id {request_id!r} is already in use.")

    def abort(self, request_id: str, *, report: bool = True) -> None:
        """End a request now and free what it holds; unknown ids are ignored (it has ended).

        report: the next `step` returns its last output.
        """
        request = self.requests.get(request_id)
        if request is not None:
            self._ending.end(request, "abort")
            if not self.requests:
                self.ledger.rest()
            if report:
                self._ended.append(request)

    def _forget(self, sequence: Sequence) -> None:
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self.batcher.forget()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` still has something to do or to return."""
        return bool(self.requests or self._ended)

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    def step(self) -> list[RequestOutput]:
        """Advance every scheduled sequence; outputs of streaming and of ended requests."""
        self.runtime.runner.check(self)
        self.appender.detokenize_s = 0.0
        marks = [time.perf_counter()]
        touched: dict[str, Request] = {}
        landed = self._land(touched, marks)
        if landed is not None:
            return self._hand_out(Plan(landed[0]), landed[1], touched, marks)
        if self.speculation is not None:
            self.speculation.propose()
        if self.remembering is not None and self.scheduler.admits:
            scheduler, most = self.scheduler, self.config.scheduler.max_num_batched_tokens
            spare = len(scheduler.running) + 1
            self.remembering.fetch(scheduler.waiting, scheduler.rows.num_free, most, spare)
        with nvtx.span("schedule"):
            plan = self.scheduler.schedule()
        if self.speculation is not None:
            self.speculation.part(plan)
        marks.append(time.perf_counter())
        if plan.moves_blocks:
            self.mover.move(plan, touched)
        if self.pooler is not None:  # after the copies, whose sources it may be given
            marks = self.pooler.run(plan, touched, marks)
        batch = self._run(plan, touched, marks) if plan.parts else None
        if self.speculation is not None:
            self.speculation.settle()
        return self._hand_out(plan, batch, touched, marks)

    def _land(
        self, touched: dict[str, Request], marks: list[float]
    ) -> tuple[list[Part], Batch] | None:
        """Apply the step that was begun before; None where none was, or it raised."""
        try:
            landed = self.computing.land(marks)
        except Exception as error:  # nothing was applied: the step is planned again
            if is_fatal(error):
                raise
            logger.warning("A step that was begun ahead raised: %r", error)
            self.computing.forget()
            del marks[1:]
            return None
        if landed is None:
            return None
        parts, batch, sampled = landed
        self._apply(parts, batch, sampled, touched)
        return parts, batch

    def _hand_out(
        self, plan: Plan, batch: Batch | None, touched: dict[str, Request], marks: list[float]
    ) -> list[RequestOutput]:
        """What a step ends with."""
        ended, self._ended = self._ended, []
        touched |= {r.request_id: r for r in ended}
        outputs = [r.output() for r in touched.values() if r.stream or r.finished]
        self._record(plan, batch, marks)
        return outputs

    def _record(self, plan: Plan, batch: Batch | None, marks: list[float]) -> None:
        """Enter the step in the ledger, unless there was nothing to do or it raised."""
        now = time.perf_counter()
        generated = self.token_counts.take_generated()
        if batch is not None:
            draft_s = 0.0 if self.speculation is None else self.speculation.draft_s
            batch.size.experts = self.runtime.runner.experts_used
            record = self.ledger.record(
                batch.size, (*marks, now), self.appender.detokenize_s, draft_s, generated
            )
            if self.speculation is not None:
                self.speculation.saw_step(record)
            for request in {sequence.owner for sequence, _ in plan.parts}:
                request.metrics.take_part(record)
            self.preemption.saw_step(record, plan.parts)
        self.ledger.rest()
        if self.requests:
            self.ledger.wait(now)

    def _run(self, plan: Plan, touched: dict[str, Request], marks: list[float]) -> Batch | None:
        """Compute and apply; where that raises, each sequence alone: only the culprit fails.

        What a failed attempt has written to the cache is written again, to the same bytes. The
        plan's copies were made before and aren't repeated: others may have written to them since.
        Returns the batch, or None where it raised.
        """
        try:
            batch, sampled = self.computing.run(plan, marks)
        except Exception as error:  # whatever a model, a kernel or the sampler raises
            if is_fatal(error):
                raise
            self.computing.forget()
            groups = together(plan.parts)
            if len(groups) == 1:
                failed = self._ending.fail(plan.parts[0][0].request, error)
                touched[failed.request_id] = failed
                return None
            logger.warning("A step of %d sequences raised: %r", len(plan.parts), error)
            for group in groups:
                if group[0][0].status is Status.RUNNING:  # its request hasn't failed already
                    self._run(Plan(group), touched, [])
            return None
        self._apply(plan.parts, batch, sampled, touched)
        return batch

    def _apply(
        self,
        parts: list[Part],
        batch: Batch,
        sampled: Sampled,
        touched: dict[str, Request],
    ) -> None:
        """Give each sequence its token, and end what ends with it."""
        now = self.clock()
        firsts: list[int] = []  # for whoever guesses by what was computed
        if self.speculation is not None:
            firsts = [sequence.num_computed for sequence, _ in parts]
        for sequence, count in parts:
            self._computed(sequence, count - len(sequence.states) + 1)
            if sequence.num_computed <= sequence.num_prompt:
                self._prompt_computed(sequence, count)
        for sequence in batch.sampled:
            if sequence.status is Status.FORKING:
                self.scheduler.forks.fork(sequence.request.sequences[0])
        for beams in batch.searches:
            touched[beams.request.request_id] = beams.request
            if beams.request.error is None:
                self._search_on(beams, now)
        for sequence, rows in zip(batch.drawn, batch.rows, strict=True):
            touched[sequence.request.request_id] = sequence.request
            if sequence.status is not Status.RUNNING:
                continue  # another sample of its request failed in this step
            try:
                self._append(sequence, rows, sampled, now)
            except Exception as error:  # its own fault, whatever it is: the others go on
                self._ending.fail(sequence.request, error)
        if self.speculation is not None:
            self.speculation.computed(parts, firsts)

    def _computed(self, sequence: Sequence, count: int) -> None:
        if self.scheduler.computed(sequence, count):
            self.batcher.forget()

    def _append(self, sequence: Sequence, rows: range, sampled: Sampled, now: float) -> None:
        """Give a sequence the tokens of its rows, as long as they were guessed right before.

        Raises RequestError where the sampler found none.
        """
        way = [rows.start]
        if sequence.draft is not None:
            assert self.speculation is not None  # whose draft it is
            drawn = sampled.token_ids[rows.start : rows.stop]
            way += [rows.start + 1 + at for at in self.speculation.right(sequence, drawn)]
        if len(way) > 1 and not sampled.errors:
            tokens = [sampled.token_ids[row] for row in way]
            if self.appender.append_all(sequence, tokens, now):
                self._computed(sequence, len(way) - 1)
                return
        for row in way:
            if row in sampled.errors:
                raise self.intake.failure(sequence, sampled.errors[row])
            token, logprobs = sampled.token_ids[row], sampled.logprobs[row]
            self.appender.append(sequence, token, logprobs, now, jump=row == way[-1])
            if sequence.finish_reason is not None:
                return
            if row < way[-1]:  # the step has computed it, too
                self._computed(sequence, 1)
        follow(sequence)

    def _search_on(self, beams: Beams, now: float) -> None:
        """Let a request's beams go on, or end with them."""
        request = beams.request
        request.metrics.token_times.append(now)
        try:
            self.token_counts.generated += beams.advance(self.scheduler.forks)
        except Exception as error:  # its own fault, whatever it is: the others go on
            self._ending.fail(request, error)
        else:
            self.batcher.forget()  # sequences have taken others' blocks
            if beams.is_done:
                self._ending.end(request, "stop")

    def _prompt_computed(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens of a prompt are in the cache."""
        request = sequence.request
        if sequence.num_output or request.guides is not None:  # computed again, or for another
            return
        request.metrics.computed_tokens += count
        self.token_counts.prompt_computed(sequence)
        if self.pins is not None and not sequence.remaining:
            wanted = [(pin.tokens, pin.ttl_s) for pin in request.options.pins]
            self.pins.renew(sequence.nodes, wanted)

    @property
    def sampler(self) -> Sampler:
        """What chooses tokens."""
        return self.computing.sampler

    @sampler.setter
    def sampler(self, other: Sampler) -> None:
        self.computing.sampler = other

    # ── state ────────────────────────────────────────────────────────────────────────────────

    def stats(self) -> dict[str, Any]:
        """Counters of the engine as it stands."""
        return stats_of(self)

    @property
    def preemption_log(self) -> deque[PreemptionRecord]:
        """The last preemptions that are over: what each was predicted to cost, and did."""
        return self.preemption.log

    def reset_prefix_cache(self) -> None:
        """Forget what is cached and not in use, pinned or not."""
        if self.pins is not None:
            self.pins.clear()
        self.pool.forget()
        if self.scheduler.states is not None:
            self.scheduler.states.forget()
