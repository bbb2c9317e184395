"""A server with nothing behind it, to show and test the page: scripted replies, made-up figures.

`python tests/server/page/fake.py --port 8000 --load full` shows the page under load.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from penstock.server.page import HEADERS, files

MARKDOWN = """## Why a batch is cheap

While **one token** is decoded, every weight is read *once*. Sixteen sequences share the cost:

1. the weights stream past, `2 × parameters` bytes in bfloat16;
2. each sequence adds its own keys and values;
3. products are few, so memory is the bound.

| batch | time | tokens / s |
|---|---:|---:|
| 1 | 12.6 ms | 79 |
| 8 | 15.1 ms | 530 |
| 16 | 18.4 ms | 870 |

```python
def floor_s(weight_bytes: int, kv_bytes: int, bandwidth: float) -> float:
    return (weight_bytes + kv_bytes) / bandwidth
```

> The least time a step could take is what its bytes need.

More in [the paper](https://arxiv.org/abs/2402.16363).
"""
HOSTILE = (
    "<img src=x onerror=alert(1)> <script>alert(2)</script> [a](javascript:alert(3)) "
    "![b](data:text/html,x) [c](https://example.org/ok) <svg onload=alert(4)>\n"
)
STORY = " there was a little boat. It sailed down the river every day, and the river sang to it."
Json = dict[str, Any]


class Engine:
    """Figures of an engine that doesn't exist, moved on by time."""

    def __init__(self, running: int, blocks: int) -> None:
        self.running, self.blocks = running, blocks
        self.random = random.Random(7)
        self.start = time.time()
        self.done = 1204 if running else 0
        self.requests = [self._request() for _ in range(running)]
        self.states = self._fill()
        self.ttft = [0.08 + self.random.expovariate(12) for _ in range(120)] if running else []
        self.itl = [0.016 + self.random.expovariate(250) for _ in range(240)] if running else []

    def _request(self) -> Json:
        prompt = self.random.randrange(40, 1800)
        cached = self.random.choice([0, prompt // 2 // 32 * 32])
        name = f"chatcmpl-{self.random.getrandbits(40):010x}"
        limit, born = self.random.randrange(20, 300), time.time() - self.random.random() * 4
        return {"id": name, "prompt": prompt, "cached": cached, "computed": cached, "output": 0,
                "limit": limit, "born": born}  # fmt: skip

    def _fill(self) -> list[int]:
        states: list[int] = []
        while len(states) < self.blocks:
            state = self.random.choices([0, 1, 2, 3, 4], [5, 6, 2, 3, 0.1 if self.running else 0])[
                0
            ]
            longest = max(2, self.blocks // 40)
            states += [state if self.running else 0] * self.random.randrange(1, longest)
        return states[: self.blocks]

    def _step(self) -> Json:
        budget, prefill = 256, 0
        decoding = 0
        for at, request in enumerate(self.requests):
            if request["computed"] < request["prompt"]:
                chunk = min(budget, request["prompt"] - request["computed"])
                request["computed"] += chunk
                prefill, budget = prefill + chunk, budget - chunk
                continue
            request["output"] += 1
            decoding += 1
            if request["output"] >= request["limit"]:
                self.requests[at] = self._request() | {"born": time.time()}
                self.done += 1
        floor = 0.0124 + decoding * 5e-5 + prefill * 8e-5
        took = floor / self.random.uniform(0.72, 0.86)
        return {
            "at": time.monotonic(), "seconds": took, "floor_s": floor,
            "prefill_tokens": prefill, "decode_tokens": decoding, "sequences": len(self.requests),
        }  # fmt: skip

    def event(self) -> Json:
        steps = [self._step() for _ in range(8)] if self.requests else []
        if steps:
            at = self.random.randrange(self.blocks)
            width = max(1, self.blocks // 100)
            self.states[at : at + width] = [self.random.randrange(4)] * len(
                self.states[at : at + width]
            )
            self.ttft = [*self.ttft[1:], 0.08 + self.random.expovariate(12)]
            self.itl = [*self.itl[8:], *(step["seconds"] for step in steps)]
        ratios = [step["floor_s"] / step["seconds"] for step in steps]
        tokens = sum(step["decode_tokens"] for step in steps)
        return {
            "time": time.time(), "uptime_s": time.time() - self.start + 7500 * bool(steps),
            "model": "stories-8m",
            "requests": {"running": len(self.requests), "waiting": 3 * bool(steps), "swapped": 0,
                         "done": self.done, "failed": 0},
            "running": [self._listed(request) for request in self.requests[:64]],
            "steps": steps,
            "blocks": {"total": self.blocks, "size": 32, "runs": run_lengths(self.states)},
            "latency": {"ttft_s": self.ttft, "itl_s": self.itl},
            "floor_ratio": sum(ratios) / len(ratios) if ratios else None,
            "bound": "memory" if ratios else None,
            "tokens_per_s": tokens / sum(step["seconds"] for step in steps) if steps else 0.0,
            "prefix": {"queries": 184_320 * bool(steps), "hits": 114_720 * bool(steps)},
        }  # fmt: skip

    def _listed(self, request: Json) -> Json:
        phase = "decode" if request["computed"] >= request["prompt"] else "prefill"
        names = {"prompt": "prompt_tokens", "computed": "computed_tokens",
                 "cached": "cached_tokens", "output": "output_tokens"}  # fmt: skip
        tokens = {name: request[key] for key, name in names.items()}
        age_s = time.time() - request["born"]
        return {"id": request["id"], "phase": phase, **tokens, "age_s": age_s}


def run_lengths(states: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for state in states:
        if runs and runs[-1][0] == state:
            runs[-1][1] += 1
        else:
            runs.append([state, 1])
    return runs


def reply_to(message: str) -> str:
    for word, reply in {"markdown": MARKDOWN, "batch": MARKDOWN, "hostile": HOSTILE}.items():
        if word in message:
            return reply
    if "long" in message:
        return " ".join(f"word{i}" for i in range(300))
    return f"You said: {message}"


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: object) -> None:
        """Nothing: tests read what matters from `FakeServer.requests`."""

    def do_GET(self) -> None:
        file = files().get(self.path)
        if file is not None:
            if self.headers.get("If-None-Match") == file.etag:
                self._start(304, {**HEADERS, "ETag": file.etag})
                return
            headers = {**HEADERS, "ETag": file.etag, "Content-Type": file.content_type}
            body = file.body
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                body, headers["Content-Encoding"] = file.gzipped, "gzip"
            self._start(200, headers | {"Content-Length": str(len(body))})
            self.wfile.write(body)
        elif not self._allowed():
            return
        elif self.path == "/v1/models":
            reads = ["text", "image"] if self.server.sees else ["text"]
            model = {"id": "stories-8m", "max_model_len": 512, "input_modalities": reads}
            unloaded = {"id": "other <b>", "status": {"value": "unloaded"}}
            models = [model, unloaded] if self.server.several else [model]
            self._json(200, {"object": "list", "data": models})
        elif self.path.partition("?")[0] == "/page/events":
            self.server.followed.append(self.path)
            self._stream(self._events())
        else:
            self._error(404, f"There is nothing at {self.path}.")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if not self._allowed():
            return
        if self.path == "/v1/completions":
            story = STORY * (20 if "long" in body["prompt"] else 1)
            self._stream(self._completion(story, lambda piece: {"text": piece}))
        elif not self.server.template:
            self._error(400, "The model stories-8m has no chat template. Use /v1/completions.")
        else:
            message = body["messages"][-1]["content"]
            if isinstance(message, list):
                message = " ".join(part.get("text", part["type"]) for part in message)
            if "refuse" in message:
                self._error(400, "The prompt has 600 tokens, and the model reads 512.")
                return
            self._stream(self._completion(reply_to(message), self._delta, fail="break" in message))

    def _delta(self, piece: str) -> Json:
        return {"delta": {"content": piece}}

    def _completion(self, text: str, choice: Any, *, fail: bool = False) -> Iterator[Json | str]:
        pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
        for at, piece in enumerate(pieces):
            time.sleep(self.server.pause_s)
            yield {"choices": [{"index": 0, **choice(piece), "finish_reason": None}], "usage": None}
            if fail and at == 1:
                yield {"error": {"message": "The engine has stopped.", "type": "server_error"}}
                return
        yield {"choices": [{"index": 0, **choice(""), "finish_reason": "stop"}], "usage": None}
        usage = {"prompt_tokens": 128, "completion_tokens": len(pieces),
                 "prompt_tokens_details": {"cached_tokens": 96}}  # fmt: skip
        own = {"ttft_s": 0.042, "floor_ratio": 0.78, "bound": "memory", "tokens_per_s": 61.25}
        yield {"choices": [], "usage": usage, "penstock": own}
        yield "[DONE]"

    def _events(self) -> Iterator[Json]:
        while not self.server.closing.is_set():
            yield self.server.engine.event()
            self.server.closing.wait(0.25)

    def _allowed(self) -> bool:
        if (
            self.server.key is None
            or self.headers.get("Authorization") == f"Bearer {self.server.key}"
        ):
            return True
        self._error(401, "The key is missing or wrong.")
        return False

    def _stream(self, data: Iterator[Json | str]) -> None:
        self._start(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        try:
            for item in data:
                text = item if isinstance(item, str) else json.dumps(item)
                self.wfile.write(f"data: {text}\n\n".encode())
        except OSError:  # the page has gone, or its reader pressed stop
            self.server.hung_up += 1

    def _error(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        self._json(status, {"error": error})

    def _json(self, status: int, data: Json) -> None:
        body = json.dumps(data).encode()
        self._start(status, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _start(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


class FakeServer(ThreadingHTTPServer):
    """Serves from a thread inside `with`; `url` is where."""

    daemon_threads = True

    def __init__(
        self,
        *,
        port: int = 0,
        key: str | None = None,
        template: bool = True,
        sees: bool = False,
        several: bool = False,
        running: int = 0,
        blocks: int = 1024,
        pause_s: float = 0.004,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.key, self.template, self.sees, self.pause_s = key, template, sees, pause_s
        self.several, self.followed = several, list[str]()
        self.engine = Engine(running, blocks)
        self.requests: list[Json] = []
        self.hung_up = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closing.set()
        self.shutdown()
        self.server_close()


LOADS = {"idle": (0, 1024), "some": (9, 1024), "full": (64, 100_000)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load", choices=LOADS, default="some")
    parser.add_argument("--key")
    parser.add_argument("--no-template", action="store_true")
    given = parser.parse_args()
    busy, size = LOADS[given.load]
    with FakeServer(
        port=given.port, key=given.key, template=not given.no_template, running=busy, blocks=size
    ) as server:
        print(server.url, flush=True)
        threading.Event().wait()
