"""What every request passes before its endpoint: ids, hosts, keys, sizes, browsers' rules."""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request

from penstock.server.admission import Ticket
from penstock.server.answers import Answer, current
from penstock.server.config import ServerConfig
from penstock.server.errors import ApiError, as_api_error, error_response
from penstock.server.keys import Key, find_key
from penstock.server.page import files
from penstock.server.sse import EventStream, Message, Receive, Send

logger = logging.getLogger("penstock.server")

App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health", "/ready")
"""Answered without a key, and so are the page's files."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS, _HEADERS = "GET, POST, OPTIONS", "authorization, content-type, x-api-key, x-request-id"


def is_open(path: str) -> bool:
    """Whether `path` is answered without a key."""
    return path in OPEN_PATHS or path in files()


class Front:
    """ASGI, by hand: a middleware that wraps streams would cost each token something."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        answer = Answer(request_id)
        current.set(answer)
        origin = headers.get("origin")
        allowed = origin is not None and self._allows(origin)
        started = False

        async def reply(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                answer.status = message["status"]
                out = MutableHeaders(scope=message)
                out["X-Request-Id"] = request_id
                out["X-Content-Type-Options"] = "nosniff"
                out.update(state.get("answer_headers", {}))
                if not out.get("content-type", "").startswith(EventStream.media_type):
                    _close_ticket(state)  # it is answered: who reads that may send the next
                if allowed and origin is not None:
                    out["Access-Control-Allow-Origin"] = origin
                    out["Access-Control-Expose-Headers"] = (
                        "x-request-id, retry-after, x-penstock-dropped-messages"
                    )
                    out.add_vary_header("Origin")
            await send(message)

        try:
            if allowed and scope["method"] == "OPTIONS":
                await self._preflight(reply)
                return
            self._check_host(headers)
            if origin is not None and not allowed:
                self._check_origin(origin, headers)
            state["key"] = self._key(headers, scope["path"])
            self._check_size(headers)
            await self._app(scope, _Bounded(receive, self._config), reply)
        except Exception as error:
            if started:
                raise
            if not isinstance(error, ApiError):
                logger.exception("an endpoint failed", extra={"fields": {"id": request_id}})
            await error_response(Request(scope), as_api_error(error))(scope, receive, reply)
        finally:
            _close_ticket(state)
            answer.end(scope, self._key_name(scope))

    def _allows(self, origin: str) -> bool:
        origins = self._config.allowed_origins
        return "*" in origins or origin in origins

    @staticmethod
    async def _preflight(send: Send) -> None:
        names = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": _HEADERS,
            "access-control-max-age": "600",
        }
        pairs = [(k.encode(), v.encode()) for k, v in names.items()]
        await send({"type": "http.response.start", "status": 204, "headers": pairs})
        await send({"type": "http.response.body", "body": b""})

    def _check_host(self, headers: Headers) -> None:
        names = self._config.host_names
        host = headers.get("host", "")
        bare = host if host.endswith("]") else host.rsplit(":", 1)[0]
        if names and bare.lower() not in names:
            raise ApiError(
                403,
                f"The Host header is {host[:80]!r}. Without an API key only "
                f"{', '.join(names)} are answered; start the server with --allowed-host, or with "
                "a key.",
                code="host_not_allowed",
            )

    def _check_origin(self, origin: str, headers: Headers) -> None:
        """A browser says where a script comes from; without a key, only the server's own may ask.

        What such a script gets back is kept from it anyway, but the request would have run.
        """
        own = origin.partition("://")[2]
        if not self._config.keys and own != headers.get("host", ""):
            raise ApiError(
                403,
                f"The Origin header is {origin[:80]!r}, another site's. Start the server with "
                "--allowed-origin, or with a key.",
                code="origin_not_allowed",
            )

    def _key(self, headers: Headers, path: str) -> Key:
        """The caller's key. Raises ApiError 401."""
        config = self._config
        if not config.keys:
            return config.accounts[0]
        bearer = headers.get("authorization", "")
        text = bearer[7:] if bearer[:7].lower() == "bearer " else headers.get("x-api-key", "")
        found = find_key(config.keys, text.strip())
        if found is not None:
            return found
        if is_open(path):
            return config.keys[0]  # nothing there counts against it
        said = "isn't known" if text else "is missing"
        raise ApiError(
            401,
            f"The API key {said}. Send it as 'Authorization: Bearer …' or 'x-api-key: …'.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    @staticmethod
    def _key_name(scope: Message) -> str | None:
        """Whose key let the request in: nobody's where none is needed."""
        key: Key | None = scope["state"].get("key")
        return None if key is None or is_open(scope["path"]) else key.name

    def _check_size(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._config.max_body_bytes:
            raise too_large(self._config.max_body_bytes, int(length))


def _close_ticket(state: dict[str, Any]) -> None:
    ticket: Ticket | None = state.get("ticket")
    if ticket is not None:
        ticket.close()


class _Bounded:
    """`receive` with an end to how much a body may hold and how long it may take."""

    def __init__(self, receive: Receive, config: ServerConfig) -> None:
        self._receive = receive
        self._config = config
        self._read = 0
        self._whole = False
        self._deadline = asyncio.get_running_loop().time() + config.body_timeout_s

    async def __call__(self) -> Any:
        if self._whole:  # what comes now is the end of the connection
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise ApiError(
                408,
                f"The request's body didn't arrive within {self._config.body_timeout_s:g} s.",
                code="body_timeout",
                headers={"Connection": "close"},  # what is still to come isn't waited for
            ) from None
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._read > self._config.max_body_bytes:
                raise too_large(self._config.max_body_bytes, self._read)
        return message


def too_large(most: int, size: int) -> ApiError:
    """413."""
    return ApiError(
        413,
        f"The body has {size:,} bytes or more, and {most:,} are read. Send less, or raise "
        "--max-body-size.",
        code="request_too_large",
    )
