"""One HTTP/1.1 answer out of bytes, its body handed on as it comes.

Source: RFC 9112 (HTTP/1.1): status line, fields, and the three ways in which a body ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from penstock.errors import PenstockError

MAX_HEAD_BYTES = 1 << 16
MAX_ERROR_BYTES = 1 << 16  # of a body that is kept to explain a failure

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: |$)")


class ExchangeError(PenstockError):
    """A request got no answer, or not a whole one.

    kind: under which the report counts it: `connect`, `timeout`, `disconnected`,
    `HTTP 503`, `malformed answer`, `error in stream`, `cut off`, `no tokens`.
    """

    def __init__(self, kind: str, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s


class _Part(Enum):
    HEAD = auto()
    LENGTH = auto()  # of a body whose length is known
    CHUNK_SIZE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    UNTIL_CLOSE = auto()
    DONE = auto()


class ResponseParser:
    """Reads one answer; a success's body goes to `on_body`, any other's is kept in `body`."""

    def __init__(self, on_body: Callable[[bytes], None] | None = None) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # names in lower case
        self.body = b""
        self.keep_alive = False
        self.started = False  # any byte has come
        self._on_body = on_body
        self._part = _Part.HEAD
        self._rest = b""
        self._left = 0  # bytes of the body, or of the chunk

    @property
    def complete(self) -> bool:
        """Whether the answer has ended."""
        return self._part is _Part.DONE

    def feed(self, data: bytes) -> None:
        """Take what has come. Raises `ExchangeError` where it isn't HTTP/1.1."""
        self.started = True
        data = self._rest + data if self._rest else data
        self._rest = b""
        while data and self._part is not _Part.DONE:
            match self._part:
                case _Part.LENGTH | _Part.CHUNK:
                    data = self._counted(data)
                case _Part.UNTIL_CLOSE:
                    self._give(data)
                    return
                case _Part.HEAD:
                    head, found, after = data.partition(b"\r\n\r\n")
                    if not found:
                        self._keep(data)
                        return
                    self._read_head(head)
                    data = after
                case _:
                    line, found, after = data.partition(b"\r\n")
                    if not found:
                        self._keep(data)
                        return
                    self._read_line(line)
                    data = after
        if data:
            self.keep_alive = False  # more than was asked for: what follows can't be trusted

    def end(self) -> None:
        """The server has closed its side. Raises `ExchangeError` where the answer isn't whole."""
        if self._part is _Part.UNTIL_CLOSE:
            self._part = _Part.DONE
        if not self.complete:
            when = "in the middle of its answer" if self.started else "before it answered"
            raise ExchangeError("disconnected", f"The server closed the connection {when}.")

    def _counted(self, data: bytes) -> bytes:
        """Hand on what belongs to the body; the bytes behind it."""
        piece, after = data[: self._left], data[self._left :]
        self._left -= len(piece)
        if not self._left:
            self._part = _Part.DONE if self._part is _Part.LENGTH else _Part.CHUNK_END
        self._give(piece)
        return after

    def _give(self, data: bytes) -> None:
        if 200 <= self.status < 300 and self._on_body is not None:
            self._on_body(data)
        elif self._on_body is None or len(self.body) < MAX_ERROR_BYTES:
            self.body += data

    def _keep(self, data: bytes) -> None:
        if len(data) > MAX_HEAD_BYTES:
            raise ExchangeError("malformed answer", f"A head of over {MAX_HEAD_BYTES:,} bytes.")
        self._rest = data

    def _read_line(self, line: bytes) -> None:
        match self._part:
            case _Part.CHUNK_SIZE:
                digits = line.partition(b";")[0].strip()
                if not re.fullmatch(rb"[0-9a-fA-F]{1,15}", digits):
                    raise ExchangeError("malformed answer", f"{digits[:40]!r} is no chunk size.")
                self._left = int(digits, 16)
                self._part = _Part.CHUNK if self._left else _Part.TRAILER
            case _Part.CHUNK_END:
                if line:
                    raise ExchangeError("malformed answer", "A chunk is longer than its size.")
                self._part = _Part.CHUNK_SIZE
            case _:
                if not line:
                    self._part = _Part.DONE

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        match = _STATUS_LINE.match(first)
        if match is None:
            raise ExchangeError(
                "malformed answer", f"The server doesn't speak HTTP/1.1: it said {first[:60]!r}."
            )
        self.status = int(match[2])
        if self.status < 200:  # 100 Continue and the like come before the answer
            return
        for line in lines:
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.strip().lower()] = value.strip()
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = connection != "close" and (match[1] == b"1" or connection == "keep-alive")
        self._part = self._body_part()

    def _body_part(self) -> _Part:
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            return _Part.CHUNK_SIZE
        if self.status in (204, 304):
            return _Part.DONE
        length = self.headers.get("content-length")
        if length is None:
            self.keep_alive = False
            return _Part.UNTIL_CLOSE
        if not length.isdecimal():
            raise ExchangeError("malformed answer", f"{length[:40]!r} is no content length.")
        self._left = int(length)
        return _Part.LENGTH if self._left else _Part.DONE
