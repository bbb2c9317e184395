"""`AsyncLLM`: streams, aborts, cancellation, death."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock import AsyncLLM, RequestOutput, SamplingParams
from penstock.errors import (
    EngineDeadError,
    InvalidPromptError,
    RequestError,
    RequestTimeoutError,
)
from penstock.step import KV, Step

from .letters import tokenizer
from .toy import RAISES, Toy, reference, toy_runtime


class Gated(Toy):
    """A toy that can be held in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Condition()
        self.go()

    def hold(self, after: int = 0) -> None:
        """Let `after` more steps through, the one that is held now among them."""
        with self.gate:
            self.open_until = len(self.steps) + after
            self.gate.notify_all()

    def go(self) -> None:
        self.hold(after=1 << 60)

    def __call__(self, step: Step, kv: KV) -> Tensor:
        with self.gate:
            assert self.gate.wait_for(lambda: len(self.steps) < self.open_until, 10)
        return super().__call__(step, kv)


Sent = asyncio.Task[RequestOutput]


@asynccontextmanager
async def serving(**kwargs: Any) -> AsyncIterator[tuple[AsyncLLM, Gated]]:
    toy = Gated()
    runtime = toy_runtime(forward=toy, tokenizer=tokenizer(), num_blocks=40)
    kwargs.setdefault("max_num_seqs", 4)
    llm = AsyncLLM(runtime=runtime, **kwargs)
    try:
        yield llm, toy
    finally:
        toy.go()
        llm.shutdown()


def greedy(max_tokens: int | None = 12, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    output = None
    async for one in stream:
        output = one
    assert output is not None and output.finished
    return output


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")


async def held(llm: AsyncLLM, toy: Gated, prompts: list[list[int]]) -> list[Sent]:
    """Requests for `prompts`, all taken by the engine, which is held in a step."""
    toy.hold()
    tasks = [asyncio.create_task(last(llm.generate(prompts[0], greedy(None))))]
    await until(lambda: llm.stats()["running"] == 1)
    tasks += [asyncio.create_task(last(llm.generate(p, greedy()))) for p in prompts[1:]]
    await until(lambda: len(llm._commands) == len(prompts) - 1)
    toy.hold(after=1)
    await until(lambda: len(llm.engine.requests) == len(prompts))
    await until(lambda: llm.stats()["running"] == min(len(prompts), 4))
    return tasks


def on_a_loop(body: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A test on an event loop of its own, which must end within ten seconds."""

    def run() -> None:
        async def limited() -> None:
            await asyncio.wait_for(body(), 10)

        asyncio.run(limited())

    run.__doc__ = body.__doc__
    return run


@on_a_loop
async def test_streams_grow() -> None:
    async with serving() as (llm, _):
        lengths, texts = [], []
        async for output in llm.generate("hello", greedy(), request_id="it"):
            lengths.append(len(output.outputs[0].token_ids))
            texts.append(output.outputs[0].text)
            assert output.request_id == "it" and output.prompt == "hello"
        assert lengths == sorted(set(lengths)) and lengths[-1] == 12
        assert all(texts[-1].startswith(text) for text in texts)
        assert output.outputs[0].token_ids == reference(output.prompt_token_ids, greedy())
        assert output.finished and output.outputs[0].finish_reason == "length"
        assert output.metrics.ttft_s is not None


@on_a_loop
async def test_many_at_once() -> None:
    async with serving() as (llm, _):
        prompts = [[i + 1] * (i % 7 + 1) for i in range(40)]
        outputs = await asyncio.gather(*(last(llm.generate(p, greedy())) for p in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == reference(prompt, greedy())
        assert len({output.request_id for output in outputs}) == 40
        assert llm.stats()["used_blocks"] == 0


@on_a_loop
async def test_a_slow_reader_gets_the_newest() -> None:
    async with serving() as (llm, toy):
        toy.hold(after=1)
        stream = llm.generate([3], greedy(30))
        first = await anext(stream)
        toy.go()
        await until(lambda: not llm.engine.requests)
        await asyncio.sleep(0.02)
        rest = [output async for output in stream]
        assert len(first.outputs[0].token_ids) == 1
        assert [len(output.outputs[0].token_ids) for output in rest] == [30]


@on_a_loop
async def test_abort() -> None:
    async with serving() as (llm, toy):
        toy.hold(after=2)
        stream = llm.generate([3], greedy(None), request_id="it")
        await anext(stream)
        await llm.abort("it")
        await llm.abort("unknown")
        toy.go()
        output = await last(stream)
        assert output.outputs[0].finish_reason == "abort"
        tokens = output.outputs[0].token_ids
        assert tokens == reference([3], greedy(None))[: len(tokens)] and len(tokens) <= 3
        assert llm.stats()["used_blocks"] == 0
        await llm.abort("it")  # ended already
        assert (await last(llm.generate([4], greedy(), "it"))).outputs[0].finish_reason == "length"


@on_a_loop
async def test_abort_several() -> None:
    async with serving() as (llm, toy):
        first, other, second = await held(llm, toy, [[1], [2], [3]])
        names = list(llm.engine.requests)
        for wrong in (5, None, ["unknown", ["a"]], [names[0], b"a"]):
            with pytest.raises(RequestError, match="A request id must be a text"):
                await llm.abort(wrong)  # type: ignore[arg-type]
        await llm.abort(iter([names[0], "unknown", names[2]]))
        toy.go()
        for task in (first, second):
            assert (await task).outputs[0].finish_reason == "abort"
        assert (await other).outputs[0].token_ids == reference([2], greedy())


@on_a_loop
async def test_bad_arguments_reach_their_caller_alone() -> None:
    """Nothing is queued, and the engine goes on."""
    async with serving(policy="edf", ttft_slo_s=1.0) as (llm, _):
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"request_id": ["x"]}, r"A request id must be a text, not \['x'\]"),
            ({"timeout_s": "5"}, "timeout_s must be a positive number of seconds, not '5'"),
            ({"timeout_s": math.nan}, "timeout_s must be .*, not nan"),
            ({"timeout_s": math.inf}, "timeout_s must be .*, not inf"),
            ({"timeout_s": 0}, "timeout_s must be .*, not 0"),
            ({"arrival_time": "12.5"}, "arrival_time must be a time in seconds.*, not '12.5'"),
            ({"arrival_time": math.nan}, "arrival_time must be .*, not nan"),
        ]
        for given, message in wrong:
            with pytest.raises(RequestError, match=message):
                await last(llm.generate([3], greedy(), **given))
            if "timeout_s" not in given:
                with pytest.raises(RequestError, match=message):
                    await llm.embed([3], **given)
        assert not llm._streams and not llm._commands and not llm.engine.scheduler.has_work
        assert (await last(llm.generate([4], greedy()))).outputs[0].finish_reason == "length"


# ── how long a request may take ──────────────────────────────────────────────────────────────────


@on_a_loop
async def test_too_late() -> None:
    async with serving() as (llm, toy):
        toy.hold()
        with pytest.raises(RequestTimeoutError, match=r"within 0\.05 s"):
            await last(llm.generate([3], greedy(None), timeout_s=0.05))
        toy.go()
        await until(lambda: not llm.engine.has_unfinished)
        assert llm.stats()["used_blocks"] == 0


@on_a_loop
async def test_what_has_ended_in_time_is_read_after_it() -> None:
    async with serving() as (llm, toy):
        toy.hold(after=1)
        stream = llm.generate([3], greedy(), timeout_s=0.5)
        await anext(stream)
        toy.go()
        await until(lambda: not llm.engine.requests)
        await asyncio.sleep(0.6)  # a reader that has other things to do
        assert (await last(stream)).outputs[0].token_ids == reference([3], greedy())


@on_a_loop
async def test_what_is_prepared_counts_as_time() -> None:
    async with serving() as (llm, _):
        prepare = llm.engine.intake.prepare
        going_on = threading.Event()

        def slow(params: Any) -> Any:
            going_on.wait(5)
            return prepare(params)

        llm.engine.intake.prepare = slow  # type: ignore[method-assign]
        guided = greedy(3, guidance_scale=1.5, negative_prompt="a")
        with pytest.raises(RequestTimeoutError, match=r"within 0\.05 s"):
            await last(llm.generate([3], guided, timeout_s=0.05))
        assert not llm._streams and not llm.engine.requests
        asyncio.get_running_loop().call_later(0.1, going_on.set)
        metrics = (await last(llm.generate([3], guided, timeout_s=8))).metrics
        assert metrics.ttft_s is not None and metrics.e2e_s is not None
        assert 0.1 <= metrics.ttft_s <= metrics.e2e_s


@on_a_loop
async def test_leaving_the_loop_frees_the_blocks() -> None:
    async with serving() as (llm, toy):
        toy.hold(after=1)
        stream = llm.generate([3] * 20, greedy(None))
        async for _ in stream:
            break
        assert llm.stats()["used_blocks"] > 0
        await stream.aclose()
        toy.go()
        await until(lambda: not llm.engine.requests)
        assert llm.stats()["used_blocks"] == 0


@on_a_loop
async def test_cancelling_frees_the_blocks() -> None:
    async with serving() as (llm, toy):
        task, other = await held(llm, toy, [[3] * 20, [4]])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        toy.go()
        assert (await other).outputs[0].token_ids == reference([4], greedy())
        assert llm.stats()["used_blocks"] == 0


@on_a_loop
async def test_cancelled_before_it_was_added() -> None:
    async with serving() as (llm, toy):
        toy.hold()
        busy = asyncio.create_task(last(llm.generate([4], greedy())))
        await until(lambda: llm.stats()["running"] == 1)  # the engine is in a step
        task = asyncio.create_task(last(llm.generate([3] * 20, greedy(None))))
        await asyncio.sleep(0.01)
        assert len(llm.engine.requests) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        toy.go()
        await busy
        await until(lambda: not llm.engine.has_unfinished)
        assert llm.stats()["used_blocks"] == 0


@on_a_loop
async def test_the_id_of_a_cancelled_request_can_be_used_again() -> None:
    """Even before the engine has heard of it: the old one's end isn't the new one's."""
    async with serving() as (llm, toy):
        toy.hold(after=1)
        stream = llm.generate([3], greedy(None), "it")
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(last(llm.generate([4], greedy(), "it")))
        await asyncio.sleep(0.01)
        toy.go()
        output = await task
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == reference([4], greedy())


@on_a_loop
async def test_an_id_in_use() -> None:
    async with serving() as (llm, toy):
        toy.hold(after=1)
        stream = llm.generate([3], greedy(), "it")
        await anext(stream)
        second = asyncio.create_task(last(llm.generate([4], greedy(None), "it")))
        await asyncio.sleep(0.01)
        toy.go()
        with pytest.raises(RequestError, match="already in use"):
            await second
        assert (await last(stream)).outputs[0].token_ids == reference([3], greedy())


@on_a_loop
async def test_bad_requests_while_others_run() -> None:
    async with serving() as (llm, _):
        good = asyncio.create_task(last(llm.generate([3], greedy(50))))
        wrong: list[tuple[Any, SamplingParams]] = [
            ("", greedy()),
            ([], greedy()),
            ([99], greedy()),
            ([1] * 64, greedy()),
            ({"promt": "a"}, greedy()),
            ([2], greedy(stop_token_ids=[99])),
            ([2], SamplingParams(n=5)),
        ]
        for prompt, params in wrong:
            with pytest.raises(RequestError):
                await last(llm.generate(prompt, params))
        with pytest.raises(InvalidPromptError, match="Token id 99 is outside"):
            await last(llm.generate([99], greedy()))
        bad = await last(llm.generate([2, RAISES], greedy()))
        assert bad.outputs[0].finish_reason == "error"
        assert str(bad.error) == "the toy broke"
        assert (await good).outputs[0].token_ids == reference([3], greedy(50))
        assert llm.stats()["used_blocks"] == 0


# ── the end of the engine ────────────────────────────────────────────────────────────────────────


def _dies(llm: AsyncLLM, error: BaseException) -> None:
    """The next step breaks, in a way that isn't any request's fault."""

    def schedule() -> Any:
        raise error

    llm.engine.scheduler.schedule = schedule  # type: ignore[method-assign]


@on_a_loop
async def test_death_reaches_every_stream() -> None:
    async with serving() as (llm, toy):
        tasks = await held(llm, toy, [[i + 1] for i in range(6)])
        late = asyncio.create_task(last(llm.generate([9], greedy())))  # not added any more
        await asyncio.sleep(0.01)
        cause = AssertionError("planted")
        _dies(llm, cause)
        toy.go()
        for task in [*tasks, late]:
            with pytest.raises(EngineDeadError, match="planted") as caught:
                await task
            assert caught.value.__cause__ is cause
        with pytest.raises(EngineDeadError, match="planted") as caught:
            await last(llm.generate([1], greedy()))
        assert caught.value.__cause__ is cause
        with pytest.raises(EngineDeadError):
            await llm.abort("0")
        llm.shutdown()  # is nothing more


@on_a_loop
async def test_a_command_that_breaks_the_engine_hides_no_other() -> None:
    """Requests that were sent with it hear of the death instead of waiting for ever."""
    async with serving() as (llm, toy):
        toy.hold()
        first = asyncio.create_task(last(llm.generate([1], greedy(), "first")))
        await until(lambda: llm.stats()["running"] == 1)

        def broken(request_id: str, **kwargs: Any) -> None:
            raise AssertionError("planted")

        llm.engine.abort = broken  # type: ignore[method-assign]
        await llm.abort("first")
        second = asyncio.create_task(last(llm.generate([2], greedy(), "second")))
        await asyncio.sleep(0.01)
        toy.go()
        for task in (first, second):
            with pytest.raises(EngineDeadError, match="planted"):
                await task


@on_a_loop
async def test_cancelled_after_the_death() -> None:
    """A cancelled reader is cancelled; that the engine died too doesn't replace it."""
    async with serving() as (llm, toy):
        toy.hold()
        task = asyncio.create_task(last(llm.generate([1], greedy())))
        await until(lambda: llm.stats()["running"] == 1)
        _dies(llm, AssertionError("planted"))
        toy.go()
        llm._thread.join()  # its message waits for this loop
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = llm.generate([1], greedy())
        await stream.aclose()


@on_a_loop
async def test_shutdown() -> None:
    async with serving() as (llm, toy):
        toy.hold()
        task = asyncio.create_task(last(llm.generate([1], greedy())))
        await until(lambda: llm.stats()["running"] == 1)
        closing = threading.Thread(target=llm.shutdown)
        closing.start()
        await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="has stopped"):
            await last(llm.generate([2], greedy()))
        toy.go()
        with pytest.raises(EngineDeadError, match="was shut down"):
            await task
        closing.join()
        llm.shutdown()
        assert not llm._thread.is_alive()


def test_whoever_reset_the_cache_has_left() -> None:
    """Its loop is closed when the engine comes to it; the engine goes on for the others."""

    async def body() -> None:
        async with serving() as (llm, toy):
            toy.hold()
            busy = asyncio.create_task(last(llm.generate([3], greedy())))
            await until(lambda: llm.stats()["running"] == 1)

            async def leave() -> None:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(llm.reset_prefix_cache(), 0.01)

            await asyncio.to_thread(asyncio.run, leave())
            toy.go()
            assert (await busy).outputs[0].token_ids == reference([3], greedy())
            await llm.reset_prefix_cache()

    asyncio.run(body())


def test_a_reader_whose_loop_was_closed() -> None:
    """The engine goes on for the others."""

    async def body() -> None:
        async with serving() as (llm, toy):
            loop = asyncio.new_event_loop()
            stream = llm.generate([3], greedy(None), "left")
            toy.hold(after=1)
            await asyncio.to_thread(lambda: loop.run_until_complete(anext(stream)))
            loop.close()
            toy.go()
            assert (await last(llm.generate([4], greedy()))).outputs[0].finish_reason == "length"

    asyncio.run(body())


_SCRIPT = """
import asyncio, sys
sys.path.insert(0, {root!r})
from penstock import AsyncLLM
from tests.engine.toy import toy_runtime
llm = AsyncLLM(runtime=toy_runtime())
async def body():
    async for output in llm.generate([3]):
        print(len(output.outputs[0].token_ids), flush=True)
        break
asyncio.run(body())
"""


def test_a_program_that_forgets_to_shut_down_ends() -> None:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(root=root)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
