"""What each scheduling policy does to two loads on one server that can't keep up with both.

    python -m benchmarks.policies --json results.json

A crowd of long prompts keeps a small batch full and a queue behind it; meanwhile short urgent ones
come at random. Each policy gets the same two loads by `penstock bench serve`. Urgent requests carry
what the policy heeds: a priority, a target for their first token, or only their shortness.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.server import ended, load, results, serving

from penstock.bench.environment import environment
from penstock.hardware import detect

_URGENT: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "priority": {"priority": -1},
    "sjf": {},
    "edf": {"ttft_slo_ms": 50.0},
}


def _figures(path: Path) -> dict[str, Any]:
    found = results(path)
    return {"completed": found["completed"], "ttft_s": found["ttft_s"]}


def measure(policy: str, crowd: int, urgent: int, folder: Path) -> dict[str, Any]:
    """Both loads' figures under one policy."""
    paths = folder / f"{policy}-crowd.json", folder / f"{policy}-urgent.json"
    wish = ("--extra-body", json.dumps(_URGENT[policy])) if _URGENT[policy] else ()
    with serving("stories", "--max-num-seqs", "8", "--scheduling-policy", policy) as server:
        loads = [
            load(server.url, paths[0], "--num-prompts", str(crowd), "--random-input-len", "256",
                 "--random-output-len", "96", "--max-concurrency", "64"),
            load(server.url, paths[1], *wish, "--num-prompts", str(urgent), "--request-rate",
                 "5", "--random-input-len", "24", "--random-output-len", "8"),
        ]  # fmt: skip
        for one in loads:
            ended(one)
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
