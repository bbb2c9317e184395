"""Sending a workload: when each request goes out, and what is noted about it.

Open loop: conversations begin at times that are fixed beforehand, and latencies count from these,
so that a server which falls behind can't slow its own load down (coordinated omission). Closed
loop: a number of users, each of whom begins when the one before has been answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.bench.serve.api import Answer, Api
from penstock.bench.serve.http_client import HttpClient
from penstock.bench.serve.record import RequestRecord
from penstock.bench.serve.vocabulary import Vocabulary
from penstock.bench.serve.workload import Workload
from penstock.http1 import ExchangeError

PROBE_S = 0.02  # between two looks at how late the event loop is
TOO_MANY = 429


@dataclass(frozen=True, slots=True)
class Plan:
    """How the load is made."""

    arrivals_s: NDArray[np.float64] | None  # [conversations], ascending; None: closed loop
    max_concurrency: int | None  # users of a closed loop; in an open one, requests at once
    timeout_s: float = 600.0  # of one request
    max_retries: int = 0  # after status 429
    think_time_s: float = 0.0  # between an answer and the conversation's next turn


@dataclass(slots=True)
class Progress:
    """A run as it stands."""

    total: int  # requests
    running: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0  # chunks of answers
    elapsed_s: float = 0.0


@dataclass(slots=True)
class LoadResult:
    """Everything that a run found."""

    records: list[RequestRecord] = field(default_factory=list)
    duration_s: float = 0.0  # from the first intended time to the last answer's end
    interrupted: bool = False
    loop_lags_s: list[float] = field(default_factory=list)  # of the client's event loop
    client_cpu_s: float = 0.0


class LoadGenerator:
    """Sends one workload once."""

    def __init__(
        self,
        client: HttpClient,
        api: Api,
        vocabulary: Vocabulary,
        workload: Workload,
        plan: Plan,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        progress_every_s: float = 0.5,
    ) -> None:
        self._client = client
        self._api = api
        self._vocabulary = vocabulary
        self._conversations = workload.conversations
        self._plan = plan
        self._on_progress = on_progress
        self._progress_every_s = progress_every_s
        self._progress = Progress(workload.num_requests)
        self._result = LoadResult()
        self._start = 0.0
        self._slots = (
            asyncio.Semaphore(plan.max_concurrency)
            if plan.max_concurrency is not None and plan.arrivals_s is not None
            else None
        )
        # written before the clock runs: a long prompt takes milliseconds
        self._prompts = [
            api.opening(vocabulary, c.turns[0].prompt) if len(c.turns) > 1 else None
            for c in self._conversations
        ]
        self._bodies = [
            api.body(said or api.opening(vocabulary, c.turns[0].prompt), c.turns[0].output_len)
            for said, c in zip(self._prompts, self._conversations, strict=True)
        ]

    async def run(self) -> LoadResult:
        """Send everything; SIGINT ends the run with what was found so far."""
        result = self._result
        with _without_collections():
            cpu = time.process_time()
            self._start = time.perf_counter()
            load = asyncio.create_task(self._load())
            watch = asyncio.create_task(self._watch())

            def interrupt() -> None:
                result.interrupted = True
                load.cancel()

            try:
                with _on_interrupt(interrupt):
                    await load
            except asyncio.CancelledError:
                if not result.interrupted:
                    raise
            finally:
                watch.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watch
            result.client_cpu_s = time.process_time() - cpu
        ends = [r.end_s for r in result.records if r.end_s is not None]
        result.duration_s = self._clock() if result.interrupted else max(ends, default=0.0)
        self._report()
        return result

    def _clock(self) -> float:
        return time.perf_counter() - self._start

    async def _load(self) -> None:
        if self._plan.arrivals_s is None:
            await self._closed()
        else:
            await self._open(self._plan.arrivals_s)

    async def _open(self, arrivals_s: NDArray[np.float64]) -> None:
        async with asyncio.TaskGroup() as group:
            for i, at in enumerate(arrivals_s.tolist()):
                await asyncio.sleep(max(0.0, at - self._clock()))
                group.create_task(self._converse(i, at))

    async def _closed(self) -> None:
        waiting = iter(range(len(self._conversations)))

        async def user() -> None:
            for i in waiting:
                await self._converse(i, self._clock())

        assert self._plan.max_concurrency is not None
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._plan.max_concurrency, len(self._conversations))):
                group.create_task(user())

    async def _converse(self, index: int, at: float) -> None:
        """All turns of one conversation; an error ends it."""
        said, body = self._prompts[index], self._bodies[index]
        turns = self._conversations[index].turns
        length = 0  # of the prompts so far: what answers add, the server counts
        for i, turn in enumerate(turns):
            length += len(turn.prompt)
            record = RequestRecord(index, i, length, turn.output_len, at)
            self._result.records.append(record)
            answer = await self._ask(record, body, keep_text=i + 1 < len(turns))
            if record.failed:
                return
            if i + 1 < len(turns):
                following = turns[i + 1]
                said = self._api.continued(said, answer, self._vocabulary, following.prompt)
                body = self._api.body(said, following.output_len)
                assert record.end_s is not None
                at = record.end_s + self._plan.think_time_s
                await asyncio.sleep(max(0.0, at - self._clock()))

    async def _ask(self, record: RequestRecord, body: bytes, *, keep_text: bool) -> str:
        """Send one request and see it through; its answer's text where that is kept."""
        record.ready_s = self._clock()
        slot: AbstractAsyncContextManager[None] = self._slots or nullcontext()
        async with slot:
            record.slot_s = self._clock()
            self._progress.running += 1
            try:
                while True:
                    try:
                        return await self._exchange(record, body, keep_text)
                    except ExchangeError as failure:
                        if failure.kind == f"HTTP {TOO_MANY}":
                            record.rejections += 1
                            if record.rejections <= self._plan.max_retries:
                                await asyncio.sleep(_pause_s(failure, record.rejections))
                                continue
                        record.error, record.message = failure.kind, str(failure)
                        record.end_s = self._clock()
                        self._progress.failed += 1
                        return ""
            finally:
                self._progress.running -= 1

    async def _exchange(self, record: RequestRecord, body: bytes, keep_text: bool) -> str:
        answer = Answer(self._api, record, self._clock, self._count, keep_text=keep_text)

        def sent() -> None:
            if record.sent_s is None:
                record.sent_s = self._clock()

        response = await self._client.post(
            self._api.endpoint,
            body,
            on_body=answer.feed,
            on_sent=sent,
            timeout_s=self._plan.timeout_s,
        )
        answer.finish(response.headers.get("content-type", ""))
        record.end_s = self._clock()
        self._progress.done += 1
        return "".join(answer.text)

    def _count(self, tokens: int) -> None:
        self._progress.tokens += tokens

    async def _watch(self) -> None:
        """Measure how late the event loop is, and report how far the run has come."""
        shown = 0.0
        while True:
            before = self._clock()
            await asyncio.sleep(PROBE_S)
            now = self._clock()
            self._result.loop_lags_s.append(now - before - PROBE_S)
            if now - shown >= self._progress_every_s:
                shown = now
                self._report()

    def _report(self) -> None:
        self._progress.elapsed_s = self._clock()
        self._on_progress(self._progress)


def _pause_s(failure: ExchangeError, rejections: int) -> float:
    """As long as Retry-After says, or else doubling from a second."""
    if failure.retry_after_s is not None:
        return failure.retry_after_s
    return float(2 ** min(rejections - 1, 5))


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep what was prepared out of the garbage collector's sight: its pauses are latencies."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _on_interrupt(act: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT calls `act`; a second one is Python's own KeyboardInterrupt."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        act()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (RuntimeError, ValueError):  # only a process's main thread may listen
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
