"""A `penstock serve` of its own for a benchmark, and loads on it by `penstock bench serve`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WARM_UP_S = 12.0  # of streams, before long prompts come
_READY = re.compile(r"url=(http://127\.0\.0\.1:(\d+))")
_PENSTOCK = (sys.executable, "-m", "penstock.cli.main")


@dataclass(slots=True)
class Server:
    """One that is ready."""

    url: str
    port: int
    process: subprocess.Popen[str]


@contextmanager
def serving(model: str, *options: str, command: str = "serve") -> Iterator[Server]:
    """Serve `model`, or a fleet's file, on a free port until the block ends."""
    words = [*_PENSTOCK, command, model, "--port", "0", "--no-log-requests", *options]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if found := _READY.search(line):
                rest = threading.Thread(target=process.stderr.read)  # or it waits to be read
                rest.start()
                yield Server(found[1], int(found[2]), process)
                return
        raise RuntimeError(f"The server didn't start:\n{''.join(said)}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def load(url: str, result: Path, *options: str) -> subprocess.Popen[bytes]:
    """`penstock bench serve`, begun; its figures go to `result`."""
    command = [*_PENSTOCK, "bench", "serve", "--base-url", url, "--ready-timeout", "60",
               "--ignore-eos", "--json", str(result), *options]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def ended(process: subprocess.Popen[bytes], timeout_s: float = 900.0) -> None:
    """Wait for a load. Raises RuntimeError unless it went well."""
    if status := process.wait(timeout_s):
        raise RuntimeError(f"A load ended with status {status}: {process.args}")


def results(path: Path) -> dict[str, Any]:
    """The figures that a load has left."""
    found: dict[str, Any] = json.loads(path.read_text())["results"]
    return found


def beside_long_prompts(
    url: str, folder: Path, tokenizer: Path, prompts: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures of four short streams that run all the time, of prompts of 2,000 tokens beside them
    that come one after the other).
    """
    reads, short, long = (
        ("--tokenizer", str(tokenizer)),
        folder / "short.json",
        folder / "long.json",
    )
    streams = load(url, short, *reads, "--random-input-len", "32", "--random-output-len", "64",
                   "--max-concurrency", "4", "--num-prompts", "100000", "--seed", "1")  # fmt: skip
    time.sleep(_WARM_UP_S)
    ended(load(url, long, *reads, "--random-input-len", "2000", "--random-output-len", "8",
               "--max-concurrency", "1", "--num-prompts", str(prompts), "--seed", "2"))  # fmt: skip
    streams.send_signal(signal.SIGINT)  # it tells what it has
    streams.wait(60)
    return results(short), results(long)
