"""The service's own: several prompts at once, what breaks an answer off, how the engine fares."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engine import RequestOutput
from penstock.engine.breakers import Breakers
from penstock.server import ServerConfig, Service
from penstock.server.admission import Caller
from penstock.server.choices import Reader
from penstock.server.errors import as_api_error
from penstock.server.keys import Key
from penstock.server.merging import merged_of
from penstock.server.routes import tokens
from tests.server.conftest import Running
from tests.server.test_leaving import ASK, STREAMS

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_held_for_samples_that_cant_run(
    server: Running, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[Any] = []
    admit = server.service.admit
    monkeypatch.setattr(
        server.service, "admit", lambda *args: admitted.append(args) or admit(*args)
    )
    own: dict[str, Any] = {"prompt": "Hi"}
    if "chat" in path:
        own = {"messages": ASK, "tools": [TOOL]}
    with server.client() as client:
        answer = client.post(path, json=own | {"n": 1000, "stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "n"
    assert "n=1000 samples can't run at once: max_num_seqs is 64" in error["message"]
    assert admitted == []


def _outputs(of: list[Any], fails: bool = False) -> AsyncGenerator[RequestOutput, None]:
    async def run() -> AsyncGenerator[Any, None]:
        for one in of:
            await asyncio.sleep(0)
            yield one
        if fails:
            raise ValueError("planted")

    return run()


def test_several_prompts_cost_no_task_per_output() -> None:
    async def body() -> tuple[list[Any], int]:
        made = 0

        def factory(loop: Any, work: Any, **more: Any) -> Any:
            nonlocal made
            made += 1
            return asyncio.Task(work, loop=loop, **more)

        asyncio.get_running_loop().set_task_factory(factory)
        runs = [_outputs([i] * 10) for i in range(20)]
        found = [pair async for pair in merged_of(runs)]
        return found, made

    found, made = asyncio.run(body())
    assert sorted(found) == sorted([(i, i) for i in range(20)] * 10)
    assert made == 20


def test_the_first_error_of_several_prompts_ends_them_all() -> None:
    async def body() -> None:
        endless = _outputs([0] * 10**6)
        with pytest.raises(ValueError, match="planted"):
            async for _ in merged_of([endless, _outputs([1, 1], fails=True)]):
                pass
        with pytest.raises(StopAsyncIteration):  # it was closed
            await anext(endless)

    asyncio.run(body())


# ── the log says more ────────────────────────────────────────────────────────────────────────


def test_an_error_that_nobody_explains_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "penstock.server"):
        try:
            raise KeyError("planted")
        except KeyError as error:
            told = as_api_error(error)
        assert as_api_error(told) is told
    assert told.status == 500
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "planted" in str(record.exc_info[1])


@pytest.mark.parametrize("path", STREAMS)
def test_an_answer_that_breaks_off_is_an_error(
    server: Running,
    path: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, count = Reader.read, 0

    def broken(self: Reader, output: RequestOutput) -> Any:
        nonlocal count
        count += 1
        if count > 1:
            raise ZeroDivisionError("planted")
        return read(self, output)

    monkeypatch.setattr(Reader, "read", broken)
    step = server.llm.engine.step
    slowly = lambda: (time.sleep(0.005), step())[1]  # noqa: E731 – each output is seen
    monkeypatch.setattr(server.llm.engine, "step", slowly)
    with caplog.at_level(logging.INFO, "penstock.server"), server.client() as client:
        answer = client.post(path, json=STREAMS[path] | {"stream": True, "temperature": 0})
        server.rest()
        said = {record.message: record for record in caplog.records}
    assert answer.status_code == 200
    assert "Its log says more." in answer.text
    assert said["an internal error"].exc_info is not None
    fields = cast(Any, said["request"]).fields
    assert fields["outcome"] == "error"
    assert fields["status"] == 500


# ── beside the event loop, and beside the engine ─────────────────────────────────────────────


def test_tokens_are_written_beside_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    strings = tokens.token_strings

    def recorded(*args: Any) -> list[str]:
        threads.append(threading.current_thread().name)
        return strings(*args)

    monkeypatch.setattr(tokens, "token_strings", recorded)
    monkeypatch.setattr(tokens, "_AT_ONCE", 3, raising=False)
    tokenizer = server.service.prompts.tokenizer
    with server.client() as client:
        for text in ('Once upon a time, päivää "x"', "", "a"):
            body = {"prompt": text, "return_token_strs": True}
            answer = client.post("/tokenize", json=body)
            assert answer.headers["content-type"] == "application/json"
            ids = server.service.prompts.encode(text, True)
            assert answer.json() == {
                "count": len(ids),
                "max_model_len": server.llm.engine.max_model_len,
                "tokens": ids,
                "token_strs": strings(tokenizer, ids),
            }
        assert "token_strs" not in client.post("/tokenize", json={"prompt": "a"}).json()
    assert len(threads) == 3
    assert all(name.startswith("penstock-prompts") for name in threads)


def test_breakers_are_looked_for_beside_the_engine(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    search = Breakers._search

    def recorded(*args: Any) -> frozenset[int]:
        threads.append(threading.current_thread().name)
        return search(*args)

    monkeypatch.setattr(Breakers, "_search", recorded)
    body = {"prompt": "Hi", "max_tokens": 2, "dry_multiplier": 1.0, "n": 2}
    with server.client() as client:
        for _ in range(2):
            chosen = body | {"dry_sequence_breakers": ["never before", "zq"]}
            assert client.post("/v1/completions", json=chosen).status_code == 200
    assert len(threads) == 1
    assert "penstock-engine" not in threads


# ── /ready ───────────────────────────────────────────────────────────────────────────────────


def test_an_engine_that_was_idle_hasnt_stalled() -> None:
    stats = {"steps": 5, "requests": 0, "requests_running": 0, "running": 0, "waiting": 0}
    llm = SimpleNamespace(death=None, stats=lambda: stats)
    llm.config = SimpleNamespace(scheduler=SimpleNamespace(max_num_seqs=4))
    service = Service(ServerConfig())
    service._llm, service.state = cast(Any, llm), "ready"
    long_ago = time.monotonic() - 2 * service.config.stall_timeout_s
    service._progress = (5, long_ago)  # when /ready was asked last

    async def nobody() -> Any:
        return None

    caller = Caller(Key("everybody", b""), "a", "/v1/completions")
    service.admit(caller, nobody, 1)
    stats["requests"] = 1
    assert service.trouble() is None
    service._progress = (5, long_ago)
    caller = Caller(Key("everybody", b""), "b", "/v1/completions")
    service.admit(caller, nobody, 1)  # another arrival changes nothing
    assert "No step has ended" in str(service.trouble())
