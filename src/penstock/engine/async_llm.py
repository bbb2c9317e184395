"""`AsyncLLM`: requests that come and go while one engine thread steps."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import DEFAULT_MODEL, EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.lora import Hold, LoRARequest, adapters_of, load_adapter, naming
from penstock.engine.options import RequestOptions, check_seconds
from penstock.engine.outputs import RequestOutput
from penstock.engine.pooling import EmbeddingRequestOutput, PoolingParams
from penstock.engine.prompts import Encoded, Prompt, default_params, encode
from penstock.engine.remembering import HANDS_OVER_S, LOOKS_S, Keeping
from penstock.errors import ConfigError, EngineDeadError, RequestError, RequestTimeoutError
from penstock.models.weights import Progress
from penstock.runtime import Runtime, load_runtime
from penstock.sampling import BeamSearchParams, SamplingParams
from penstock.tokenizer import Tokenizer

logger = logging.getLogger("penstock")

T = TypeVar("T")
Item = RequestOutput | BaseException
Command = Callable[[], None]
_COMMAND_TIMEOUT_S = 30.0  # commands run between two steps


class _Stream:
    """One request's way back to its event loop: holds the newest output, which tells all."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._newest: list[Item] = []
        self._arrived = asyncio.Event()

    def put(self, item: Item) -> None:
        """Take an output or an error; a reader that is slow misses those before it."""
        if self._newest and _is_last(self._newest[0]):
            return  # nothing comes after it: no alarm, if the request has ended in time
        self._newest = [item]
        self._arrived.set()

    async def get(self) -> Item:
        """The newest item that wasn't read yet."""
        await self._arrived.wait()
        self._arrived.clear()
        return self._newest.pop()


class _Limit:
    """The time that a request may take, from now on."""

    def __init__(self, timeout_s: float | None) -> None:
        """Raises RequestError for what isn't a time."""
        self._deadline: float | None = None  # of the loop's clock
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
            self._deadline = asyncio.get_running_loop().time() + timeout_s
        self._timeout_s = timeout_s

    async def over(self, work: Awaitable[T]) -> T:
        """What `work` results in. Raises RequestTimeoutError where it takes too long."""
        try:
            async with asyncio.timeout_at(self._deadline) as limit:
                return await work
        except TimeoutError as error:
            if limit.expired():
                raise self._late from error
            raise

    def within(self, seconds: float) -> float:
        """When so much time is over, or the request's own, by the loop's clock."""
        end = asyncio.get_running_loop().time() + seconds
        return end if self._deadline is None else min(end, self._deadline)

    def alarm(self, stream: _Stream) -> asyncio.TimerHandle | None:
        """Puts RequestTimeoutError into `stream` when the time is over, unless it is cancelled."""
        if self._deadline is None:
            return None
        return asyncio.get_running_loop().call_at(self._deadline, stream.put, self._late)

    @property
    def _late(self) -> RequestTimeoutError:
        return RequestTimeoutError(f"The request didn't end within {self._timeout_s:g} s.")


class AsyncLLM:
    """The engine behind an asyncio interface; arguments as for `LLM`."""

    def __init__(
        self,
        /,
        model: str | Path = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        runtime: Runtime | None = None,
        **kwargs: Any,
    ) -> None:
        config = EngineConfig.of(model=model, **kwargs)
        if runtime is not None and (model != DEFAULT_MODEL or config.differs_before_engine()):
            raise ConfigError(
                "A loaded runtime is given: arguments of the model and the cache come too late. "
                "Give them when it is loaded."
            )
        self._start(config, runtime or load_runtime(config, progress))

    @classmethod
    def of(cls, config: EngineConfig, progress: Progress | None = None) -> AsyncLLM:
        """The same from a configuration."""
        made = cls.__new__(cls)
        made._start(config, load_runtime(config, progress))
        return made

    def _start(self, config: EngineConfig, runtime: Runtime) -> None:
        self.runtime = runtime
        self.engine = Engine(config, self.runtime)
        self.config = self.engine.config
        self._streams: dict[str, _Stream] = {}  # engine thread only
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._death: BaseException | None = None
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._loop, name="penstock-engine", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)  # the interpreter must not end while a kernel runs

    # ── the caller's side ────────────────────────────────────────────────────────────────────

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        lora_request: LoRARequest | None = None,
        timeout_s: float | None = None,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs so far, after every step, until the last has `finished`.

        Each holds the whole text until then; a reader slower than the engine gets the newest. Of a
        beam search there is only the last.
        Leaving the loop early, or cancelling its task, ends the request and frees its blocks.
        timeout_s: from now to its end, whatever is prepared before it is queued among it;
        RequestTimeoutError then. arrival_time: since when its times count, as `time.monotonic`
        says it, where that is before now. Raises RequestError; nothing is queued then.
        """
        arrival = time.monotonic() if arrival_time is None else arrival_time
        name = self._name(request_id)
        limit = _Limit(timeout_s)
        params = sampling_params or default_params(self.runtime.model.generation)
        encoded = await self._encode(prompt)
        text, tokens, options = encoded.text, encoded.tokens, encoded.options(options)
        if _takes_long(params):
            params = await limit.over(asyncio.to_thread(self.engine.intake.prepare, params))
        if isinstance(options, RequestOptions) and isinstance(options.prediction, str):
            expecting = self.engine.intake.expecting
            options = await limit.over(asyncio.to_thread(expecting, options))
        stream = _Stream(asyncio.get_running_loop())
        hold = None if lora_request is None else Hold(self.runtime, lora_request)
        finished, alarm = True, None
        try:
            if hold is not None:
                options = naming(options, await limit.over(asyncio.to_thread(hold.take)))
            self._send(lambda: self._add(name, tokens, params, text, stream, arrival, options))
            finished = False
            alarm = limit.alarm(stream)
            while not finished:
                item = await stream.get()
                if isinstance(item, BaseException):
                    finished = not isinstance(item, RequestTimeoutError)
                    raise item
                finished = item.finished
                if finished and isinstance(options, RequestOptions) and options.hand_over:
                    await self._hand_over(Keeping.of(self.engine, tokens, options), limit)
                yield item
        finally:
            if alarm is not None:
                alarm.cancel()
            if not finished:
                with suppress(EngineDeadError):  # then there is nothing to drop
                    self._send(lambda: self._drop(name, stream))
            if hold is not None:
                hold.let_go()

    async def _encode(self, prompt: Prompt) -> Encoded:
        """A prompt's tokens and pictures; unpacking the latter takes long."""
        sight, tokenizer = self.runtime.sight, self.runtime.tokenizer
        pictures = None if sight is None else sight.pictures
        if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
            return await asyncio.to_thread(encode, prompt, tokenizer, pictures)
        return encode(prompt, tokenizer, pictures)

    async def load_lora(self, name: str, path: str | Path) -> None:
        """As `LLM.load_lora`, while requests run."""
        await asyncio.to_thread(load_adapter, self.runtime, name, path)

    async def unload_lora(self, name: str) -> None:
        """As `LLM.unload_lora`: requests that run with it go on."""
        adapters_of(self.runtime).unload(name)

    def list_loras(self) -> list[str]:
        """As `LLM.list_loras`."""
        return adapters_of(self.runtime).names

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        options: RequestOptions | None = None,
        lora_request: LoRARequest | None = None,
        arrival_time: float | None = None,
    ) -> EmbeddingRequestOutput:
        """The prompt's embedding; cancelling the task ends the request and frees its blocks.

        arrival_time: as in `generate`.
        """
        arrival = time.monotonic() if arrival_time is None else arrival_time
        name = self._name(request_id)
        encoded = await self._encode(prompt)
        text, tokens, options = encoded.text, encoded.tokens, encoded.options(options)
        stream = _Stream(asyncio.get_running_loop())

        def add() -> None:
            self.engine.add_pooling_request(
                name, tokens, pooling_params, prompt=text, arrival_time=arrival, options=options
            )

        hold = None if lora_request is None else Hold(self.runtime, lora_request)
        item: Item | None = None
        sent = False
        try:
            if hold is not None:
                options = naming(options, await asyncio.to_thread(hold.take))
            self._send(lambda: self._enter(name, stream, add))
            sent = True
            item = await stream.get()  # only the last there is
        finally:
            if item is None and sent:
                with suppress(EngineDeadError):  # then there is nothing to drop
                    self._send(lambda: self._drop(name, stream))
            if hold is not None:
                hold.let_go()
        if isinstance(item, BaseException):
            raise item
        return EmbeddingRequestOutput.from_base(item)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End a request, or several; their streams end with finish_reason "abort".

        Raises RequestError for what isn't an id; none is ended then.
        """
        several = isinstance(request_id, Iterable) and not isinstance(request_id, str)
        ids = [_checked_id(one) for one in (request_id if several else [request_id])]

        def end() -> None:
            for one in ids:
                self.engine.abort(one)

        self._send(end)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no request uses."""
        await self._between_steps(self.engine.reset_prefix_cache)

    async def _between_steps(self, work: Callable[[], T]) -> T:
        """What `work` returns in the engine's thread."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        found: list[T] = []

        def run() -> None:
            found.append(work())
            _call(loop, done.set)

        self._send(run)
        async with asyncio.timeout(_COMMAND_TIMEOUT_S):
            await done.wait()
        return found[0]

    async def _hand_over(self, keep: Keeping, limit: _Limit) -> None:
        """Wait until a prompt's blocks are on disk, as far as that can be in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(limit.within(HANDS_OVER_S)):
                while keep.left:
                    await self._between_steps(keep.queue)
                    while not keep.settled:
                        await asyncio.sleep(LOOKS_S)

    @property
    def death(self) -> BaseException | None:
        """What stopped the engine's thread or another of its processes; None while all run."""
        team = self.runtime.team
        return self._death if team is None or self._death is not None else team.fault

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None with `skip_tokenizer_init`."""
        return self.runtime.tokenizer

    def stats(self) -> dict[str, Any]:
        """Counters of the engine, as of its last step."""
        return self.engine.stats()

    def shutdown(self) -> None:
        """Stop the engine thread; requests that still run end with EngineDeadError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            team = self.runtime.team
            self._thread.join(None if team is None else team.STEP_S)
            if team is not None and self._thread.is_alive():  # waits for a rank that does nothing
                team.give_up()
            self._thread.join()
        if self.runtime.disk is not None:
            self.runtime.disk.close()
        atexit.unregister(self.shutdown)

    def _name(self, request_id: str | None) -> str:
        """A request's id: the given one, or a new one."""
        return f"request-{next(self._ids)}" if request_id is None else _checked_id(request_id)

    def _send(self, command: Command) -> None:
        """Let the engine's thread run `command`, which raises only where the engine is broken:
        what a caller gives is checked before.
        """
        with self._wake:
            if self._death is not None or self._stopping:
                raise self._dead()
            self._commands.append(command)
            self._wake.notify()

    # ── the engine's thread ──────────────────────────────────────────────────────────────────

    def _loop(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_unfinished:
                    self._deliver(self.engine.step())
            self._bury(EngineDeadError("The engine was shut down."))
        except BaseException as error:
            self._bury(error)
            if not isinstance(error, Exception):
                raise

    def _take_commands(self) -> bool:
        """Run what callers have sent, waiting for it when there is nothing else to do."""
        with self._wake:
            while not (self._commands or self._stopping or self.engine.has_unfinished):
                self._wake.wait()
            stopping = self._stopping
        while self._commands:  # one that raises leaves the others to be buried
            self._commands.popleft()()
        return not stopping

    def _add(
        self,
        name: str,
        tokens: Any,
        params: SamplingParams | BeamSearchParams,
        text: str | None,
        stream: _Stream,
        arrival: float,
        options: RequestOptions | None,
    ) -> None:
        def add() -> None:
            self.engine.add_request(
                name,
                tokens,
                params,
                prompt=text,
                stream=not isinstance(params, BeamSearchParams),
                arrival_time=arrival,
                options=options,
            )

        self._enter(name, stream, add)

    def _enter(self, name: str, stream: _Stream, add: Command) -> None:
        """Queue a request by `add`; `stream` is its way back."""
        if self._death is not None:  # it came too late
            _put(stream.loop, [(stream, self._dead())])
            return
        try:
            add()
        except Exception as error:  # one request's fault, whatever it is: its caller gets it
            _put(stream.loop, [(stream, error)])
        else:
            self._streams[name] = stream

    def _drop(self, name: str, stream: _Stream) -> None:
        if self._streams.get(name) is stream:
            del self._streams[name]
            self.engine.abort(name, report=False)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """One wake-up per event loop and step, however many outputs it gets."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Item]]] = {}
        for output in outputs:
            name = output.request_id
            stream = self._streams.pop(name, None) if output.finished else self._streams.get(name)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            _put(loop, items)

    def _bury(self, error: BaseException) -> None:
        if not isinstance(error, EngineDeadError):
            fields = {"why": str(error) or type(error).__name__}
            logger.error("the engine has stopped", extra={"fields": fields}, exc_info=error)
        with self._wake:
            self._death = error
        for stream in self._streams.values():
            _put(stream.loop, [(stream, self._dead())])
        self._streams.clear()
        while self._commands:  # nobody adds to them now
            with suppress(Exception):  # an engine that broke may break again
                self._commands.popleft()()

    def _dead(self) -> EngineDeadError:
        death = EngineDeadError(f"The engine has stopped: {self._death or 'shutting down'}")
        death.__cause__ = self._death
        return death


def _takes_long(params: SamplingParams | BeamSearchParams) -> bool:
    """Whether anything must be prepared that the event loop shouldn't wait for."""
    if isinstance(params, BeamSearchParams):
        return params.structure is not None
    known: bool = isinstance(params, SamplingParams)  # what isn't is refused by the engine
    if not known:
        return False
    texts = params.structure is not None or isinstance(params.negative_prompt, str)
    breakers = bool(params.dry_multiplier and params.breakers)
    return texts or params.token_healing or breakers


def _is_last(item: Item) -> bool:
    return isinstance(item, BaseException) or item.finished


def _checked_id(request_id: object) -> str:
    if not isinstance(request_id, str):
        raise RequestError(f"A request id must be a text, not {request_id!r:.80}.")
    return request_id


def _put(loop: asyncio.AbstractEventLoop, items: list[tuple[_Stream, Item]]) -> None:
    def deliver() -> None:
        for stream, item in items:
            stream.put(item)

    _call(loop, deliver)


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Let `loop` call it soon, from another thread."""
    with suppress(RuntimeError):  # the loop was closed: nobody waits
        loop.call_soon_threadsafe(callback)
