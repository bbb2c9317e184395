"""What each scheduling policy does to two loads on one server that can't keep up with both.

    python -m benchmarks.policies --json results.json

A crowd of long prompts keeps a small batch full and a queue behind it; meanwhile short urgent ones
come at random. Each policy gets the same two loads by `penstock bench serve`. Urgent requests carry
what the policy heeds: a priority, a target for their first token, or only their shortness.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.bench.environment import environment
from penstock.hardware import detect

_READY = re.compile(r"url=(http://127\.0\.0\.1:\d+)")
_URGENT: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"priority": -1},
    "sjf": {},
    "edf": {"ttft_slo_ms": 50.0},
}


def _bench(url: str, result: Path, extra: dict[str, Any], *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock.cli.main", "bench", "serve", "--base-url", url]
    command += ["--ready-timeout", "60", "--ignore-eos", "--json", str(result), *options]
    if extra:
        command += ["--extra-body", json.dumps(extra)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _figures(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())["results"]
    return {"completed": found["completed"], "ttft_s": found["ttft_s"]}


def measure(policy: str, crowd: int, urgent: int, folder: Path) -> dict[str, Any]:
    """Both loads' figures under one policy."""
    server = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--no-log-requests",
         "--max-num-seqs", "8", "--scheduling-policy", policy],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stderr is not None
        url = next(m[1] for line in server.stderr if (m := _READY.search(line)))
        paths = folder / f"{policy}-crowd.json", folder / f"{policy}-urgent.json"
        loads = [
            _bench(url, paths[0], {}, "--num-prompts", str(crowd), "--random-input-len", "256",
                   "--random-output-len", "96", "--max-concurrency", "64"),
            _bench(url, paths[1], _URGENT[policy], "--num-prompts", str(urgent), "--request-rate",
                   "5", "--random-input-len", "24", "--random-output-len", "8"),
        ]  # fmt: skip
        for load in loads:
            if load.wait(600):
                raise RuntimeError(f"{policy}: a load ended with {load.returncode}.")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    return {"crowd": _figures(paths[0]), "urgent": _figures(paths[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--crowd", type=int, default=400)
    parser.add_argument("--urgent", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            policy: measure(policy, arguments.crowd, arguments.urgent, Path(folder))
            for policy in _URGENT
        }
    for policy, loads in found.items():
        print(policy, loads)
    if arguments.json is not None:
        result = {"environment": environment(detect()), "policies": found}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
