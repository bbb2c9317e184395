"""Server-sent events, written to a client that may read slowly or be gone.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    MutableMapping,
)
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response

from penstock.server.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
CLIENT_CLOSED = 499  # nginx's: the client went away, nobody reads the answer

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: Any, name: str | None = None) -> bytes:
    """One event whose data is JSON."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(data)}\n\n".encode()


def last_event(path: str, error: ApiError) -> bytes:
    """What ends an answer that breaks off, in the shape of the API at `path`."""
    if path.startswith("/v1/messages"):
        return event(error.anthropic(), "error")
    if path.startswith("/v1/responses"):
        said = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return event(said, "error")
    return event(error.openai())


class EventStream(Response):
    """Sends events as they come and stops asking for more when the client has gone.

    What `events` raises before its first event becomes an answer with a status of its own; later,
    `explain` makes it the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        explain: Callable[[Exception], bytes],
        source: AsyncGenerator[Any, None] | None = None,
    ) -> None:
        """source: what `events` reads, closed with it: one that only left its loop keeps it open
        until it is collected, after the request's end."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._explain = explain
        self._source = source

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        gone = asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait({writer, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()  # an error before the first event
        finally:
            for task in (writer, gone):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    async def _write(self, send: Send) -> None:
        started = False
        try:
            async for data in self._events:
                if not started:
                    started = True
                    await send(
                        {
                            "type": "http.response.start",
                            "status": self.status_code,
                            "headers": self.raw_headers,
                        }
                    )
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not started:
                raise
            body = self._explain(error)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            for one in (self._events, self._source):
                close = getattr(one, "aclose", None)
                if close is not None:
                    await close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def client_left() -> ApiError:
    """499."""
    return ApiError(CLIENT_CLOSED, "The client closed the connection.")


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone; its request was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. It is cancelled when the client goes away, and ApiError 499 raised."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise client_left()
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one
