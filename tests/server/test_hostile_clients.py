"""Clients that don't read, don't finish, or go away: cut off, and nothing is left of them."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest

from penstock.server import ServerConfig
from penstock.server.connection import MAX_HEAD_BYTES
from tests.server.conftest import Running, serving

LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
SECONDS = 0.5  # for whatever a client has to do in these tests


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    config = ServerConfig(body_timeout_s=SECONDS, trust_request_chat_template=True)
    with serving(config, num_gpu_blocks_override=256) as running:
        yield running


@pytest.fixture(scope="module")
def unread() -> Iterator[Running]:
    """Only impatient with clients that don't read: these send a large body first."""
    with serving(ServerConfig(write_timeout_s=SECONDS), num_gpu_blocks_override=256) as running:
        yield running


def connect(running: Running, receive_buffer: int | None = None) -> socket.socket:
    host, _, port = running.url.removeprefix("http://").partition(":")
    made = socket.socket()
    if receive_buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    made.settimeout(30)
    made.connect((host, int(port)))
    return made


def post(path: str, body: object, announced: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    length = len(data) if announced is None else announced
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode() + data


def answer(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    found = b""
    while piece := connection.recv(65536):
        found += piece
    return found


def well(running: Running) -> None:
    """Others are served as ever."""
    with running.client() as client:
        found = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4})
        assert found.status_code == 200
    stats = running.rest()
    assert stats["used_blocks"] == 0
    assert stats["requests"] == 0
    assert not running.service.inflight
    assert running.service.gate._accounts["everybody"].running == 0


def test_half_a_request_is_closed(strict: Running) -> None:
    halves = [b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "]
    with closing(connect(strict)) as whole:  # kept alive, then half a second request
        whole.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in whole.recv(65536)
        whole.sendall(b"GET /hea")
        assert b" 408 " in answer(whole)
    for half in halves:
        with closing(connect(strict)) as connection:
            connection.sendall(half)
            assert b" 408 " in answer(connection)
    well(strict)


def test_200_half_requests_stay_and_others_are_served(server: Running) -> None:
    held = [connect(server) for _ in range(200)]
    try:
        for i, connection in enumerate(held):
            half = post("/v1/completions", LONG, announced=10_000) if i % 2 else b"POST /v1"
            connection.sendall(half)
        well(server)
    finally:
        for connection in held:
            connection.close()


def test_a_body_that_trickles_in(strict: Running) -> None:
    with closing(connect(strict)) as connection:
        connection.sendall(post("/v1/completions", {}, announced=10_000))
        start = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - start < 20:
                connection.sendall(b" ")
                time.sleep(SECONDS / 10)
        assert time.monotonic() - start < 10
    with closing(connect(strict)) as connection:
        connection.sendall(post("/v1/messages", {}, announced=10_000))
        found = answer(connection)
    assert b" 408 " in found
    assert b'"timeout_error"' in found
    well(strict)


def test_a_head_without_end(strict: Running) -> None:
    with closing(connect(strict)) as connection:
        found = b""
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            for _ in range(64):
                connection.sendall(b"X-Long: " + b"a" * MAX_HEAD_BYTES)
                time.sleep(0.005)
            found = answer(connection)
        except ConnectionError:  # it was closed while there was more to come
            found = b" 431 "
    assert b" 431 " in found
    well(strict)
    with strict.client() as client:
        text = client.get("/metrics").text
    (line,) = re.findall(r'penstock:http_requests_total\{[^}]*status="431"\} (\S+)', text)
    assert float(line) >= 1


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET [ HTTP/9\r\n\r\n"]
)
def test_what_isnt_http(strict: Running, garbage: bytes) -> None:
    with closing(connect(strict)) as connection:
        connection.sendall(garbage + b"\r\n\r\n")
        head, _, body = answer(connection).partition(b"\r\n\r\n")
    assert b" 400 " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    well(strict)


@pytest.mark.parametrize("path", ["/v1/completions", "/detokenize"])
def test_a_client_that_never_reads(unread: Running, path: str) -> None:
    """Some 20 MB are more than the kernel keeps for it; the server lets go of the connection."""
    bodies = {
        "/v1/completions": LONG | {"n": 48, "temperature": 1.0, "logprobs": 20, "stream": True},
        "/detokenize": {"tokens": [long_token(unread)] * 2_500_000},
    }
    with closing(connect(unread, receive_buffer=1024)) as connection:
        connection.sendall(post(path, bodies[path]))
        with unread.client() as client:
            found = client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 4})
            assert found.status_code == 200
        start = time.monotonic()
        while serves(unread, connection) and time.monotonic() - start < 30:
            time.sleep(0.1)
        assert not serves(unread, connection)
    well(unread)


def long_token(running: Running) -> int:
    tokenizer = running.service.prompts.tokenizer
    return max(range(1000, 4096), key=lambda token: len(tokenizer.token_bytes(token)))


def serves(running: Running, connection: socket.socket) -> bool:
    """Whether the server, in this process too, still has its end of the connection open."""
    ports = (int(running.url.rpartition(":")[2]), connection.getsockname()[1])
    return any(
        found.raddr and (found.laddr.port, found.raddr.port) == ports
        for found in psutil.Process().net_connections("tcp")
    )


def test_1000_connects_and_aborts(server: Running) -> None:
    """Before the request, within it, while it waits, and in mid-stream."""
    request = post("/v1/completions", LONG | {"stream": True})
    several = post("/v1/completions", LONG | {"prompt": ["Once", "A dog"], "stream": True})
    whole = post("/v1/completions", LONG)
    for i in range(1000):
        with closing(connect(server)) as connection:
            # An abort: the connection is reset instead of closed.
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            kind = i % 10
            if kind < 5:
                connection.sendall(request[: kind * 50])
            elif kind < 7:
                connection.sendall(whole)
            else:
                connection.sendall(several if kind == 7 else request)
                if i % 20 >= 18:
                    assert connection.recv(256).startswith(b"HTTP/1.1 200")
    well(server)


CLIENT = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.sendall(bytes.fromhex(sys.argv[2]))
while True:
    print(len(connection.recv(512)), flush=True)
"""


def test_a_client_killed_in_mid_stream(server: Running) -> None:
    request = post("/v1/completions", LONG | {"n": 16, "temperature": 1.0, "stream": True})
    port = server.url.rpartition(":")[2]
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, port, request.hex()], stdout=subprocess.PIPE
    )
    with client:
        assert client.stdout is not None
        assert client.stdout.readline()
        client.send_signal(signal.SIGKILL)
        client.wait(10)
    well(server)


# ── templates of requests ────────────────────────────────────────────────────────────────────

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "import": "{% import 'os' as os %}{{ os.environ }}",
    "include": "{% include '/etc/passwd' %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.__builtins__ }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a product": "{{ 'a' * 1000000000 }}",
    "doubling": "{% set n = namespace(a='aaaaaaaaaa') %}{% for i in range(60) %}"
    "{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a range": "{{ range(1000000000)|list|length }}",
    "nesting": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "nested lists": "{% set n = namespace(a=[1]) %}{% for i in range(5000) %}"
    "{% set n.a = [n.a] %}{% endfor %}{{ n.a|tojson }}",
    "a surrogate": "{{ '\\ud800' }}",
    "syntax": "{% for %}",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_templates(strict: Running, what: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    with strict.client() as client:
        found = client.post("/v1/chat/completions", json=body | {"chat_template": HOSTILE[what]})
    assert found.status_code == 400, found.text[:300]
    assert found.json()["error"]["message"]


@pytest.mark.slow
def test_an_endless_template_doesnt_hold_up_others(strict: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    statuses: list[int] = []

    def ask() -> None:
        with strict.client() as client:
            found = client.post("/v1/chat/completions", json=body | {"chat_template": ENDLESS})
            statuses.append(found.status_code)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    served = 0
    with strict.client() as client:
        while any(thread.is_alive() for thread in asking):
            found = client.post("/v1/chat/completions", json=body)
            assert found.status_code == 200
            served += 1
    for thread in asking:
        thread.join()
    assert statuses == [400, 400]
    assert served > 3
