"""What every request passes before its endpoint: ids, hosts, keys, sizes, browsers' rules."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request

from penstock.server.admission import Ticket
from penstock.server.answers import Answer, Polls, current
from penstock.server.config import ServerConfig
from penstock.server.errors import ApiError, as_api_error, error_response
from penstock.server.keys import Key, find_key
from penstock.server.page import files
from penstock.server.sse import EventStream, Message, Receive, Send

App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN_PATHS = ("/", "/health", "/ready")
"""Answered without a key, and so are the page's files."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_HEADERS = "authorization, content-type, x-api-key, x-request-id"
_EXPOSED = (
    "x-request-id, request-id, retry-after, x-penstock-dropped-messages, x-penstock-stored, "
    "x-penstock-unheeded"
)
# Names of headers (RFC 9110, 5.6.2) with commas, as many as clients' telemetry needs.
_ASKED_HEADERS = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,4096}")
# A name or an address and perhaps a port (RFC 9110, 7.2); no user, no path.
_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")


_ALIVE = "/health"
"""Answered whatever the Host header says or lacks: load balancers ask so, and it tells nothing."""


def is_open(path: str) -> bool:
    """Whether `path` is answered without a key."""
    return path in OPEN_PATHS or path in files()


_BRIEF = frozenset(("/load", "/metrics", "/tokenizer_info", "/v1/models", "/version"))
"""Paths whose GET is answered at once, as a HEAD must be; streams of events aren't."""


def _has_head(path: str) -> bool:
    return path in _BRIEF or path.startswith(("/v1/models/", "/v1/responses/")) or is_open(path)


def _routed(scope: Message) -> Message:
    """The request as the endpoints know it: no slash at the end, and GET for HEAD where that is."""
    path = scope["path"]
    changed: dict[str, Any] = {}
    if len(path) > 1 and path.endswith("/"):
        changed["path"] = path = path[:-1]
    if scope["method"] == "HEAD" and _has_head(path):
        changed["method"] = "GET"
    return {**scope, **changed} if changed else scope


class Front:
    """ASGI, by hand: a middleware that wraps streams would cost each token something."""

    def __init__(self, app: App, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._polls = Polls()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        answer = Answer(request_id, scope["method"])
        current.set(answer)
        method, path, routed = scope["method"], scope["path"], _routed(scope)
        origin = headers.get("origin")
        allowed = origin is not None and self._allows(origin)
        started = False

        async def reply(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                answer.status = message["status"]
                out = MutableHeaders(scope=message)
                _sign(out, state, path)
                if answer.unheeded:
                    out["X-Penstock-Unheeded"] = ", ".join(answer.unheeded)
                if not out.get("content-type", "").startswith(EventStream.media_type):
                    _close_ticket(state)  # it is answered: who reads that may send the next
                if allowed and origin is not None:
                    out["Access-Control-Allow-Origin"] = origin
                    out["Access-Control-Expose-Headers"] = _EXPOSED
                    out.add_vary_header("Origin")
            elif method == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        try:
            if allowed and method == "OPTIONS":
                await self._preflight(headers, reply)
                return
            if path != _ALIVE or (scope["http_version"] != "1.0" and "host" in headers):
                self._check_host(headers)
            if origin is not None and not allowed:
                self._check_origin(origin, headers)
            state["key"] = self._key(headers, path)
            self._check_size(headers)
            await self._app(routed, _Bounded(receive, self._config), reply)
        except Exception as error:
            if started:
                raise
            told = as_api_error(error, request_id=request_id)
            await error_response(Request(scope), told)(scope, receive, reply)
        finally:
            _close_ticket(state)
            answer.end(routed, self._key_name(scope), self._polls)

    def _allows(self, origin: str) -> bool:
        origins = self._config.allowed_origins
        return "*" in origins or origin in origins

    @staticmethod
    async def _preflight(headers: Headers, send: Send) -> None:
        """A site that may call may send any header: clients add ever more of their own."""
        asked = headers.get("access-control-request-headers", "")
        names = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": asked if _ASKED_HEADERS.fullmatch(asked) else _HEADERS,
            "access-control-max-age": "600",
            "vary": "Access-Control-Request-Headers",
        }
        pairs = [(k.encode(), v.encode()) for k, v in names.items()]
        await send({"type": "http.response.start", "status": 204, "headers": pairs})
        await send({"type": "http.response.body", "body": b""})

    def _check_host(self, headers: Headers) -> None:
        names = self._config.host_names
        given = headers.getlist("host")
        host = given[0] if len(given) == 1 else ""
        found = _HOST.fullmatch(host)
        if names and (found is None or found[1].lower() not in names):
            way_out = "" if self._config.allowed_hosts else ", or with a key"
            raise ApiError(
                403,
                f"The Host header is {host[:80]!r}, and only {', '.join(names)} are answered. "
                f"Start the server with --allowed-host{way_out}.",
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


def _sign(headers: MutableHeaders, state: dict[str, Any], path: str) -> None:
    """What every answer has."""
    headers["X-Request-Id"] = state["request_id"]
    if path.startswith("/v1/messages"):
        headers["request-id"] = state["request_id"]  # Anthropic's
    headers["X-Content-Type-Options"] = "nosniff"
    headers.update(state.get("answer_headers", {}))


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
