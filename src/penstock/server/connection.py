"""A connection that can't be held for nothing: by half a request, or by answers nobody reads.

uvicorn has a time-out between two requests only.
"""

from __future__ import annotations

import asyncio
import json
from typing import ClassVar, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.server.config import ServerConfig
from penstock.server.errors import ApiError

MAX_HEAD_BYTES = 1 << 16  # of a request's line and headers; what arrives at once may be more


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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request's head."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` tells of any delay
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        super().connection_lost(exc)
        self._head_arrived()
        self._cancel_write_timer()

    # ── reading ──────────────────────────────────────────────────────────────────────────────

    def data_received(self, data: bytes) -> None:
        """Read on, unless the head has become too large."""
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"The headers have more than {MAX_HEAD_BYTES:,} bytes.")

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        """The body follows, which the application waits for."""
        self._head_arrived()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """What arrived isn't HTTP."""
        self._refuse(400, msg)

    def _wait_for_head(self) -> None:
        self._in_head = True
        if self._head_timer is None:
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
