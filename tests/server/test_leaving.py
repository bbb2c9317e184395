"""Clients that leave a stream while nothing of it can be sent to them any more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import MutableMapping
from typing import Any

import pytest

from penstock.server import ServerConfig, create_app
from penstock.server.keys import Key, Limits
from penstock.server.service import Service
from tests.server.conftest import Running

ASK = [{"role": "user", "content": "Hi"}]
STREAMS = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 400},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 400},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 400},
    "/v1/messages": {"model": "stories", "messages": ASK, "max_tokens": 400},
}


@pytest.mark.parametrize("path", STREAMS)
def test_who_leaves_a_stream_unread_is_accounted_for(
    server: Running,
    path: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answer waits to be written when its client leaves: its tokens were used all the same."""
    ledger = server.llm.engine.ledger
    monkeypatch.setattr(ledger, "watch", ledger.watch)  # given back to the other service
    key = Key.of("secret", "alice", Limits(tokens_per_minute=10_000))
    service = Service(ServerConfig(keys=(key,)))
    service.start(server.llm, "stories")
    app = create_app(service=service)
    body = json.dumps(STREAMS[path] | {"stream": True}).encode()
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"),
                    (b"authorization", b"Bearer secret")],
    }  # fmt: skip
    sent: list[MutableMapping[str, Any]] = []

    async def ask() -> tuple[list[str], float]:
        full, asked = asyncio.Event(), False

        async def receive() -> MutableMapping[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": body, "more_body": False}
            await full.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)
            if len(sent) > 3:
                full.set()
                await asyncio.Event().wait()

        with caplog.at_level(logging.INFO, "penstock.server"):
            await app(scope, receive, send)
            account = service.gate._accounts["alice"]
            assert account._tokens is not None
            said = [r.message for r in caplog.records if r.name == "penstock.server"]
            return said, account._tokens._level

    said, level = asyncio.run(ask())
    assert said == ["request"]
    assert level < 10_000
    assert not service.inflight
