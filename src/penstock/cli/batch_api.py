"""The server's endpoints asked within this process: OpenAI's batch lines, without a socket.

What a line says is read, checked and answered by the code that serves it over HTTP.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import MissingExtraError, RequestError, get_extra

if TYPE_CHECKING:
    from penstock.engine import AsyncLLM

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")

_GENERATING = ENDPOINTS[:2]
_LIMITS = ("max_tokens", "max_completion_tokens")


class BatchApi:
    """Answers OpenAI's batch lines with one engine."""

    def __init__(
        self, llm: AsyncLLM, names: Sequence[str] = (), max_tokens: int | None = None
    ) -> None:
        """names: the models that lines may ask for; none: whatever a line says, it gets this one.
        max_tokens: of bodies that don't say; None: what the endpoint has then.

        Raises MissingExtraError where the server isn't installed.
        """
        if importlib.util.find_spec("fastapi") is None:
            raise MissingExtraError(
                "OpenAI's batch lines are read by the server, which needs fastapi; "
                f"{get_extra('server')}. Lines with a prompt or messages need nothing."
            )
        from penstock.server import ServerConfig, create_app

        unbounded = 1 << 40
        config = ServerConfig(
            served_model_names=tuple(names),
            max_queue_size=unbounded,
            max_body_bytes=unbounded,
            log_requests=False,
            page=False,
            response_store_mib=0,  # no line goes on from another
        )
        self._names = tuple(names)
        self._max_tokens = max_tokens
        self._model = names[0] if names else str(llm.config.model.model)
        self._app = create_app(config)
        self._app.state.service.start(llm, self._model)

    async def answer(self, line: dict[str, Any]) -> dict[str, Any]:
        """OpenAI's `response` of a batch line: status_code, request_id, body.

        Raises RequestError for a line that asks no endpoint.
        """
        body, asked = _request(line), None
        if not self._names and isinstance(body.get("model"), str):
            asked, body = body["model"], {**body, "model": self._model}
        if self._max_tokens is not None and line["url"] in _GENERATING:
            if all(body.get(name) is None for name in _LIMITS):
                body = {**body, _LIMITS[0]: self._max_tokens}
        status, headers, data = await self._ask(line["url"], json.dumps(body).encode())
        answer = json.loads(data)
        if asked is not None and status == 200:
            answer["model"] = asked
        return {"status_code": status, "request_id": headers.get("x-request-id"), "body": answer}

    async def _ask(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": ("127.0.0.1", 0),
            "server": ("localhost", 80),
            "state": {},
        }
        sent, parts = False, []
        start: dict[str, Any] = {}

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # this client never leaves
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return int(start["status"]), headers, b"".join(parts)


def _request(line: dict[str, Any]) -> dict[str, Any]:
    """The body of a line. Raises RequestError for what no batch line is."""
    unknown = sorted(set(line) - {"custom_id", "method", "url", "body"})
    if unknown:
        raise RequestError(
            f"{unknown[0]!r} isn't part of a batch line: custom_id, method, url and body are."
        )
    if not isinstance(line.get("custom_id"), str):
        raise RequestError("A batch line needs a custom_id, a text.")
    if line.get("method", "POST") != "POST":
        raise RequestError(f"method is {line['method']!r}; it must be 'POST'.")
    if line.get("url") not in ENDPOINTS:
        raise RequestError(f"url is {line.get('url')!r}; it must be one of {', '.join(ENDPOINTS)}.")
    body = line.get("body")
    if not isinstance(body, dict):
        raise RequestError("body must be an object: what would be sent to the url.")
    if body.get("stream"):
        raise RequestError("stream can't be true in a batch line: its answer is one line.")
    return body
