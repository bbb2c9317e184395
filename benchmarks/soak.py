"""Everything at once for half an hour: does memory stay flat, and does every block come back?

    python -m benchmarks.soak --minutes 30 --json benchmarks/results/soak.json

Starts `penstock serve` as a process of its own with a small cache and a short queue, so that
requests wait, give way and are refused, and keeps more clients busy than it has rows: streams,
samples, chats that grow, embeddings, responses, Anthropic's messages, malformed bodies, and clients
that leave. Resident memory is read from /proc; blocks and requests from `/metrics` at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.server import serving

from penstock.bench.environment import environment
from penstock.hardware import detect

_WORDS = "the little dog cat girl boy ran to park and saw a big red ball under old tree".split()
_FINE = frozenset({200, 400, 429})  # refused bodies and a full queue are part of it
_LIMITS = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "56", "--max-queue-size", "32")

Sample = tuple[float, float]  # minutes, resident MiB


class Soak:
    """Clients, and what they saw."""

    def __init__(self, port: int, end: float) -> None:
        self.port, self.end = port, end
        self.statuses: Counter[str] = Counter()
        self.errors: list[str] = []
        self.left = 0

    async def client(self, number: int) -> None:
        """One request after the other, each on a connection of its own."""
        rng = random.Random(number)
        history: list[dict[str, str]] = []
        while time.monotonic() < self.end:
            path, body, leaves = self._request(rng, history)
            try:
                status, answer = await self._ask(path, body, rng.random() * 0.5 if leaves else None)
            except OSError as error:
                self.errors.append(f"{path}: {error!r}")
                continue
            if status is None:
                self.left += 1
                continue
            self.statuses[f"{path} {status}"] += 1
            if status not in _FINE or (status == 400) != (body.get("max_tokens") == "many"):
                self.errors.append(f"{path} {status}: {answer[:200]!r}")
            if path == "/v1/chat/completions" and status == 200:
                said = json.loads(answer)["choices"][0]["message"]["content"]
                history.append({"role": "assistant", "content": said})
            if status == 429:
                await asyncio.sleep(rng.random())

    def _request(
        self, rng: random.Random, history: list[dict[str, str]]
    ) -> tuple[str, dict[str, Any], bool]:
        words = " ".join(rng.choices(_WORDS, k=rng.randrange(1, 120)))
        prompt = rng.choice(("", "Once upon a time there was a little girl. " * 6)) + words
        tokens, leaves = rng.randrange(1, 120), rng.random() < 0.1
        kind = rng.randrange(8)
        if kind == 0:
            if len(history) > 8:
                history.clear()
            history.append({"role": "user", "content": words[:60]})
            return (
                "/v1/chat/completions",
                {"messages": history, "max_tokens": tokens % 40 + 1},
                False,
            )
        if kind == 1:
            return "/v1/embeddings", {"input": [prompt, words]}, leaves
        if kind == 2:
            return "/v1/responses", {"input": prompt, "max_output_tokens": tokens + 16}, leaves
        if kind == 3:
            messages = [{"role": "user", "content": prompt}]
            return "/v1/messages", {"model": "stories", "messages": messages,
                                    "max_tokens": tokens, "stream": True}, leaves  # fmt: skip
        if kind == 4 and rng.random() < 0.3:
            return "/v1/completions", {"prompt": prompt, "max_tokens": "many"}, False
        body = {"prompt": prompt, "max_tokens": tokens, "n": rng.choice((1, 1, 1, 3)),
                "stream": rng.random() < 0.7, "logprobs": rng.choice((None, 2)),
                "ignore_eos": True}  # fmt: skip
        return "/v1/completions", body, leaves

    async def _ask(
        self, path: str, body: dict[str, Any], leave_after: float | None
    ) -> tuple[int | None, bytes]:
        """Status and body; no status when the client left before the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            data = json.dumps(body).encode()
            writer.write(
                b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: "
                b"application/json\r\nContent-Length: %d\r\n\r\n%s"
                % (path.encode(), len(data), data)
            )
            try:
                answer = await asyncio.wait_for(reader.read(-1), leave_after)
            except TimeoutError:
                return None, b""
            head, _, rest = answer.partition(b"\r\n\r\n")
            return int(head.split()[1]), rest
        finally:
            writer.close()


def _resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def _watch(pid: int, soak: Soak, samples: list[Sample]) -> None:
    start = time.monotonic()
    while time.monotonic() < soak.end:
        await asyncio.sleep(5)
        samples.append(((time.monotonic() - start) / 60, _resident_mib(pid)))
        print(
            f"\r{samples[-1][0]:5.1f} min  {samples[-1][1]:7.1f} MiB  "
            f"{sum(soak.statuses.values())} answers, {soak.left} left, {len(soak.errors)} errors",
            end="", file=sys.stderr, flush=True,
        )  # fmt: skip


async def _metrics(port: int) -> dict[str, float]:
    """Every series without a label besides the model's and the engine's."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    text = (await reader.read(-1)).decode()
    writer.close()
    return {
        m[1]: float(m[2])
        for m in re.finditer(r"^([\w:]+)\{engine=[^,}]*,model_name=[^,}]*\} (\S+)$", text, re.M)
    }


async def _run(port: int, pid: int, clients: int, minutes: float) -> dict[str, Any]:
    soak, samples = Soak(port, time.monotonic() + minutes * 60), list[Sample]()
    await asyncio.gather(
        _watch(pid, soak, samples), *(soak.client(number) for number in range(clients))
    )
    for _ in range(100):  # what was aborted last is being taken out
        await asyncio.sleep(0.1)
        after = await _metrics(port)
        if after["vllm:num_requests_running"] + after["vllm:num_requests_waiting"] == 0:
            break
    settled = [mib for at, mib in samples if at > samples[-1][0] / 6]
    quarter = max(len(settled) // 4, 1)
    first, last = statistics.median(settled[:quarter]), statistics.median(settled[-quarter:])
    return {
        "minutes": minutes,
        "clients": clients,
        "answers": dict(sorted(soak.statuses.items())),
        "left_before_the_end": soak.left,
        "errors": soak.errors[:20],
        "resident_mib": {"after_a_sixth": settled[0], "first_quarter": first, "last_quarter": last,
                         "most": max(settled), "least": min(settled)},
        "growth": last / first - 1,
        "preemptions": after["vllm:num_preemptions_total"],
        "generation_tokens": after["vllm:generation_tokens_total"],
        "kv_cache_usage_at_the_end": after["vllm:kv_cache_usage_perc"],
        "requests_at_the_end": after["vllm:num_requests_running"]
        + after["vllm:num_requests_waiting"],
        "samples": [(round(a, 2), round(mib, 1)) for a, mib in samples[:: len(samples) // 60 + 1]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="stories")
    parser.add_argument("--clients", type=int, default=56)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    arguments, extra = parser.parse_known_args()
    with serving(arguments.model, *_LIMITS, *extra) as server:
        found = asyncio.run(
            _run(server.port, server.process.pid, arguments.clients, arguments.minutes)
        )
    found["exit_status"] = server.process.returncode
    print(json.dumps({k: v for k, v in found.items() if k != "samples"}, indent=2))
    if arguments.json is not None:
        text = json.dumps({"environment": environment(detect()), "figures": found}, indent=2)
        arguments.json.write_text(text + "\n")
    leaked = found["kv_cache_usage_at_the_end"] or found["requests_at_the_end"]
    if found["errors"] or leaked or abs(found["growth"]) > 0.02 or found["exit_status"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
