"""The one way from an endpoint to the engine: admit, generate, account for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from penstock.engine import AsyncLLM, PoolingParams, RequestOptions, RequestOutput
from penstock.engine.prompts import default_params
from penstock.errors import ConfigError, InvalidSamplingError, RequestError, RequestTimeoutError
from penstock.roofline import StepRecord
from penstock.runtime.adapters import Adapter
from penstock.sampling import BeamSearchParams, SamplingParams, StructuredOutputs
from penstock.server.admission import Caller, Lanes, Ticket
from penstock.server.answers import accounted, all_unheeded, broken_by
from penstock.server.called import Called
from penstock.server.config import ServerConfig
from penstock.server.conversation import Prompts
from penstock.server.errors import ApiError, as_api_error
from penstock.server.keys import Key
from penstock.server.limits import Gate
from penstock.server.logs import shortened
from penstock.server.merging import merged_of
from penstock.server.metrics import Metrics
from penstock.server.prompt import PromptText
from penstock.server.protocol.common import EngineFields
from penstock.server.protocol.structure import structure_error
from penstock.server.remembered import Remembered
from penstock.server.sse import Receive, unless_gone
from penstock.server.stored import StoredResponses
from penstock.server.tools.plan import Tooling
from penstock.server.tracing import NoTracer, Tracer
from penstock.server.wishes import check_transfer, wishes_of

logger = logging.getLogger("penstock.server")

T = TypeVar("T")
State = Literal["loading", "ready", "draining", "failed"]
KEPT_STEPS = 2048
KEPT_LATENCIES = 256


@dataclass(slots=True)
class Work:
    """One prompt and what is to become of it."""

    prompt: PromptText
    params: SamplingParams | BeamSearchParams
    options: RequestOptions = field(default_factory=RequestOptions)

    @property
    def samples(self) -> int:
        """Sequences that are generated."""
        params = self.params
        return params.n if isinstance(params, SamplingParams) else params.beam_width


@dataclass(slots=True)
class Recent:
    """What happened lately, for the page."""

    steps: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))
    itl_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))
    e2e_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))


@dataclass(slots=True)
class _End:
    """How a request ended."""

    outcome: str
    last: RequestOutput | None
    failure: ApiError | None

    @property
    def made(self) -> int:
        """Tokens of all its samples."""
        return 0 if self.last is None else sum(len(x.token_ids) for x in self.last.outputs)


def _of_failure(failure: ApiError) -> str:
    """`error` is the server's; a request that can't be met is refused."""
    if failure.status >= 500:
        return "error"
    return {408: "timeout", 499: "abort"}.get(failure.status, "refused")


def _outcome(last: RequestOutput | None, failure: ApiError | None) -> str:
    """Of a generating request; without an end or an error, its client has left."""
    if failure is not None:
        return _of_failure(failure)
    if last is None or not last.finished:
        return "abort"
    return last.outputs[0].finish_reason or "stop"


class Service:
    """An engine and everything that the endpoints share."""

    def __init__(self, config: ServerConfig, tracer: Tracer | None = None) -> None:
        self.config = config
        self.gate = Gate(config.max_queue_size, config.accounts)
        self.metrics = Metrics(next(iter(config.served_model_names), ""))
        self.tracer: Tracer = tracer or NoTracer()
        self.recent = Recent()
        self.called = Called(self.metrics)
        self.remembered = Remembered()
        room = int(config.response_store_mib * (1 << 20))
        keep_s = config.response_store_hours * 3600
        self.stored = StoredResponses(room, keep_s) if room else None  # else nothing is kept
        self.state: State = "loading"
        self.started = time.time()
        self.inflight: dict[str, Caller] = {}  # prompts, from their arrival on
        self._lanes = Lanes()
        self.done = 0
        self.failed = 0
        self._llm: AsyncLLM | None = None
        self._names: tuple[str, ...] = config.served_model_names
        self._progress = (0, time.monotonic())  # steps, and when they were last seen to change

    # ── the engine ───────────────────────────────────────────────────────────────────────────

    def start(self, llm: AsyncLLM, name: str) -> None:
        """Serve this engine, as `name` unless the configuration names it.

        Raises ConfigError where a key asks for what the engine's policy can't heed.
        """
        for key in self.config.accounts:
            self._check_wishes(llm, key)
        self._llm = llm
        self._names = self._names or (name,)
        taken = [name for name in self._adapters(llm) if name in self._names]
        if taken:
            raise ConfigError(f"An adapter has the model's own name, {taken[0]!r}. Rename one.")
        runtime = llm.runtime
        sight = runtime.sight
        pictures = None if sight is None else sight.pictures
        self.prompts = Prompts(runtime.tokenizer, runtime.model.max_model_len, pictures)
        self.prompts.compile_templates(self.config.chat_template)
        self.tooling = Tooling(runtime.tokenizer, self.config)
        self.defaults = default_params(runtime.model.generation)
        self.metrics.attach(llm, self._names[0])
        self.metrics.watch(self.stored)
        llm.engine.ledger.watch = self._saw_step
        self.state = "ready"

    def _saw_step(self, record: StepRecord) -> None:
        self.recent.steps.append(record)
        self.metrics.stepped()

    def _check_wishes(self, llm: AsyncLLM, key: Key) -> None:
        options = wishes_of(key.limits, EngineFields(), PromptText([]))
        try:
            llm.engine.scheduler.check(1, options)
        except RequestError as error:
            said = as_api_error(error).message  # in the words of the keys' file
            raise ConfigError(f"The API key {key.name!r}: {said}") from error

    @property
    def llm(self) -> AsyncLLM:
        """Raises ApiError 503 until the model is loaded, and while the server shuts down."""
        if self._llm is None or self.state != "ready":
            why = {
                "loading": "The model is being loaded.",
                "draining": "The server is shutting down.",
            }.get(self.state, "The engine isn't running.")
            raise ApiError(503, why, code=f"server_{self.state}", retry_after_s=5)
        return self._llm

    @property
    def engine_or_none(self) -> AsyncLLM | None:
        """The engine, whatever its state; None while the model is being loaded."""
        return self._llm

    @property
    def running(self) -> int:
        """Prompts that were let in and haven't been answered."""
        return len(self.inflight)

    @property
    def names(self) -> tuple[str, ...]:
        """What the model is called; the first is what answers say."""
        return self._names

    @staticmethod
    def _adapters(llm: AsyncLLM) -> list[str]:
        found = llm.runtime.adapters
        return [] if found is None else found.names

    @property
    def adapters(self) -> list[Adapter]:
        """Those that requests may name as their model."""
        found = self.llm.runtime.adapters
        return [] if found is None else found.loaded

    def check_model(self, name: str | None) -> str:
        """The name for the answer. Raises ApiError 404 for a model that isn't served."""
        known = [*self._names, *self._adapters(self.llm)]  # raises its 503 before there is a 404
        if name is not None and name not in known:
            raise ApiError(
                404,
                f"The model {name[:80]!r} isn't served here. There is: {', '.join(known)}.",
                param="model",
                code="model_not_found",
            )
        return name or self._names[0]

    def trouble(self) -> str | None:
        """Why the engine can't be said to work, or None."""
        llm = self._llm
        if self.state != "ready" or llm is None:
            return f"The server is {self.state}."
        if llm.death is not None:
            return f"The engine has stopped: {llm.death}"
        stats = llm.stats()
        steps, since = self._progress
        if stats["steps"] != steps or not stats["requests"]:
            self._progress = (stats["steps"], time.monotonic())
        elif time.monotonic() - since > self.config.stall_timeout_s:
            return f"No step has ended for {time.monotonic() - since:.0f} s."
        return None

    # ── requests ─────────────────────────────────────────────────────────────────────────────

    def options(
        self, caller: Caller, body: EngineFields, prompt: PromptText, model: str
    ) -> RequestOptions:
        """What the request, or else its key, asks of the queue and the cache.

        model: as `check_model` has found it; an adapter's name, perhaps.
        """
        own = model in self._names
        check_transfer(body, has_disk=self.llm.runtime.disk is not None, is_adapter=not own)
        wishes = wishes_of(caller.key.limits, body, prompt)
        return wishes if own else replace(wishes, adapter=model)

    def admit(
        self, caller: Caller, receive: Receive, size: int, prompts: int = 1, samples: int = 1
    ) -> Ticket:
        """Let a request in, before anything is computed for it.

        receive: tells when its client has gone; size: bytes of its body; samples: of each prompt.
        Raises ApiError 429 or 503.
        """
        llm = self.llm
        stats = llm.stats()
        if not stats["requests"]:  # no step ends while there is nothing to do
            self._progress = (stats["steps"], time.monotonic())
        waiting = max(0, len(self.inflight) - stats["requests_running"])
        rows = llm.config.scheduler.max_num_seqs - stats["running"]
        room = 0 if stats["waiting"] else max(rows // samples, 0)  # whoever waits lacks something
        recent = self.recent.e2e_s
        each = sum(recent) / len(recent) if recent else None
        account = self.gate.admit(caller.key, prompts, samples, waiting, each, room)
        timeout_s = self.config.request_timeout_s
        return Ticket(caller, account, self.inflight, prompts, samples, size, timeout_s, receive)

    async def compute(self, ticket: Ticket, work: Callable[[], T], *, slow: bool = False) -> T:
        """What `work` returns, beside the event loop, which goes on serving others.

        slow: it may take long, however short what was sent is. Raises ApiError 408.
        """
        return await self._lanes.run(ticket, work, slow=slow)

    async def compile(self, ticket: Ticket, structure: StructuredOutputs, field: str) -> None:
        """Prepare an answer's form beside the event loop.

        field: of the request, which asks for it. Raises ApiError for one that can't be followed.
        """
        compiled = self.llm.engine.intake.compile
        try:
            await self.compute(ticket, lambda: compiled(structure), slow=True)
        except InvalidSamplingError as error:
            raise structure_error(error, field) from error

    async def stream(
        self, ticket: Ticket, works: Sequence[Work]
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(number of the prompt, output so far) until all have ended.

        Raises ApiError. Leaving early ends the requests and frees what they hold.
        """
        llm = self.llm
        runs = [
            self._one(llm, ticket, name, work)
            for name, work in zip(ticket.names, works, strict=True)
        ]
        if len(runs) == 1:
            async with aclosing(runs[0]) as outputs:
                async for output in outputs:
                    yield 0, output
            return
        async with aclosing(merged_of(runs)) as merged:
            async for numbered in merged:
                yield numbered

    async def beside(self, ticket: Ticket, work: Work) -> RequestOutput:
        """What becomes of a prompt beside the request's own, for the same caller and in its time.

        Raises ApiError, 499 when the client has gone.
        """
        run = self._one(self.llm, ticket, ticket.beside(), work)

        async def whole() -> RequestOutput:
            last: RequestOutput | None = None
            async with aclosing(run) as outputs:
                async for output in outputs:
                    last = output
            assert last is not None  # an engine that ends without an output raises
            return last

        return await unless_gone(ticket.receive, whole())

    async def embed(
        self,
        ticket: Ticket,
        prompts: Sequence[PromptText],
        chosen: dict[str, Any],
        body: EngineFields,
        model: str,
    ) -> list[list[float]]:
        """Each prompt's embedding, in their order. Raises ApiError; all end with the first."""
        llm = self.llm
        params = PoolingParams(**chosen)
        options = [self.options(ticket.caller, body, x, model) for x in prompts]
        works = [Work(x, self.defaults, o) for x, o in zip(prompts, options, strict=True)]

        async def one(name: str, work: Work) -> list[float]:
            failure: ApiError | None = None
            outcome = "abort"
            try:
                prompt = {"prompt": work.prompt.text, "prompt_token_ids": work.prompt.tokens}
                async with asyncio.timeout(ticket.left_s) as limit:
                    output = await llm.embed(
                        prompt, params, name, options=work.options, arrival_time=ticket.arrival
                    )
                outcome = "stop"
                self.metrics.times(output.metrics)
                return output.outputs.embedding
            except TimeoutError as error:
                late = limit.expired()
                failure = ticket.too_late() if late else as_api_error(error, request_id=name)
                raise failure from error
            except Exception as error:
                failure = as_api_error(error, request_id=name)
                raise failure from error
            finally:
                end = _End(outcome if failure is None else _of_failure(failure), None, failure)
                self._account(ticket, name, work, end)

        pairs = list(zip(ticket.names, works, strict=True))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(*pair)) for pair in pairs]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(
        self, llm: AsyncLLM, ticket: Ticket, name: str, work: Work
    ) -> AsyncGenerator[RequestOutput, None]:
        last: RequestOutput | None = None
        failure: ApiError | None = None
        told = 0  # tokens of the first sample whose times are in the metrics
        try:
            outputs = llm.generate(
                {"prompt": work.prompt.text, "prompt_token_ids": work.prompt.tokens},
                work.params,
                name,
                options=work.options,
                timeout_s=ticket.left_s,
                arrival_time=ticket.arrival,
            )
            async with aclosing(outputs) as source:
                async for output in source:
                    last = output
                    if output.error is not None:
                        raise output.error
                    told = self._observe(output, told)
                    yield output
        except RequestTimeoutError as error:
            failure = ticket.too_late()
            raise failure from error
        except Exception as error:
            failure = as_api_error(error, request_id=name)
            raise failure from error
        finally:
            if failure is None:
                failure = broken_by()  # what made an answer of it: no client has left
            self._account(ticket, name, work, _End(_outcome(last, failure), last, failure))

    def _observe(self, output: RequestOutput, told: int) -> int:
        """Enter the times of new tokens into the metrics; how many are in there now.

        Several tokens of one step (of a draft, or forced by a grammar) come at one time: no gaps.
        """
        times = output.metrics.token_times
        if told == 0 and times:
            ttft = output.metrics.ttft_s or 0.0
            self.metrics.ttft.observe(ttft)
            self.recent.ttft_s.append(ttft)
            told = 1
        for before, after in zip(times[told - 1 :], times[told:], strict=False):
            if after > before:
                self.metrics.itl.observe(after - before)
                self.recent.itl_s.append(after - before)
        return max(told, len(times))

    def _account(self, ticket: Ticket, name: str, work: Work, end: _End) -> None:
        """A prompt has ended, in whatever way: counters, limits, its trace, a line of the log."""
        last, outcome, caller = end.last, end.outcome, ticket.caller
        refused = end.failure is not None and last is None  # nothing was computed
        ticket.settle(name, 0 if refused else len(work.prompt.tokens) + end.made)
        self.done += 1
        self.failed += outcome == "error"
        self.metrics.ended(work, last, outcome)
        if last is not None and last.metrics.e2e_s is not None:
            self.recent.e2e_s.append(last.metrics.e2e_s)
        self.tracer.request(caller, name, work, last, outcome, ticket.start)
        if self.config.log_requests:
            fields = self._fields(ticket, name, work, end)
            logger.info("request", extra={"fields": fields})
            if ticket.owns(name):
                accounted()

    def _fields(self, ticket: Ticket, name: str, work: Work, end: _End) -> dict[str, Any]:
        last, failure, caller = end.last, end.failure, ticket.caller
        fields: dict[str, Any] = {
            "request_id": name,
            "endpoint": caller.endpoint,
            "key": caller.key.name,
            "outcome": end.outcome,
            "prompt_tokens": len(work.prompt.tokens),
            "output_tokens": end.made,
            "cached_tokens": 0 if last is None else last.metrics.cached_tokens,
            "seconds": round(time.monotonic() - ticket.arrival, 4),
        }
        if caller.user is not None:
            fields["user"] = shortened(caller.user)
        if names := all_unheeded():
            fields["unheeded"] = names
        if last is not None and last.metrics.ttft_s is not None:
            fields["ttft_s"] = round(last.metrics.ttft_s, 4)
        if last is not None and last.metrics.achieved is not None:
            fields["floor_ratio"] = round(last.metrics.achieved, 3)
        if failure is not None:
            fields |= {"status": failure.status, "error": shortened(failure.message)}
        if self.config.log_prompts:
            fields["prompt"] = work.prompt.text
            fields["text"] = None if last is None else [x.text for x in last.outputs]
        return fields

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        if self.state != "failed":
            self.state = "draining"

    def stop(self) -> None:
        """Stop the engine; requests that still run end with an error."""
        self.drain()
        if self._llm is not None:
            self._llm.shutdown()
        self._lanes.close()
        self.called.close()
        self.tracer.close()


def priced(output: RequestOutput, prompt: PromptText | None = None) -> dict[str, Any]:
    """What Penstock adds beside the usage: how long it took, how near the floor, what became of
    drafts, and what of the usage was for summaries in the prompt."""
    metrics = output.metrics
    spent = None if prompt is None else prompt.spent
    times = metrics.token_times
    taken = times[-1] - times[0] if times else 0.0  # none where all tokens were forced
    rate = (len(times) - 1) / taken if taken > 0 else None
    return {
        "queue_s": _rounded(metrics.queue_s),
        "ttft_s": _rounded(metrics.ttft_s),
        "tokens_per_s": _rounded(rate),
        "floor_s": _rounded(metrics.floor_s),
        "floor_ratio": _rounded(metrics.achieved),
        "bound": metrics.bound,
        "draft_tokens": metrics.drafts.draft_tokens,
        "accepted_tokens": metrics.drafts.accepted_tokens,
        **({} if spent is None else {"compaction": spent.as_dict()}),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
