"""HTTP/1.1 to one worker: kept connections, answers handed on as they come."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.http1 import ExchangeError, ResponseParser
from penstock.server.answers import PROBE

CONNECT_TIMEOUT_S = 10.0
_PIECE_BYTES = 1 << 16
_IDLE = 64  # connections that are kept
Headers = Sequence[tuple[str, str]]
_PROBE = ((PROBE[0].decode(), PROBE[1].decode()),)


class Exchange:
    """A request that was sent, and its answer."""

    def __init__(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._link = link
        self._reader, self._writer = reader, writer
        self._pieces: list[bytes] = []
        self._parser = ResponseParser(self._pieces.append)
        self._closed = False

    @property
    def status(self) -> int:
        """Of the answer."""
        return self._parser.status

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the answer; names in lower case."""
        return self._parser.headers

    @property
    def started(self) -> bool:
        """Whether any byte of an answer came."""
        return self._parser.started

    async def send(self, request: bytes) -> None:
        """Send it and read the answer's head. Raises ExchangeError."""
        try:
            self._writer.write(request)
            await self._writer.drain()
        except OSError as error:
            raise ExchangeError("disconnected", f"The connection broke: {error}.") from error
        while self._parser.status < 200:
            await self._read()

    async def body(self) -> AsyncGenerator[bytes, None]:
        """The answer's body as it comes; of one that is no success at once.

        Raises ExchangeError where it breaks off.
        """
        while True:
            if self._pieces:
                found = b"".join(self._pieces)
                self._pieces.clear()
                yield found
            elif self._parser.complete:
                break
            else:
                await self._read()
        if self._parser.body:
            yield self._parser.body

    async def whole(self) -> bytes:
        """All of the body, after which the connection is kept. Raises ExchangeError."""
        found = b"".join([piece async for piece in self.body()])
        self.close()
        return found

    async def _read(self) -> None:
        try:
            data = await self._reader.read(_PIECE_BYTES)
        except OSError as error:
            raise ExchangeError("disconnected", f"The connection broke: {error}.") from error
        if data:
            self._parser.feed(data)
        else:
            self._parser.end()

    def close(self) -> None:
        """Keep the connection where the answer is whole; else the worker sees its caller leave.

        Once is enough: after that the connection is another exchange's.
        """
        if self._closed:
            return
        self._closed = True
        whole = self._parser.complete and self._parser.keep_alive
        self._link.give_back(self._reader, self._writer, keep=whole)


class Link:
    """Connections to one worker."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """url: `http://…`, `https://…`, or `unix:` and a path."""
        self.url = url
        self._key = api_key
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._busy: set[asyncio.StreamWriter] = set()
        self._prefix, self._host = "", "localhost"
        if not url.startswith("unix:"):
            parts = urlsplit(url)
            self._prefix = parts.path.rstrip("/").removesuffix("/v1")
            self._host = parts.netloc

    async def request(self, method: str, path: str, headers: Headers, body: bytes) -> Exchange:
        """Send it, and read the head of the answer. Raises ExchangeError."""
        own = [("host", self._host), ("content-length", str(len(body)))]
        own += [] if self._key is None else [("authorization", f"Bearer {self._key}")]
        lines = [f"{method} {self._prefix}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in (*own, *headers)]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        while True:
            reused = bool(self._idle)
            reader, writer = self._idle.pop() if reused else await self._connect()
            self._busy.add(writer)
            exchange = Exchange(self, reader, writer)
            try:
                await exchange.send(request)
            except BaseException as error:
                exchange.close()
                broken = isinstance(error, ExchangeError) and error.kind == "disconnected"
                if reused and broken and not exchange.started:
                    continue  # kept connections end unseen: RFC 9112, section 9.3.1
                raise
            return exchange

    async def get(self, path: str, timeout_s: float) -> tuple[int, Any]:
        """Status and JSON; None where it isn't that. Raises ExchangeError."""
        status, body = await self.read(path, timeout_s)
        try:
            return status, json.loads(body)
        except ValueError:
            return status, None

    async def read(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """Status and body. Raises ExchangeError."""
        return await self._whole("GET", path, timeout_s)

    async def post(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """The same of a POST without a body."""
        return await self._whole("POST", path, timeout_s)

    async def _whole(self, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                exchange = await self.request(method, path, _PROBE, b"")
                try:
                    return exchange.status, await exchange.whole()
                except BaseException:
                    exchange.close()
                    raise
        except TimeoutError as error:
            raise ExchangeError("timeout", f"No answer within {timeout_s:g} s.") from error

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self.url.startswith("unix:"):
                    return await asyncio.open_unix_connection(self.url[5:])
                parts = urlsplit(self.url)
                tls = ssl.create_default_context() if parts.scheme == "https" else None
                port = parts.port or (443 if tls else 80)
                return await asyncio.open_connection(parts.hostname, port, ssl=tls)
        except TimeoutError as error:
            raise ExchangeError("connect", f"No connection to {self.url} in time.") from error
        except OSError as error:
            told = error.strerror or str(error)
            raise ExchangeError("connect", f"No connection to {self.url}: {told}.") from error

    def give_back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, keep: bool
    ) -> None:
        """An exchange has ended."""
        self._busy.discard(writer)
        if keep and len(self._idle) < _IDLE and not reader.at_eof():
            self._idle.append((reader, writer))
        else:
            writer.transport.abort()

    def abort(self) -> None:
        """Break off all requests: nobody will answer them."""
        for writer in (*self._busy, *(writer for _, writer in self._idle)):
            writer.transport.abort()
        self._idle.clear()
