"""A connection that can't be held for nothing: by half a request, or by answers nobody reads.

uvicorn has a time-out between two requests only, which any byte ends, and while a request waits
for the one before it doesn't see its client leave.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar, Protocol

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.server.config import ServerConfig
from penstock.server.errors import ApiError

MAX_HEAD_BYTES = 1 << 16  # of a request's line and headers; what arrives at once may be more
_PIECE_BYTES = 1 << 16  # are parsed at once: many small requests may stand in them


class Refusals(Protocol):
    """Who hears of what was answered before there was a request for the application."""

    def told(self, error: ApiError) -> None:
        """The client was told of `error`."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with an end to a request's head and to an answer that isn't read."""

    server_config: ClassVar[ServerConfig]
    refusals: ClassVar[Refusals]
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = False
    _running: RequestResponseCycle | None = None
    _plain_head: bytes | None = None  # of a request that asks for another protocol, without that

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ahead = bytearray()  # what came while a request was being answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request's head."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of any delay
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers, and tell everyone who answers that the client has gone."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._head_arrived()
        self._cancel_write_timer()
        self._ahead.clear()
        # uvicorn tells only the newest request
        waiting = [cycle for cycle, _ in self.pipeline]
        for cycle in waiting if self._running is None else [self._running, *waiting]:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.pipeline.clear()

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        """Read on. What comes before its turn is kept: only who reads on sees the client leave."""
        self._ahead += data
        self._read_on()
        most = self.server_config.max_body_bytes + MAX_HEAD_BYTES
        if len(self._ahead) > most and not self.transport.is_closing():
            self.refusals.told(ApiError(413, f"{most:,} bytes were sent ahead of an answer."))
            self.transport.abort()  # in the middle of an answer there is no place for another

    def _read_on(self) -> None:
        while self._ahead and not self._answers_first and not self.transport.is_closing():
            piece = bytes(self._ahead[:_PIECE_BYTES])
            del self._ahead[:_PIECE_BYTES]
            self._parse(piece)
            if self._in_head and not self.transport.is_closing():
                self._head_bytes += len(piece)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._refuse(431, f"The headers have more than {MAX_HEAD_BYTES:,} bytes.")
        if self.pipeline:
            self.flow.resume_reading()  # paused for a request that waits for its turn

    @property
    def _answers_first(self) -> bool:
        """Whether a request that is here as a whole waits for its answer."""
        return bool(self.pipeline) or (self._answering and not self.cycle.more_body)

    @property
    def _answering(self) -> bool:
        """Whether a request, or a part of its body, waits for an answer."""
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, piece: bytes) -> None:
        view = memoryview(piece)
        try:
            while view:
                try:
                    self.parser.feed_data(view)
                    return
                except httptools.HttpParserUpgrade as ended:
                    head, self._plain_head = self._plain_head, None
                    if head is None:  # CONNECT: what follows isn't HTTP
                        return
                    view = view[ended.args[0] :]
                    self.parser.feed_data(head)
        except httptools.HttpParserError:
            message = "Invalid HTTP request received."
            self.logger.warning(message)
            self.send_400_response(message)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        """The body follows, which the application waits for."""
        upgrades, method = self.parser.should_upgrade(), self.parser.get_method()
        if upgrades and method != b"CONNECT":
            self._plain_head = self._without_upgrade(method)
            return
        self._head_arrived()
        super().on_headers_complete()
        if upgrades:
            self.cycle.keep_alive = False

    def _without_upgrade(self, method: bytes) -> bytes:
        """The head again as of one who doesn't ask for another protocol; there is none.

        RFC 9110, 7.8: a server may ignore it. The parser would leave out the body.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        """A request is here as a whole."""
        if self._plain_head is not None:
            return
        super().on_message_complete()
        if self.cycle.response_complete and self.cycle.more_body:  # answered before
            self.cycle.more_body = False
            self._close_after(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        """The next request's turn, as far as it is here."""
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._answering:
            if self.cycle.more_body:  # its end isn't read, but must come
                self._close_after(self.server_config.body_timeout_s)
            elif self._in_head:
                self._unset_keepalive_if_required()
                self._wait_for_head()
        self._read_on()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _close_after(self, seconds: float) -> None:
        """Close unless another request has begun by then."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(
            seconds, self.timeout_keep_alive_handler
        )

    def send_400_response(self, msg: str) -> None:
        """What arrived isn't HTTP."""
        self._refuse(400, msg)

    def _wait_for_head(self) -> None:
        self._in_head = True
        if self._head_timer is None and not self._answering:
            allowed = self.server_config.body_timeout_s
            late = f"The request's headers didn't arrive within {allowed:g} s."
            self._head_timer = self.loop.call_later(allowed, self._refuse, 408, late)

    def _head_arrived(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer before there is a request for the application, and close."""
        error = ApiError(status, message)
        self.refusals.told(error)
        body = json.dumps(error.openai()).encode()
        head = (
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()

    # ── writing ──────────────────────────────────────────────────────────────────────────────

    def pause_writing(self) -> None:
        """Something sent waits for the client to read."""
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        """Everything sent is on its way."""
        super().resume_writing()
        self._cancel_write_timer()

    def _watch_unsent(self, before: int | None = None) -> None:
        """Cut the client off unless it takes some of what is unsent within the time allowed."""
        unsent = self.transport.get_write_buffer_size()
        if before is not None and unsent >= before:
            self.transport.abort()
            return
        self._cancel_write_timer()
        self._write_timer = self.loop.call_later(
            self.server_config.write_timeout_s, self._watch_unsent, unsent
        )

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def connections(config: ServerConfig, refusals: Refusals) -> type[Connection]:
    """The protocol for a server of this configuration."""
    known = {"server_config": config, "refusals": refusals}
    return type("ConfiguredConnection", (Connection,), known)
