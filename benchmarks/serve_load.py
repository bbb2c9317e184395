"""Many streams at once: are they right, how even are they, and what does HTTP cost?

    python -m benchmarks.serve_load --clients 64 --seconds 60 --json results.json

Starts `penstock serve` as a process of its own, asks for every prompt once alone, then for all of
them again and again at once, and compares each stream's text with that of the same request alone.
CPU time of the server's threads is read from /proc: the main thread's is event loop and HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.server import serving

from penstock.bench.environment import environment
from penstock.hardware import detect

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_STARTS = ("Once upon a time", "The little dog", "In the garden", "A girl named Lily", "One day")


@dataclass
class Seen:
    """What the clients saw."""

    gaps: list[float] = field(default_factory=list)  # between two chunks of text, seconds
    firsts: list[float] = field(default_factory=list)
    requests: int = 0
    chunks: int = 0
    tokens: int = 0
    errors: list[str] = field(default_factory=list)


class Client:
    """One connection that is kept, speaking just enough HTTP."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    def close(self) -> None:
        self._writer.close()

    async def ask(self, body: dict[str, Any], seen: Seen) -> str:
        """The streamed text; times go to `seen`."""
        data = json.dumps(body | {"stream": True}).encode()
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json"
            b"\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
        )
        start = last = time.perf_counter()
        head = await self._reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise RuntimeError(head.split(b"\r\n", 1)[0].decode())
        text, pending, first = "", b"", True
        while size := int(await self._reader.readline(), 16):
            pending += (await self._reader.readexactly(size + 2))[:size]
            *events, pending = pending.split(b"\n\n")
            for event in events:
                if event == b"data: [DONE]":
                    continue
                choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
                now = time.perf_counter()
                (seen.firsts if first else seen.gaps).append(now - last)
                first, last = False, now
                text += choice["text"]
                seen.chunks += 1
        await self._reader.readline()
        seen.requests += 1
        assert last >= start
        return text


def _threads(pid: int) -> dict[str, float]:
    """CPU seconds by thread: the main one, and the others by name."""
    spent: dict[str, float] = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        text = stat.read_text()
        fields = text.rpartition(")")[2].split()
        name = "main" if stat.parent.name == str(pid) else "others"
        spent[name] = spent.get(name, 0.0) + (int(fields[11]) + int(fields[12])) * _TICK_S
    return spent


def _bodies(clients: int, tokens: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{_STARTS[i % len(_STARTS)]}", "max_tokens": tokens, "seed": i,
         "ignore_eos": True}
        for i in range(clients)
    ]  # fmt: skip


async def _load(port: int, bodies: list[dict[str, Any]], seconds: float) -> tuple[Seen, list[str]]:
    """Every client asks its own request again and again until the time is over."""
    seen, wrong = Seen(), []
    single = Client(port)
    await single.connect()
    alone = [await single.ask(body, Seen()) for body in bodies]
    single.close()
    end = time.perf_counter() + seconds

    async def run(number: int) -> None:
        client = Client(port)
        await client.connect()
        try:
            while time.perf_counter() < end:
                text = await client.ask(bodies[number], seen)
                seen.tokens += bodies[number]["max_tokens"]
                if text != alone[number]:
                    wrong.append(
                        f"stream {number}: {text[:60]!r} instead of {alone[number][:60]!r}"
                    )
        except Exception as error:
            seen.errors.append(f"stream {number}: {error!r}")
        finally:
            client.close()

    await asyncio.gather(*(run(i) for i in range(len(bodies))))
    return seen, wrong


def measure(
    model: str, clients: int, tokens: int, seconds: float, extra: list[str]
) -> dict[str, Any]:
    """Figures of one server under load."""
    with serving(model, *extra) as server:
        bodies = _bodies(clients, tokens)
        before = _threads(server.process.pid)
        started = time.perf_counter()
        seen, wrong = asyncio.run(_load(server.port, bodies, seconds))
        spent = {k: v - before.get(k, 0.0) for k, v in _threads(server.process.pid).items()}
        took = time.perf_counter() - started
    made = seen.tokens + clients * tokens  # those alone as well
    gaps = np.array(seen.gaps) * 1000
    return {
        "clients": clients,
        "tokens_a_request": tokens,
        "seconds": took,
        "requests": seen.requests,
        "errors": seen.errors,
        "wrong_streams": wrong,
        "tokens_per_s": seen.tokens / seconds,
        "tokens_a_chunk": seen.tokens / max(1, seen.chunks),
        "itl_ms": {name: float(np.percentile(gaps, p)) for name, p in
                   (("p50", 50), ("p90", 90), ("p99", 99))},
        "itl_p99_over_median": float(np.percentile(gaps, 99) / np.percentile(gaps, 50)),
        "ttft_ms_median": statistics.median(seen.firsts) * 1000,
        "http_cpu_ms_a_token": spent["main"] / made * 1000,
        "engine_cpu_ms_a_token": spent.get("others", 0.0) / made * 1000,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="stories")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    arguments, extra = parser.parse_known_args()
    found = measure(arguments.model, arguments.clients, arguments.tokens, arguments.seconds, extra)
    text = json.dumps({"environment": environment(detect()), "figures": found}, indent=2)
    print(json.dumps(found, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    if found["errors"] or found["wrong_streams"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
