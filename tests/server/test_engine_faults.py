"""An engine that raises, dies, or runs out of memory, seen through the server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from penstock.engine import AsyncLLM
from penstock.server import ServerConfig
from tests.server.conftest import Running, serving

BAD = 77  # the token whose sequences the engine fails at
PROMPTS = ["Once upon a time", "The little dog", "In the garden", "A big red ball"]


def body(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True, **more}


def together(
    running: Running, bodies: list[dict[str, Any]], streams: threading.Event | None = None
) -> list[httpx.Response]:
    """The answers to requests made at once; `streams` is set once a stream begins."""

    async def post(client: httpx.AsyncClient, one: dict[str, Any]) -> httpx.Response:
        async with client.stream("POST", "/v1/completions", json=one) as answer:
            if streams is not None and one.get("stream"):
                streams.set()
            await answer.aread()
            return answer

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=running.url, timeout=120) as client:
            return list(await asyncio.gather(*(post(client, one) for one in bodies)))

    return asyncio.run(ask())


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture
def running() -> Iterator[Running]:
    with serving(ServerConfig(), num_gpu_blocks_override=128) as made:
        yield made


def poison(running: Running, after: int = 0, until: threading.Event | None = None) -> None:
    """Fail every step with a sequence whose prompt holds BAD and that has made `after` tokens,
    once `until` is set."""
    batcher = running.llm.engine.batcher
    build = batcher.build

    def broken(parts: Any) -> Any:
        for sequence, _ in parts:
            if BAD in sequence.request.prompt_token_ids and sequence.num_output >= after:
                assert until is None or until.wait(20)
                raise ZeroDivisionError("planted")
        return build(parts)

    batcher.build = broken


def test_a_poisoned_request_fails_alone(running: Running) -> None:
    alone = [text(together(running, [body(prompt)])[0]) for prompt in PROMPTS]
    poison(running)
    found = together(running, [body(PROMPTS[0]), body([5, BAD]), *map(body, PROMPTS[1:])])
    assert found[1].status_code == 500
    assert "ZeroDivisionError" in found[1].json()["error"]["message"]
    assert "planted" not in found[1].text  # what it says is for the log
    del found[1]
    assert [text(one) for one in found] == alone
    bad = body([5, BAD], stream=True)
    assert together(running, [bad])[0].status_code == 500
    assert running.rest()["used_blocks"] == 0


def test_a_request_that_fails_in_mid_stream(running: Running) -> None:
    alone = text(together(running, [body(PROMPTS[0])])[0])
    begun = threading.Event()
    poison(running, after=5, until=begun)
    found = together(running, [body(PROMPTS[0]), body([5, BAD], stream=True)], begun)
    assert text(found[0]) == alone
    assert found[1].status_code == 200
    events = [line[6:] for line in found[1].text.splitlines() if line]
    error = json.loads(events[-1])["error"]
    assert error["type"] == "server_error"
    assert all("choices" in json.loads(event) for event in events[:-1])
    assert running.rest()["used_blocks"] == 0


def test_an_engine_that_dies(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm: AsyncLLM = running.llm
    step = llm.engine.step
    steps = 0

    def dying() -> Any:
        nonlocal steps
        steps += 1
        if steps > 5:
            raise RuntimeError("planted")
        return step()

    monkeypatch.setattr(llm.engine, "step", dying)
    start = time.monotonic()
    found = together(running, [body(p, stream=i % 2 == 1) for i, p in enumerate(PROMPTS)])
    for i, one in enumerate(found):
        if one.status_code == 200:  # its first token was on its way before the engine died
            assert i % 2 == 1
            assert "engine_dead" in one.text.splitlines()[-2]
        else:
            assert one.status_code == 503
    with running.client() as client:
        assert client.get("/health").status_code == 503
        assert client.get("/ready").status_code == 503
        for path, asked in (
            ("/v1/completions", body("Once")),
            ("/v1/completions", body("Once", stream=True)),
            ("/v1/completions", body(PROMPTS)),
            ("/v1/embeddings", {"input": PROMPTS}),
            ("/v1/messages", {"model": "stories", "max_tokens": 2,
                              "messages": [{"role": "user", "content": "x"}]}),
            ("/reset_prefix_cache", {}),
        ):  # fmt: skip
            answer = client.post(path, json=asked)
            assert answer.status_code == 503, (path, answer.text)
            assert answer.headers["content-type"] == "application/json"
        assert client.get("/metrics").status_code == 200
        assert client.get("/load").json()["server_load"] == 0
    assert time.monotonic() - start < 20
    told = [x for x in caplog.records if x.getMessage() == "the engine has stopped"]
    assert [(x.levelname, x.fields) for x in told] == [("ERROR", {"why": "planted"})]  # type: ignore[attr-defined]


def test_more_than_the_cache_holds() -> None:
    """Sequences give way and are computed again; their texts are those they have alone."""
    bodies = [body(f"{PROMPTS[i % 4]} {i}", max_tokens=120 + i) for i in range(24)]
    with serving(ServerConfig(), num_gpu_blocks_override=24, max_model_len=512) as running:
        alone = [text(together(running, [one])[0]) for one in bodies]
        before = running.llm.stats()["preemptions"]
        found = [text(one) for one in together(running, bodies)]
        assert running.llm.stats()["preemptions"] > before
        assert found == alone
        assert running.rest()["used_blocks"] == 0


def test_a_prompt_larger_than_the_cache() -> None:
    with serving(ServerConfig(), num_gpu_blocks_override=4, max_model_len=128) as running:
        (answer,) = together(running, [body("dog " * 120, max_tokens=4, n=4, temperature=1.0)])
        assert answer.status_code in (200, 400), answer.text
        assert running.rest()["used_blocks"] == 0


def test_an_endpoint_that_raises(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(running.service, "check_model", broken)
    with running.client() as client:
        for path in ("/v1/completions", "/v1/messages"):
            asked = {"model": "stories", "prompt": "x"} if "comp" in path else {
                "model": "stories", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]
            }  # fmt: skip
            answer = client.post(path, json=asked, headers={"x-request-id": "mine"})
            assert answer.status_code == 500
            assert answer.headers["x-request-id"] == "mine"
            assert "planted" not in answer.text
            assert ("type" in answer.json()) == (path == "/v1/messages")


@pytest.mark.parametrize("name", ["messages", "responses", "chat/completions"])
def test_what_breaks_a_stream_outside_of_its_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The last event has the shape of the API that was called."""

    def broken(*_: object, **__: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr("penstock.server.routes.messages._stop", broken)
    monkeypatch.setattr("penstock.server.routes.items.Items.finish", broken)
    monkeypatch.setattr("penstock.server.routes.chat._reason", broken)
    asked: dict[str, Any] = {"model": "stories", "stream": True, "temperature": 0}
    said = [{"role": "user", "content": "Hello"}]
    asked |= {"input": said} if name == "responses" else {"messages": said, "max_tokens": 8}
    with running.client() as client:
        answer = client.post(f"/v1/{name}", json=asked)
    assert answer.status_code == 200 and "planted" not in answer.text
    *head, data = answer.text.rstrip().split("\n\n")[-1].split("\n")
    told = json.loads(data.removeprefix("data: "))
    if name.startswith("chat"):
        assert head == [] and told["error"]["type"] == "server_error"
        return
    assert head == ["event: error"] and told["type"] == "error"
    where = told["error"] if name == "messages" else told
    assert "KeyError" in where["message"]
    assert name != "messages" or where["type"] == "api_error"
