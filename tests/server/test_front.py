"""What every request passes first: browsers' questions, hosts, methods and paths."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from penstock.server import ServerConfig
from tests.server.conftest import Running, serving

SITE = "https://app.example"
# What the official clients for browsers ask for.
HEADERS = ("authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,"
           "x-stainless-package-version,x-stainless-retry-count,x-stainless-runtime,"
           "x-stainless-timeout,anthropic-version,anthropic-dangerous-direct-browser-access"
           )  # fmt: skip
BODY = {"prompt": "Once", "max_tokens": 1}


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    config = ServerConfig(
        allowed_origins=(SITE,), allowed_hosts=("llm.example.org", "[fd00::1]", "127.0.0.1")
    )
    with serving(config, num_gpu_blocks_override=64) as running:
        yield running


def status_of(running: Running, head: str) -> int:
    """Of the answer to a request as it is written here."""
    host, _, port = running.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        answer = connection.recv(1 << 16).decode()
    return int(answer.split(" ", 2)[1])


# ── browsers ─────────────────────────────────────────────────────────────────────────────────


def preflight(running: Running, origin: str, headers: str) -> tuple[int, str]:
    """(status, the headers that a script may then send)."""
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    with running.client() as client:
        answer = client.options(
            "/v1/chat/completions", headers=asked | {"Access-Control-Request-Headers": headers}
        )
    return answer.status_code, answer.headers.get("access-control-allow-headers", "")


def test_a_site_that_may_call_may_send_what_clients_send(named: Running) -> None:
    assert preflight(named, SITE, HEADERS) == (204, HEADERS)
    assert preflight(named, "https://evil.example", HEADERS)[0] == 403
    for odd in ("x" * 5000, "a<b>", 'a"b'):
        status, allowed = preflight(named, SITE, odd)
        assert status == 204
        assert "authorization" in allowed
        assert odd not in allowed


def test_a_script_may_read_ids(named: Running) -> None:
    with named.client() as client:
        answer = client.get("/v1/models", headers={"Origin": SITE})
        assert answer.headers["access-control-allow-origin"] == SITE
        exposed = answer.headers["access-control-expose-headers"].split(", ")
        assert {"request-id", "x-request-id", "retry-after"} <= set(exposed)


def test_anthropics_header_is_only_its_own(named: Running) -> None:
    with named.client(headers={"x-request-id": "mine"}) as client:
        assert client.post("/v1/messages", json={}).headers["request-id"] == "mine"
        assert "request-id" not in client.post("/v1/completions", json=BODY).headers


# ── hosts ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("llm.example.org", 200), ("LLM.example.org:8443", 200), ("[fd00::1]", 200),
        ("[fd00::1]:80", 200), ("127.0.0.1:1", 200),
        ("localhost", 403), ("evil.example", 403), ("llm.example.org.evil.example", 403),
        ("llm.example.org:x", 403), ("llm.example.org:80@evil.example", 403),
        ("llm.example.org:", 403), ("llm.example.org/", 403), ("user@llm.example.org", 403),
        ("llm.example.org:123456", 403), ("[fd00::1", 403), ("fd00::1", 403), ("", 403),
    ],
)  # fmt: skip
def test_hosts(named: Running, host: str, status: int) -> None:
    assert status_of(named, f"GET /version HTTP/1.1\nHost: {host}\nConnection: close") == status


def test_without_a_key_only_this_machines_names(server: Running) -> None:
    for host, status in (
        ("localhost", 200), ("localhost:8000", 200), ("[::1]:8000", 200), ("LOCALHOST", 200),
        ("localhost:x@evil", 403), ("localhost@evil", 403), ("localhost.evil.example", 403),
    ):  # fmt: skip
        assert status_of(server, f"GET /load HTTP/1.1\nHost: {host}\nConnection: close") == status
    twice = "Host: localhost\nHost: evil.example"
    assert status_of(server, f"GET /load HTTP/1.1\n{twice}\nConnection: close") in (400, 403)


def test_a_load_balancer_may_ask_for_health(server: Running) -> None:
    assert status_of(server, "GET /health HTTP/1.0") == 200
    assert status_of(server, "HEAD /health HTTP/1.0\nHost: 10.0.0.7") == 200
    assert status_of(server, "GET /health HTTP/1.1\nHost: evil.example\nConnection: close") == 403
    for path in ("/", "/ready", "/metrics", "/v1/models", "/health/"):
        assert status_of(server, f"GET {path} HTTP/1.0") == 403


# ── methods and paths ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "path",
    ["/", "/health", "/ready", "/version", "/v1/models", "/v1/models/", "/v1/models/stories",
     "/metrics", "/load", "/openapi.json", "/page/style.css"],
)  # fmt: skip
def test_head_is_get_without_a_body(server: Running, path: str) -> None:
    with server.client() as client:
        whole, head = client.get(path), client.head(path)
        assert head.status_code == whole.status_code == 200
        assert head.content == b""
        assert head.headers["content-type"] == whole.headers["content-type"]
        if path != "/metrics":  # which counts these two
            assert head.headers["content-length"] == whole.headers["content-length"]


def test_there_is_no_head_of_what_has_no_end(server: Running) -> None:
    with server.client() as client:
        for path, status in (("/page/events", 405), ("/v1/completions", 405), ("/api/hello", 404)):
            assert client.head(path).status_code == status


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/stories", "/health", "/version"])
def test_a_slash_at_the_end_of_a_path(server: Running, path: str) -> None:
    with server.client(follow_redirects=False) as client:
        slashed = client.get(f"{path}/")
        assert slashed.status_code == 200
        assert slashed.json() == client.get(path).json()


def test_a_slash_at_the_end_of_a_post(server: Running) -> None:
    with server.client(follow_redirects=False) as client:
        assert client.post("/v1/completions/", json=BODY).status_code == 200
        assert client.post("/tokenize/", json={"prompt": "a"}).status_code == 200
        answer = client.post("/v1/messages/", json={})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert client.get("/v1/models//").status_code == 404
        assert client.get("/nope/").status_code == 404
