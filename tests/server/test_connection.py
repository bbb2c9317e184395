"""What a connection does beside one request after the other: upgrades, pipelines, rests."""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from penstock.engine.engine import Engine
from penstock.server import ServerConfig
from penstock.server.connection import MAX_HEAD_BYTES
from tests.server import conftest
from tests.server.conftest import Running, serving
from tests.server.test_hostile_clients import answer, connect, post, well

SHORT = {"prompt": "Once", "max_tokens": 2}
LONG = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
MOST = 1 << 16  # bytes of a body


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """Waits half a second, for whatever it is."""
    made = conftest.uvicorn_config

    def config(*arguments: Any) -> Any:
        found = made(*arguments)
        found.timeout_keep_alive = 0.5  # type: ignore[assignment]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest, "uvicorn_config", config)
        chosen = ServerConfig(body_timeout_s=0.5, max_body_bytes=MOST)
        with serving(chosen, num_gpu_blocks_override=256) as running:
            yield running


class Stream(io.BytesIO):
    """What `http.client` reads an answer from."""

    def makefile(self, *_: Any) -> Stream:
        return self


def responses(data: bytes) -> list[tuple[int, bytes]]:
    """(status, body) of all answers in what came."""
    source, found = Stream(data), []
    while source.tell() < len(data):
        made = http.client.HTTPResponse(source)  # type: ignore[arg-type]
        made._close_conn = lambda: None  # type: ignore[attr-defined]
        made.begin()
        found.append((made.status, made.read()))
    return found


def ended(connection: socket.socket) -> list[tuple[int, bytes]]:
    """All answers, having asked for one more that is the last."""
    connection.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    found = responses(answer(connection))
    assert found[-1][0] == 200
    return found[:-1]


def upgrading(request: bytes) -> bytes:
    return request.replace(b"Host:", UPGRADE + b"Host:", 1)


def slowed(running: Running, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Its engine, from now on of 50 steps a second: `LONG` takes eight."""
    engine = running.llm.engine
    step = engine.step

    def slow() -> Any:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(engine, "step", slow)
    return engine


# ── upgrades ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("split", ["whole", "head and body", "bytes"])
def test_an_upgrade_is_ignored(server: Running, split: str) -> None:
    request = upgrading(post("/v1/completions", SHORT))
    middle = request.index(b"\r\n\r\n") + 4
    pieces = {"whole": [request], "head and body": [request[:middle], request[middle:]],
              "bytes": [request[i : i + 1] for i in range(len(request))]}[split]  # fmt: skip
    with closing(connect(server)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(0.05 if split == "head and body" else 0)
        ((status, body),) = ended(connection)
    assert status == 200
    assert json.loads(body)["choices"]


def test_a_body_after_an_upgrade_is_no_request(server: Running) -> None:
    inner = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = post("/v1/completions", "", announced=len(inner))[:-2]
    with closing(connect(server)) as connection:
        connection.sendall(upgrading(head))
        time.sleep(0.05)
        connection.sendall(inner)
        ((status, _),) = ended(connection)
    assert status == 400  # it isn't JSON


def test_upgrades_in_pieces_and_one_after_the_other(server: Running) -> None:
    data = json.dumps(SHORT).encode()
    chunked = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
    )
    with closing(connect(server)) as connection:
        connection.sendall(upgrading(HEALTH) + upgrading(chunked) + upgrading(HEALTH))
        found = ended(connection)
    assert [status for status, _ in found] == [200, 200, 200]
    assert json.loads(found[1][1])["choices"]


def test_nothing_is_read_after_connect(server: Running) -> None:
    with closing(connect(server)) as connection:
        connection.sendall(b"CONNECT /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEALTH)
        ((status, _),) = responses(answer(connection))
    assert status >= 400


# ── pipelines ────────────────────────────────────────────────────────────────────────────────


def test_requests_sent_ahead_are_answered_in_their_order(server: Running) -> None:
    large = post("/v1/completions", {"prompt": "a" * 300_000, "max_tokens": 1})
    with closing(connect(server)) as connection:
        connection.sendall(post("/v1/completions", SHORT) + HEALTH + large[:100])
        time.sleep(0.05)
        connection.sendall(large[100:] + HEALTH[:20])
        time.sleep(0.05)
        connection.sendall(HEALTH[20:] + post("/tokenize", {"prompt": "a"}))
        found = ended(connection)
    assert [status for status, _ in found] == [200, 200, 400, 200, 200]
    assert b"choices" in found[0][1]
    assert b"tokens" in found[4][1]


@pytest.mark.parametrize("ahead", [HEALTH, HEALTH * 3, HEALTH[:20], post("/tokenize", {}, 10**6)])
@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_ahead_and_leaves_is_missed(
    server: Running, ahead: bytes, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = slowed(server, monkeypatch)
    with closing(connect(server)) as connection:
        connection.sendall(post("/v1/completions", LONG | {"stream": stream}))
        while not engine.requests:
            time.sleep(0.005)
        connection.sendall(ahead)
        time.sleep(0.05)
    assert server.rest(2)["requests"] == 0


def test_too_much_sent_ahead_is_cut_off(hasty: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = slowed(hasty, monkeypatch)
    with closing(connect(hasty)) as connection:
        connection.sendall(post("/v1/completions", LONG))
        while not engine.requests:
            time.sleep(0.005)
        with pytest.raises(ConnectionError):  # noqa: PT012
            for _ in range(100):
                connection.sendall(HEALTH * ((MOST + MAX_HEAD_BYTES) // len(HEALTH) // 8))
                time.sleep(0.01)
    monkeypatch.undo()
    well(hasty)


def test_half_a_request_behind_a_long_answer_is_waited_for(
    hasty: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(hasty, monkeypatch)
    body = LONG | {"max_tokens": 50}  # a second
    with closing(connect(hasty)) as connection:
        connection.sendall(post("/v1/completions", body) + b"GET /hea")
        (first, second) = responses(answer(connection))
    assert (first[0], second[0]) == (200, 408)
    assert b"choices" in first[1]


# ── what is between two requests ─────────────────────────────────────────────────────────────


def trickles(running: Running, begin: bytes, piece: bytes) -> float:
    """Seconds for which a connection stays open that was answered `begin`."""
    with closing(connect(running)) as connection:
        connection.sendall(begin)
        assert connection.recv(65536)
        start = time.monotonic()
        with suppress(ConnectionError):  # which is what is waited for
            while time.monotonic() - start < 4:
                connection.sendall(piece)
                time.sleep(0.05)
        return time.monotonic() - start


@pytest.mark.parametrize(
    "begin", [post("/nope", {}, 10**4), post("/v1/completions", {}, MOST + 1)], ids=["404", "413"]
)
def test_a_body_that_isnt_read_must_end(hasty: Running, begin: bytes) -> None:
    assert trickles(hasty, begin, b"x") < 2


def test_blank_lines_hold_no_connection(hasty: Running) -> None:
    assert trickles(hasty, HEALTH, b"\r\n") < 2


def test_a_body_that_isnt_read_may_come_late(server: Running) -> None:
    with closing(connect(server)) as connection:
        connection.sendall(post("/nope", {}, 10)[:-2])
        found = connection.recv(65536)
        assert b" 404 " in found
        assert b"connection: close" not in found.lower()
        connection.sendall(b"x" * 10)
        connection.sendall(post("/v1/completions", SHORT))
        assert [status for status, _ in ended(connection)] == [200]


def test_who_leaves_within_a_body_is_no_refusal(server: Running) -> None:
    def left() -> tuple[float, float]:
        lines = client.get("/metrics").text.splitlines()
        name = 'endpoint="/v1/completions",'
        counts = [
            sum(float(x.split()[-1]) for x in lines
                if x.startswith("penstock:http_requests_total{") and f'status="{status}"' in x
                and name in x)
            for status in (499, 400)
        ]  # fmt: skip
        return counts[0], counts[1]

    with server.client() as client:
        gone, wrong = left()
        with closing(connect(server)) as connection:
            connection.sendall(post("/v1/completions", SHORT)[:-5])
            time.sleep(0.05)
        end = time.monotonic() + 5
        while left() == (gone, wrong) and time.monotonic() < end:
            time.sleep(0.02)
        assert left() == (gone + 1, wrong)
