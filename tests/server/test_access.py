"""Who is let in, how much they may ask for, and what is said of them in answers and logs."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2 as httpx
import pytest

from penstock.server import Key, Limits, ServerConfig
from penstock.server.logs import JsonFormatter, LineFormatter
from penstock.server.page import files
from tests.server.conftest import Running, serving

ASK = {"prompt": "Once", "max_tokens": 4}
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
BEARER = {"authorization": "Bearer one"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Running]:
    config = ServerConfig(
        keys=(Key.of("one", "first"), Key.of("two", "second")),
        allowed_origins=("https://app.example",),
    )
    with serving(config, num_gpu_blocks_override=64) as running:
        yield running


CLOSED = ["/v1/models", "/metrics", "/load", "/version", "/openapi.json", "/page/events",
          "/v1/models/", "//v1/models", "/page/../v1/models", "/page/%2e%2e/v1/models",
          "/page/%65vents", "/page/events/", "/page/", "/page/nope", "/health/", "/health/../load",
          "/HEALTH", "/nope"]  # fmt: skip


@pytest.mark.parametrize("path", CLOSED)
def test_paths_that_need_a_key(locked: Running, path: str) -> None:
    # By hand: clients tidy paths up.
    host, _, port = locked.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    with closing(connection):
        connection.putrequest("GET", path)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert json.loads(answer.read())["error"]["code"] == "invalid_api_key"


def test_open_paths(locked: Running) -> None:
    with locked.client() as client:
        for path in ("/", "/health", "/ready", sorted(files())[1]):
            answer = client.get(path)
            assert answer.status_code != 401, path


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer"}, {"authorization": "Basic one"},
     {"authorization": "one"}, {"authorization": "Bearer onf"}, {"x-api-key": "three"},
     {"authorization": "Bearer one two"}, {"authorization": b"Bearer \xff\xfe"}],
)  # fmt: skip
def test_wrong_keys(locked: Running, headers: dict[str, Any]) -> None:
    with locked.client() as client:
        answer = client.post("/v1/completions", json=ASK, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        answer = client.post("/v1/messages", json=ASK, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["type"] == "authentication_error"
        assert answer.json()["type"] == "error"


@pytest.mark.parametrize("headers", [BEARER, {"authorization": "bearer two"}, {"x-api-key": "two"}])
def test_keys(locked: Running, headers: dict[str, str]) -> None:
    with locked.client() as client:
        assert client.post("/v1/completions", json=ASK, headers=headers).status_code == 200


def test_browsers(locked: Running, server: Running) -> None:
    site = {"origin": "https://app.example"}
    preflight = {**site, "access-control-request-method": "POST"}
    with locked.client() as client:
        answer = client.options("/v1/completions", headers=preflight)
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        answer = client.post("/v1/completions", json=ASK, headers={**BEARER, **site})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["vary"] == "Origin"
        answer = client.get("/v1/models", headers=site)  # a script may read why
        assert answer.status_code == 401
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = {**BEARER, "origin": "https://evil.example"}
        answer = client.get("/v1/models", headers=other)
        assert "access-control-allow-origin" not in answer.headers
    with server.client() as client:  # off unless somebody is named
        answer = client.get("/health", headers=site)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        assert client.options("/v1/completions", headers=preflight).status_code == 403


# ── limits ───────────────────────────────────────────────────────────────────────────────────


def limited(**limits: Any) -> ServerConfig:
    return ServerConfig(keys=(Key.of("one", "first", Limits(**limits)), Key.of("two", "second")))


def slowly(running: Running) -> None:
    """Each step of its engine takes a while."""
    step = running.llm.engine.step

    def slow() -> Any:
        time.sleep(0.02)
        return step()

    running.llm.engine.step = slow  # type: ignore[method-assign]


def too_many(answer: httpx.Response, code: str) -> None:
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == code
    assert int(answer.headers["retry-after"]) >= 1


def test_rates() -> None:
    served = serving(limited(requests_per_minute=3), num_gpu_blocks_override=64)
    with served as running, running.client(headers=BEARER) as client:
        for _ in range(3):
            assert client.post("/v1/completions", json=ASK).status_code == 200
        too_many(client.post("/v1/completions", json=ASK), "rate_limit_exceeded")
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        too_many(client.post("/v1/chat/completions", json=chat), "rate_limit_exceeded")
        too_many(
            client.post("/v1/responses", json={"input": "x", "stream": True}),
            "rate_limit_exceeded",
        )
        too_many(client.post("/v1/embeddings", json={"input": "x"}), "rate_limit_exceeded")
        other = {"authorization": "Bearer two"}
        assert client.post("/v1/completions", json=ASK, headers=other).status_code == 200


def test_tokens_a_minute() -> None:
    served = serving(limited(tokens_per_minute=20), num_gpu_blocks_override=64)
    with served as running, running.client(headers=BEARER) as client:
        many = ASK | {"max_tokens": 30, "ignore_eos": True}
        assert client.post("/v1/completions", json=many).status_code == 200
        too_many(client.post("/v1/completions", json=ASK), "rate_limit_exceeded")


def test_requests_at_once_are_given_back() -> None:
    with serving(limited(max_concurrency=2), num_gpu_blocks_override=64) as running:
        account = running.service.gate._accounts["first"]
        slowly(running)
        with running.client(headers=BEARER) as client:
            several = ASK | {"prompt": ["a", "b", "c"]}  # no waiting would help
            assert client.post("/v1/completions", json=several).status_code == 400
            assert account.running == 0
            for _ in range(3):  # left in mid-stream
                with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as one:
                    lines = one.iter_lines()  # which leaves when it is forgotten
                    assert next(lines)
                    assert account.running == 1
                running.rest()
                assert account.running == 0
            bad = LONG | {"prompt": ["a", "b"], "allowed_token_ids": [8192]}
            for _ in range(3):  # refused by the engine
                assert client.post("/v1/completions", json=bad).status_code == 400
                assert account.running == 0
            both = LONG | {"prompt": ["a", "b"], "stream": True}
            with client.stream("POST", "/v1/completions", json=both) as one:
                lines = one.iter_lines()
                assert next(lines)
                too_many(client.post("/v1/completions", json=ASK), "concurrency_limit_exceeded")
            running.rest()
            assert account.running == 0


def test_several_prompts_that_fail_are_all_given_back() -> None:
    with serving(limited(max_concurrency=8), num_gpu_blocks_override=64) as running:
        account = running.service.gate._accounts["first"]

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("planted")

        running.llm.embed = broken  # type: ignore[method-assign, assignment]
        running.llm.generate = broken  # type: ignore[method-assign, assignment]
        with running.client(headers=BEARER) as client:
            for path, field in (("/v1/embeddings", "input"), ("/v1/completions", "prompt")):
                answer = client.post(path, json={field: ["a", "b", "c", "d"]})
                assert answer.status_code == 500, answer.text
                assert account.running == 0
                assert not running.service.inflight


def test_a_full_queue() -> None:
    config = ServerConfig(max_queue_size=2)
    with serving(config, num_gpu_blocks_override=64, max_num_seqs=1) as running:

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as client:
                posts = [client.post("/v1/completions", json=LONG) for _ in range(12)]
                return list(await asyncio.gather(*posts))

        found = asyncio.run(ask())
        refused = [one for one in found if one.status_code != 200]
        assert 0 < len(refused) < 12
        for one in refused:
            too_many(one, "queue_full")
        running.rest()
        with running.client() as client:
            assert client.post("/v1/completions", json=ASK).status_code == 200


def test_a_request_that_takes_too_long() -> None:
    config = ServerConfig(request_timeout_s=0.5)
    with serving(config, num_gpu_blocks_override=64) as running:
        slowly(running)
        with running.client() as client:
            answer = client.post("/v1/completions", json=LONG)
            assert answer.status_code == 408
            assert answer.json()["error"]["code"] == "request_timeout"
            answer = client.post("/v1/completions", json=LONG | {"stream": True})
            assert answer.status_code == 200
            last = [line for line in answer.text.splitlines() if line][-1]
            assert json.loads(last[6:])["error"]["code"] == "request_timeout"
        stats = running.rest()
        assert stats["used_blocks"] == 0
        assert running.service.gate._accounts["everybody"].running == 0


# ── ids and logs ─────────────────────────────────────────────────────────────────────────────


def test_request_ids(server: Running) -> None:
    with server.client() as client:
        answer = client.post("/v1/completions", json=ASK, headers={"x-request-id": "a.b_c:1-2"})
        assert answer.headers["x-request-id"] == "a.b_c:1-2"
        assert answer.json()["id"].startswith("cmpl-a.b_c:1-2-")
        for given in ("a b", "a\tb", "x" * 129, "ä".encode(), b"\xff", "a=b", ""):
            made = client.get("/health", headers={"x-request-id": given}).headers["x-request-id"]
            assert len(made) == 32
            assert made.isalnum()


def test_the_same_id_twice_at_once(server: Running) -> None:
    statuses: list[int] = []

    def ask() -> None:
        with server.client(headers={"x-request-id": "same"}) as client:
            statuses.append(client.post("/v1/completions", json=LONG).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 4


def test_fields_cant_forge_lines_of_the_log() -> None:
    evil = 'x"\noutcome=stop key=admin\r\n{"message": "request"}\u2028\x85\x1b[31m'
    record = logging.LogRecord("penstock.server", logging.INFO, "", 0, evil, None, None)
    record.fields = {"user": evil, "prompt": None}
    for formatter in (LineFormatter(), JsonFormatter()):
        line = formatter.format(record)
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line
    assert json.loads(line)["user"] == evil


def test_prompts_are_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for log_prompts in (False, True):
        caplog.clear()
        config = ServerConfig(log_prompts=log_prompts)
        with (
            caplog.at_level(logging.INFO, "penstock.server"),
            serving(config, num_gpu_blocks_override=64) as running,
            running.client() as client,
        ):
            client.post("/v1/completions", json=ASK | {"prompt": "a purple walrus"})
            client.post("/v1/completions", json={"prompt": "a purple walrus", "n": "x"})
            running.rest()
        said = " ".join(str(getattr(r, "fields", "")) + r.getMessage() for r in caplog.records)
        assert ("walrus" in said) == log_prompts
