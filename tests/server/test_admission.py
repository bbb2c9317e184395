"""From arrival to the engine: who is counted when, and who waits for whom."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx2 as httpx

from penstock.server import ServerConfig
from tests.server.conftest import Running, serving
from tests.server.test_access import ASK, BEARER, LONG, limited, slowly, too_many


def test_samples_that_run_dont_hide_requests_that_wait() -> None:
    config = ServerConfig(max_queue_size=2)
    with serving(config, num_gpu_blocks_override=64, max_num_seqs=8) as running:
        slowly(running)
        samples = LONG | {"n": 8}

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                posts = [asyncio.create_task(client.post("/v1/completions", json=samples))]
                while not running.llm.stats()["running"]:
                    await asyncio.sleep(0.01)
                for _ in range(5):
                    posts.append(asyncio.create_task(client.post("/v1/completions", json=samples)))
                    await asyncio.sleep(0.05)
                refused = [await post for post in posts[3:]]
                assert running.llm.stats()["waiting"] == 2
                for post in posts:
                    post.cancel()
                await asyncio.gather(*posts, return_exceptions=True)
                return refused

        for one in asyncio.run(ask()):
            too_many(one, "queue_full")
            assert "2 requests are waiting" in one.text
        running.rest()


# ── prompts in the making ────────────────────────────────────────────────────────────────────


@contextmanager
def held_encoding(running: Running, longer_than: int) -> Iterator[threading.Event]:
    """Texts of more characters stay in the tokenizer until the event is set."""
    go, tokenizer = threading.Event(), running.service.prompts.tokenizer
    encode = tokenizer.encode

    def held(text: str, *args: Any, **kwargs: Any) -> list[int]:
        if len(text) > longer_than:
            assert go.wait(30)
        return encode(text, *args, **kwargs)

    tokenizer.encode = held  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        del tokenizer.encode  # type: ignore[method-assign]


def test_short_prompts_dont_wait_behind_long_ones() -> None:
    with serving(ServerConfig(), num_gpu_blocks_override=64) as running:
        with held_encoding(running, 50_000) as go:

            async def ask() -> None:
                async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                    long = {"prompt": "dog " * 20_000}
                    posts = [
                        asyncio.create_task(client.post("/tokenize", json=long)) for _ in range(20)
                    ]
                    while len(running.service.inflight) < 20:
                        await asyncio.sleep(0.01)
                    assert (await client.get("/load")).json()["server_load"] == 20
                    for path, body in (
                        ("/v1/completions", ASK),
                        ("/tokenize", {"prompt": "dog"}),
                        ("/v1/embeddings", {"input": "dog"}),
                    ):
                        answer = await client.post(path, json=body)
                        assert answer.status_code == 200
                    go.set()
                    for post in posts:
                        assert (await post).status_code == 200

            asyncio.run(ask())
        assert not running.service.inflight


def test_time_counts_from_the_arrival() -> None:
    """A prompt that is still being made is in the queue, in its key's number, and in time."""
    config = limited(max_concurrency=1)
    with serving(replace(config, request_timeout_s=1.0), num_gpu_blocks_override=64) as running:
        long = {"prompt": "dog " * 400, "truncate_prompt_tokens": 4, "max_tokens": 1}
        with running.client(headers=BEARER) as client, held_encoding(running, 1000) as go:
            threading.Timer(0.4, go.set).start()
            answer = client.post("/v1/completions", json=long).json()
            assert 0.2 <= answer["penstock"]["queue_s"] < answer["penstock"]["ttft_s"] < 1
            go.clear()
            late = client.post("/v1/completions", json=long)
            assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
            go.clear()
            with ThreadPoolExecutor(1) as pool:
                first = pool.submit(client.post, "/tokenize", json={"prompt": long["prompt"]})
                while not (running.service.inflight or first.done()):
                    time.sleep(0.01)
                too_many(client.post("/v1/completions", json=ASK), "concurrency_limit_exceeded")
                go.set()
                assert first.result().status_code == 200
            assert client.post("/v1/completions", json=ASK).status_code == 200


def test_every_endpoint_that_works_counts() -> None:
    bodies = {
        "/tokenize": {"prompt": "dog"},
        "/detokenize": {"tokens": [5]},
        "/v1/messages/count_tokens": {
            "model": "stories", "messages": [{"role": "user", "content": "dog"}]
        },
    }  # fmt: skip
    served = serving(limited(requests_per_minute=3), num_gpu_blocks_override=64)
    with served as running, running.client(headers=BEARER) as client:
        for path, body in bodies.items():
            assert client.post(path, json=body).status_code == 200, path
        for path, body in bodies.items():
            assert client.post(path, json=body).status_code == 429, path


def test_what_was_refused_used_no_tokens() -> None:
    served = serving(limited(tokens_per_minute=30), num_gpu_blocks_override=64)
    with served as running, running.client(headers=BEARER) as client:
        refused = ASK | {"prompt": "dog " * 20, "priority": 5}  # the policy has none
        for _ in range(5):
            assert client.post("/v1/completions", json=refused).status_code == 400
        assert client.post("/v1/completions", json=ASK).status_code == 200


def test_who_leaves_while_the_prompt_is_made_holds_nothing() -> None:
    """Long prompts of clients that left before their turn aren't made at all."""
    with serving(limited(max_concurrency=8), num_gpu_blocks_override=64) as running:
        account, prompts = running.service.gate._accounts["first"], running.service.prompts
        encode, made = prompts.encode, list[int]()

        def counted(text: str, add_special_tokens: bool) -> list[int]:
            made.append(len(text))
            return encode(text, add_special_tokens)

        prompts.encode = counted  # type: ignore[method-assign]
        with held_encoding(running, 1000) as go:

            async def leave() -> None:
                async with httpx.AsyncClient(base_url=running.url, headers=BEARER) as client:
                    long = {"prompt": "dog " * 20_000}
                    posts = [
                        asyncio.create_task(client.post("/tokenize", json=long)) for _ in range(6)
                    ]
                    while len(running.service.inflight) < 6:
                        await asyncio.sleep(0.01)
                    assert account.running == 6
                    for post in posts:
                        post.cancel()
                    await asyncio.gather(*posts, return_exceptions=True)
                for _ in range(500):
                    if not running.service.inflight:
                        break
                    await asyncio.sleep(0.01)

            asyncio.run(leave())
            assert not running.service.inflight and account.running == 0
            go.set()
            for _, lane in running.service._lanes._lanes:
                lane.submit(int).result()
            assert len(made) == 1  # which had begun
        with running.client(headers=BEARER) as client:
            assert client.post("/v1/completions", json=ASK).status_code == 200
