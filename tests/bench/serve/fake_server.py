"""A server with OpenAI's API and no model: answers take exactly as long as a test says."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Received:
    """One request as it came."""

    at: float  # time.perf_counter()
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeServer:
    """Settings, and what was received. `faults` maps the number of a request to its fault.

    Faults: `429`, `503`, `disconnect` (in the stream), `reset` (before the answer), `half-close`,
    `stall`, `error event`, `bad json`, `not a stream`, `empty`, `cut off`, `garbage`.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    models: tuple[str, ...] = ("fake",)
    max_model_len: int | None = None
    takes_ids: bool = True
    takes_stream_options: bool = True
    counts: bool = True
    tokens_per_chunk: int = 1
    key: str | None = None
    keep_alive: bool = True
    retry_after: str | None = "0.05"
    at_once: int | None = None  # requests that are answered at the same time
    cached: Callable[[Any], int] | None = None  # of a prompt's tokens
    faults: dict[int, str] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)
    url: str = ""
    connections: int = 0
    probes: int = 1  # requests before the first that counts

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        gone = (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError)
        with suppress(*gone):
            while await self._one(reader, writer):
                pass
        writer.close()
        with suppress(*gone, ssl.SSLError):
            await writer.wait_closed()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {n.lower(): v for line in head[1:] if line for n, v in [line.split(": ", 1)]}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return self._json(writer, 401, {"error": {"message": "wrong key"}})
        if method == "GET":
            entry = {} if self.max_model_len is None else {"max_model_len": self.max_model_len}
            return self._json(
                writer, 200, {"object": "list", "data": [{"id": m, **entry} for m in self.models]}
            )
        request = Received(time.perf_counter(), path, headers, json.loads(raw))
        self.received.append(request)
        number = len(self.received) - 1 - self.probes
        body = request.body
        if not self.takes_ids and isinstance(body.get("prompt"), list):
            return self._json(writer, 422, {"error": {"message": "prompt must be a string"}})
        if not self.takes_stream_options and "stream_options" in body:
            return self._json(writer, 400, {"detail": "unknown field stream_options"})
        return await self._answer(writer, body, self.faults.get(number))

    def _json(self, writer: asyncio.StreamWriter, status: int, body: Any, extra: str = "") -> bool:
        data = json.dumps(body).encode()
        kept = "" if self.keep_alive else "Connection: close\r\n"
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n{kept}{extra}"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return self.keep_alive

    async def _answer(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: str | None
    ) -> bool:
        if fault == "429":
            extra = "" if self.retry_after is None else f"Retry-After: {self.retry_after}\r\n"
            return self._json(writer, 429, {"error": {"message": "too many"}}, extra)
        if fault == "503":
            return self._json(writer, 503, {"error": {"message": "overloaded"}})
        if fault == "not a stream":
            return self._json(writer, 200, {"choices": [{"text": "a"}]})
        if fault == "reset":
            return False
        if fault == "garbage":
            writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
            return False
        if not hasattr(self, "_slots"):
            self._slots = asyncio.Semaphore(self.at_once or 1 << 30)
        async with self._slots:
            return await self._stream(writer, body, fault)

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], fault: str | None
    ) -> bool:
        kept = "" if self.keep_alive else "Connection: close\r\n"
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{kept}"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        if fault == "stall":
            await asyncio.sleep(5)
        chat = "messages" in body
        if chat:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        total = body["max_tokens"]
        chunks = -(-total // self.tokens_per_chunk)
        start = time.perf_counter()
        for i in range(chunks):
            due = start + self.ttft_s + i * self.itl_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if i == 1 and fault in ("disconnect", "half-close", "error event", "bad json"):
                return await self._break(writer, fault)
            reason = "length" if i + 1 == chunks and fault != "cut off" else None
            piece: dict[str, Any] = {"delta": {"content": "a"}} if chat else {"text": "a"}
            if fault != "empty":
                self._event(writer, {"choices": [{**piece, "finish_reason": reason}]})
        if self.counts and body.get("stream_options", {}).get("include_usage"):
            self._event(writer, {"choices": [], "usage": self._usage(body, fault)})
        if fault != "cut off":
            self._write(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return self.keep_alive

    def _usage(self, body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        prompt = body.get("prompt") or " ".join(m["content"] for m in body["messages"])
        length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        usage: dict[str, Any] = {
            "prompt_tokens": length,
            "completion_tokens": 0 if fault == "empty" else body["max_tokens"],
        }
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached(prompt)}
        return usage

    async def _break(self, writer: asyncio.StreamWriter, fault: str) -> bool:
        if fault == "error event":
            self._event(writer, {"error": {"message": "out of cache"}})
            writer.write(b"0\r\n\r\n")
            return self.keep_alive
        if fault == "bad json":
            self._write(writer, b"data: {nonsense\n\n")
            return self.keep_alive
        if fault == "half-close":
            writer.write_eof()
            await asyncio.sleep(0.1)
        else:
            writer.transport.abort()
        return False

    def _event(self, writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
        self._write(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @property
    def measured(self) -> list[Received]:
        """Without what came before the load."""
        return self.received[self.probes :]


@contextmanager
def running(server: FakeServer, tls: ssl.SSLContext | None = None) -> Iterator[FakeServer]:
    """The server in a thread of its own, on a free port."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop: asyncio.Event

    async def serve() -> None:
        nonlocal stop
        stop = asyncio.Event()
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0, ssl=tls)
        port = listening.sockets[0].getsockname()[1]
        server.url = f"http{'' if tls is None else 's'}://127.0.0.1:{port}"
        ready.set()
        await stop.wait()
        listening.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=0.5)
        await asyncio.sleep(0.01)  # transports close in the loop's next rounds

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
