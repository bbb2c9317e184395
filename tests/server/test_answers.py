"""Every HTTP request leaves a trace: counted by route and status, and one line of the log."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.server import Key, Limits, ServerConfig
from penstock.server.errors import ApiError
from penstock.server.logs import JsonFormatter, LineFormatter
from penstock.server.metrics import rejection_reason
from tests.server.conftest import Running, serving

ASK = {"prompt": "Once", "max_tokens": 1}
ALICE = {"Authorization": "Bearer one"}
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    config = ServerConfig(
        keys=(Key.of("one", "alice"), Key.of("two", "bob", Limits(requests_per_minute=1))),
        allowed_hosts=("127.0.0.1", "localhost"),
        max_body_bytes=20_000,
        body_timeout_s=0.3,
    )
    with serving(config, num_gpu_blocks_override=64) as running:
        with running.client() as client:  # bob's one request of this minute
            headers = {"Authorization": "Bearer two"}
            assert client.post(COMPLETIONS, json=ASK, headers=headers).status_code == 200
        end = time.monotonic() + 10  # its answer comes before it is counted
        while not _counts(running, "penstock:http_requests_total") and time.monotonic() < end:
            time.sleep(0.01)
        yield running


Counts = dict[tuple[str, ...], float]


def _counts(running: Running, name: str) -> Counts:
    """By the labels besides the model's name, in their alphabetical order."""
    found: Counts = {}
    for family in text_string_to_metric_families(running.service.metrics.text().decode()):
        for sample in family.samples:
            if sample.name == name:
                labels = sorted((k, v) for k, v in sample.labels.items() if k != "model_name")
                found[tuple(v for _, v in labels)] = sample.value
    return found


class Seen:
    """What a test's requests have left."""

    def __init__(self, running: Running, caplog: pytest.LogCaptureFixture) -> None:
        self._running, self._caplog = running, caplog
        self._before = [_counts(running, name) for name in self.NAMES]

    NAMES = ("penstock:http_requests_total", "penstock:request_rejections_total")

    def counted(self) -> tuple[Counts, Counts]:
        """(HTTP requests, rejections) that were added."""
        now = [_counts(self._running, name) for name in self.NAMES]
        http, rejected = (
            {k: v - before.get(k, 0.0) for k, v in after.items() if v != before.get(k, 0.0)}
            for before, after in zip(self._before, now, strict=True)
        )
        return http, rejected

    def http(self, wanted: Counts) -> bool:
        """Whether these come to be counted; the client may know its answer before."""
        end = time.monotonic() + 10
        while self.counted()[0] != wanted and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.02)  # the line follows
        return self.counted()[0] == wanted

    def awaited(self, message: str) -> list[dict[str, Any]]:
        """The lines, once there is one: what a client left behind ends a little later."""
        end = time.monotonic() + 10
        while not self.lines(message) and time.monotonic() < end:
            time.sleep(0.01)
        return self.lines(message)

    def lines(self, message: str = "answered") -> list[dict[str, Any]]:
        return [x.fields for x in self._caplog.records if x.getMessage() == message]


@pytest.fixture
def seen(strict: Running, caplog: pytest.LogCaptureFixture) -> Seen:
    caplog.set_level(logging.INFO, "penstock.server")
    return Seen(strict, caplog)


def _slow_body(running: Running) -> int:
    host, _, port = running.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer one\r\n"
            b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        )
        return int(connection.recv(4096).split()[1])


def _asks(
    path: str, status: int, method: str = "POST", headers: dict[str, str] | None = None, **more: Any
) -> Callable[[Running], None]:
    def ask(running: Running) -> None:
        with running.client() as client:
            answer = client.request(method, path, headers=ALICE | (headers or {}), **more)
        assert answer.status_code == status, answer.text

    return ask


def _waits(running: Running) -> None:
    assert _slow_body(running) == 408


REFUSALS: dict[str, tuple[Callable[[Running], None], str, int, str, str | None, str | None]] = {
    # what is asked, route, status, reason, code, whose key
    "no key": (_asks(COMPLETIONS, 401, headers={"Authorization": ""}, json=ASK),
               COMPLETIONS, 401, "unauthorized", "invalid_api_key", None),
    "no key for a model": (_asks("/v1/models/a/b", 401, "GET", {"Authorization": "x"}),
                           "/v1/models/{name:path}", 401, "unauthorized", "invalid_api_key", None),
    "no key for the metrics": (_asks("/metrics", 401, "GET", {"Authorization": "x"}),
                               "/metrics", 401, "unauthorized", "invalid_api_key", None),
    "another host": (_asks(COMPLETIONS, 403, headers={"Host": "evil.example"}, json=ASK),
                     COMPLETIONS, 403, "forbidden", "host_not_allowed", None),
    "no such path": (_asks("/nowhere", 404, "GET"), "other", 404, "not_found", None, "alice"),
    "no such model": (_asks(COMPLETIONS, 404, json=ASK | {"model": "gpt-5"}),
                      COMPLETIONS, 404, "not_found", "model_not_found", "alice"),
    "a method": (_asks(COMPLETIONS, 405, "PUT"), COMPLETIONS, 405, "method_not_allowed", None,
                 "alice"),
    "a slow body": (_waits, COMPLETIONS, 408, "timeout", "body_timeout", "alice"),
    "a large body": (_asks(COMPLETIONS, 413, json={"prompt": "x" * 20_000}),
                     COMPLETIONS, 413, "too_large", "request_too_large", "alice"),
    "another media type": (_asks(COMPLETIONS, 415, content=b"{}",
                                 headers={"Content-Type": "text/plain"}),
                           COMPLETIONS, 415, "unsupported_media_type", "unsupported_media_type",
                           "alice"),
    "too many": (_asks(COMPLETIONS, 429, headers={"Authorization": "Bearer two"}, json=ASK),
                 COMPLETIONS, 429, "rate_limit", "rate_limit_exceeded", "bob"),
    "too many, streamed": (_asks(COMPLETIONS, 429, headers={"Authorization": "Bearer two"},
                                 json=ASK | {"stream": True}),
                           COMPLETIONS, 429, "rate_limit", "rate_limit_exceeded", "bob"),
    "no JSON": (_asks(COMPLETIONS, 400, content=b"{,}",
                      headers={"Content-Type": "application/json"}),
                COMPLETIONS, 400, "invalid", "invalid_json", "alice"),
    "a field": (_asks("/v1/messages", 400, json={"nonsense": 1}),
                "/v1/messages", 400, "invalid", None, "alice"),
    "too long": (_asks(COMPLETIONS, 400, json={"prompt": "a b c " * 2000}),
                 COMPLETIONS, 400, "context_length", "context_length_exceeded", "alice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_who_is_refused_leaves_a_line_and_a_count(strict: Running, seen: Seen, case: str) -> None:
    ask, route, status, reason, code, key = REFUSALS[case]
    ask(strict)
    assert seen.http({(route, str(status)): 1})
    assert seen.counted()[1] == {(reason,): 1}
    assert seen.lines("request") == []
    (line,) = seen.lines()
    assert (line["status"], line["key"]) == (status, key)
    assert line["code"] == code or case == "a field"
    assert line["endpoint"] == route or route in ("other", "/v1/models/{name:path}")
    assert re.fullmatch("[0-9a-f]{32}", line["request_id"])
    assert line["error"]
    assert 0 <= line["seconds"] < 10
    assert "Bearer" not in line.values()


def test_a_full_queue_and_a_server_that_ends(
    strict: Running, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise ApiError(429, "1 request is waiting, and 1 may.", code="queue_full")

    monkeypatch.setattr(strict.service.gate, "admit", full)
    _asks(COMPLETIONS, 429, json=ASK)(strict)
    monkeypatch.setattr(strict.service, "state", "draining")
    _asks(COMPLETIONS, 503, json=ASK)(strict)
    assert seen.http({(COMPLETIONS, "429"): 1, (COMPLETIONS, "503"): 1})
    assert seen.counted()[1] == {("queue_full",): 1, ("unavailable",): 1}
    assert [line["code"] for line in seen.lines()] == ["queue_full", "server_draining"]


def test_polling_is_counted_and_not_logged(
    strict: Running, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    with strict.client(headers=ALICE) as client:
        for path in ("/", "/health", "/ready", "/metrics", "/load", "/page/main.js"):
            assert client.get(path).status_code == 200, path
        with client.stream("GET", "/page/events") as events:
            next(events.iter_lines())
    wanted = {(path, "200"): 1.0 for path in ("/", "/health", "/load", "/metrics", "/page/events",
                                              "/page/{name}", "/ready")}  # fmt: skip
    assert seen.http(wanted)
    assert seen.lines() == []
    with strict.client() as client:
        for state in ("loading", "loading", "loading", "ready", "failed"):
            monkeypatch.setattr(strict.service, "state", state)
            status = client.get("/ready").status_code
            assert status == (200 if state == "ready" else 503)
    assert seen.http(wanted | {("/ready", "503"): 4, ("/ready", "200"): 2})
    first, again = seen.lines()  # that it isn't ready is worth one, until it was
    assert first.keys() == again.keys()
    assert (first["endpoint"], first["status"], first["key"]) == ("/ready", 503, None)
    assert seen.counted()[1] == {}  # nobody was refused


def test_what_needs_no_engine_is_a_line(strict: Running, seen: Seen) -> None:
    _asks("/tokenize", 200, json={"prompt": "Once"}, headers={"x-request-id": "mine-3"})(strict)
    _asks("/v1/models", 200, "GET")(strict)
    assert seen.http({("/tokenize", "200"): 1, ("/v1/models", "200"): 1})
    one, two = seen.lines()
    assert (one["request_id"], one["method"], one["endpoint"]) == ("mine-3", "POST", "/tokenize")
    assert (two["method"], two["status"], two["key"]) == ("GET", 200, "alice")
    assert "error" not in one


def test_what_the_engine_accounts_for_is_no_second_line(strict: Running, seen: Seen) -> None:
    _asks(COMPLETIONS, 200, json=ASK)(strict)
    _asks(COMPLETIONS, 200, json=ASK | {"stream": True, "prompt": ["Once", "Twice"]})(strict)
    _asks("/v1/embeddings", 200, json={"input": "a dog"})(strict)
    _asks(COMPLETIONS, 400, json=ASK | {"allowed_token_ids": [10**6]})(strict)
    strict.rest()
    assert seen.http(
        {(COMPLETIONS, "200"): 2, (COMPLETIONS, "400"): 1, ("/v1/embeddings", "200"): 1}
    )
    assert seen.counted()[1] == {("invalid",): 1}
    assert seen.lines() == []
    assert len(seen.lines("request")) == 5


@pytest.mark.alone  # it must be seen to have left before the answer is done
def test_a_client_that_left_is_counted_apart(strict: Running, seen: Seen) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "n": 4})
    host, _, port = strict.url.removeprefix("http://").partition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=30)) as connection:
        headers = ALICE | {"Content-Type": "application/json"}
        connection.request("POST", COMPLETIONS, body, headers)
        while not strict.service.llm.engine.requests:
            time.sleep(0.001)
    assert seen.http({(COMPLETIONS, "499"): 1})
    assert seen.counted()[1] == {}
    (line,) = seen.awaited("request")
    assert line["outcome"] == "abort"
    assert seen.lines() == []


def test_a_failure_of_the_server_is_no_refusal(
    strict: Running, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(strict.service, "check_model", broken)
    _asks("/v1/models", 500, "GET")(strict)
    assert seen.http({("/v1/models", "500"): 1})
    assert seen.counted()[1] == {}
    (line,) = seen.lines()
    assert line["status"] == 500
    assert len(seen.lines("an internal error")) == 1


def test_unknown_paths_are_one_series_and_a_short_line(
    strict: Running, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "abc":
        _asks(f"/{name * 5000}", 404, "GET")(strict)
    assert seen.http({("other", "404"): 3})
    assert len(seen.lines()) == 3
    for line in seen.lines():
        assert len(line["endpoint"]) == len(line["error"]) == 256
        assert line["endpoint"].endswith("a…") or line["endpoint"][1] in "bc"
    for formatter in (LineFormatter(), JsonFormatter()):
        assert all(len(formatter.format(record)) < 1000 for record in caplog.records)


def test_without_a_log_there_are_counts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.server")
    with serving(ServerConfig(log_requests=False), num_gpu_blocks_override=64) as running:
        seen = Seen(running, caplog)
        _asks("/nowhere", 404, "GET")(running)
        assert seen.http({("other", "404"): 1})
        assert seen.lines() == []


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [(400, None, "invalid"), (422, None, "invalid"), (431, "headers", "invalid"),
     (408, "request_timeout", "timeout"), (429, None, "rate_limit"),
     (429, "concurrency_limit_exceeded", "concurrency_limit"), (503, "engine_dead", "unavailable"),
     (499, None, None), (500, None, None), (501, None, None)],
)  # fmt: skip
def test_reasons_are_few(status: int, code: str | None, reason: str | None) -> None:
    assert rejection_reason(ApiError(status, "It went wrong.", code=code)) == reason
