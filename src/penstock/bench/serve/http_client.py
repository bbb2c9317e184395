"""A client for streams, cheap enough to share a machine with the server that it measures.

Bytes are parsed where the event loop delivers them: no task is woken for a token. A connection
carries one request at a time and is kept for the next.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import penstock
from penstock.errors import ConfigError
from penstock.http1 import ExchangeError, ResponseParser

CONNECT_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    host: str
    port: int
    tls: bool
    prefix: str  # of every path

    @classmethod
    def parse(cls, url: str) -> Server:
        """From a base URL, with or without `/v1` at its end.

        Raises `ConfigError` for anything but http:// and https:// with a host.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as wrong:
            raise ConfigError(f"--base-url {url!r} can't be read: {wrong}.") from wrong
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--base-url {url!r} isn't an address like http://127.0.0.1:8000 or "
                "https://example.org."
            )
        if parts.username or parts.query or parts.fragment:
            raise ConfigError(
                f"--base-url {url!r} has more than a host and a path. A key goes into --api-key."
            )
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix)

    @property
    def authority(self) -> str:
        """`host:port`, as in a URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class _Connection(asyncio.Protocol):
    """One connection; `exchange` sends a request and returns when the answer has ended."""

    def __init__(self) -> None:
        self.used = False
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._parser: ResponseParser | None = None
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # nothing was asked
            self.close()
            return
        try:
            self._parser.feed(data)
        except ExchangeError as failure:
            self._settle(failure)
            self.close()
            return
        if self._parser.complete:
            self._settle(None)

    def eof_received(self) -> bool:
        return False  # nothing more can come: the transport closes itself

    def connection_lost(self, reason: Exception | None) -> None:
        self.closed = True
        if self._parser is None:
            return
        try:
            self._parser.end()
        except ExchangeError as failure:
            failure.__cause__ = reason
            self._settle(failure)
        else:
            self._settle(None)

    def _settle(self, failure: ExchangeError | None) -> None:
        self._parser = None
        if self._answered is not None and not self._answered.done():
            if failure is None:
                self._answered.set_result(None)
            else:
                self._answered.set_exception(failure)

    async def exchange(self, request: bytes, parser: ResponseParser) -> None:
        assert self._transport is not None
        self.used = True
        self._parser = parser
        self._answered = asyncio.get_running_loop().create_future()
        if self.closed:
            self.connection_lost(None)
        else:
            self._transport.write(request)
        try:
            await self._answered
        except asyncio.CancelledError:
            self._parser = None
            self.close()
            raise

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


class HttpClient:
    """Requests to one server, over as many connections as there are requests at once."""

    def __init__(self, server: Server, *, api_key: str | None = None) -> None:
        self.server = server
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("The API key has characters that no header can carry.")
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._tls = ssl.create_default_context() if server.tls else None
        self._fields = "".join(
            f"{name}: {value}\r\n"
            for name, value in {
                "Host": server.authority,
                "User-Agent": f"penstock-bench/{penstock.__version__}",
                "Authorization": None if api_key is None else f"Bearer {api_key}",
            }.items()
            if value is not None
        )

    async def get_json(self, path: str, *, timeout_s: float) -> tuple[int, Any]:
        """Status and body (None where it isn't JSON). Raises `ExchangeError`."""
        parser = await self._request("GET", path, b"", ResponseParser, None, timeout_s)
        try:
            return parser.status, json.loads(parser.body)
        except ValueError:
            return parser.status, None

    async def get_text(self, path: str, *, timeout_s: float) -> tuple[int, str]:
        """Status and body. Raises `ExchangeError`."""
        parser = await self._request("GET", path, b"", ResponseParser, None, timeout_s)
        return parser.status, bytes(parser.body).decode("utf-8", "replace")

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        on_body: Callable[[bytes], None],
        on_sent: Callable[[], None],
        timeout_s: float,
    ) -> ResponseParser:
        """Send JSON; the body of a success goes to `on_body` as it comes.

        `on_sent` is called when the request is handed to the connection (again, if a connection
        that was kept turns out to be closed). Raises `ExchangeError`: no connection, a time-out,
        an answer that isn't whole, or a status that isn't a success.
        """
        parser = await self._request(
            "POST", path, body, lambda: ResponseParser(on_body), on_sent, timeout_s
        )
        if not 200 <= parser.status < 300:
            raise ExchangeError(
                f"HTTP {parser.status}",
                f"HTTP {parser.status}: {_explanation(parser.body)}",
                retry_after_s=_seconds(parser.headers.get("retry-after")),
            )
        return parser

    async def close(self) -> None:
        """Close every connection."""
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # aborted transports are closed by the loop's next round

    async def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        new_parser: Callable[[], ResponseParser],
        on_sent: Callable[[], None] | None,
        timeout_s: float,
    ) -> ResponseParser:
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} {self.server.prefix}{path} HTTP/1.1\r\n{self._fields}{kind}\r\n"
        request = head.encode("latin-1") + body
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    connection = await self._connection()
                    reused, parser = connection.used, new_parser()
                    if on_sent is not None:
                        on_sent()
                    try:
                        await self._exchange(connection, request, parser)
                    except ExchangeError as failure:
                        # kept connections end unseen: RFC 9112, section 9.3.1
                        if reused and failure.kind == "disconnected" and not parser.started:
                            continue
                        raise
                    return parser
        except TimeoutError as late:
            raise ExchangeError("timeout", f"No whole answer within {timeout_s:g} s.") from late

    async def _exchange(
        self, connection: _Connection, request: bytes, parser: ResponseParser
    ) -> None:
        self._busy.add(connection)
        try:
            await connection.exchange(request, parser)
        finally:
            self._busy.discard(connection)
        if parser.keep_alive and not connection.closed:
            self._idle.append(connection)
        else:
            connection.close()

    async def _connection(self) -> _Connection:
        while self._idle:
            kept = self._idle.pop()
            if not kept.closed:
                return kept
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    _Connection, self.server.host, self.server.port, ssl=self._tls
                )
        except (OSError, ssl.SSLError) as failure:  # TimeoutError is an OSError
            raise ExchangeError(
                "connect", f"No connection to {self.server.authority}: {_reason(failure)}."
            ) from failure
        return connection


def _reason(failure: OSError) -> str:
    if isinstance(failure, TimeoutError) and not str(failure):
        return f"nothing answered within {CONNECT_TIMEOUT_S:g} s"
    return str(failure.strerror or failure).rstrip(".") or type(failure).__name__


def _explanation(body: bytes) -> str:
    """What an error's body says: OpenAI's `error.message`, FastAPI's `detail`, or its start."""
    text = body.decode("utf-8", "replace").strip()
    try:
        found = json.loads(text)
    except ValueError:
        return text[:300] or "no explanation"
    if isinstance(found, dict):
        error = found.get("error", found)
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or found.get("detail") or text)[:300]
    return text[:300]


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, counts as not given."""
    try:
        value = float(retry_after) if retry_after is not None else math.nan
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
