"""What the prefix cache finds in the Mooncake trace, against an oracle, and what it is worth.

    python -m benchmarks.serve_prefix --trace TRACE.jsonl --json results.json

The trace's own arrivals, sped up; its 512-token blocks become blocks of a few tokens, so that the
embedded model's context holds them, and equal hashes become equal tokens. The oracle keeps every
block of every prompt that was sent before. Runs with and without the cache alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.server import ended, load, results, serving

from penstock.bench.environment import environment
from penstock.hardware import detect

_WITH, _WITHOUT = "--enable-prefix-caching", "--no-enable-prefix-caching"


def measure(option: str, trace: Path, requests: int, scale: float) -> dict[str, Any]:
    """One run's time to the first token, and how much of the prompts was found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        limits = ("--num-gpu-blocks-override", "12000", "--max-queue-size", "5000")
        with serving("stories", *limits, option) as server:
            ended(load(
                server.url, path, "--dataset-name", "mooncake", "--dataset-path", str(trace),
                "--block-tokens", "8", "--block-size", "32", "--max-input-len", "470",
                "--long-prompts", "cut", "--max-output-len", "8", "--num-prompts", str(requests),
                "--time-scale", str(scale),
            ))  # fmt: skip
        found = results(path)
    return {key: found[key] for key in ("completed", "failed", "ttft_s", "prefix_hit_rate")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--time-scale", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {"with": [], "without": []}
    for _ in range(arguments.repeats):
        for name, option in (("with", _WITH), ("without", _WITHOUT)):
            found = measure(option, arguments.trace, arguments.requests, arguments.time_scale)
            runs[name].append(found)
            print(name, found["ttft_s"], found["prefix_hit_rate"], flush=True)
    p50 = {name: statistics.median(x["ttft_s"]["p50"] for x in runs[name]) for name in runs}
    rates = [run["prefix_hit_rate"] for run in runs["with"]]
    summary = {
        "ttft_p50_s": p50,
        "ttft_ratio": p50["with"] / p50["without"],
        "equals_the_oracle": all(rate["server"] == rate["oracle"] for rate in rates),
    }
    print(json.dumps(summary, indent=2))
    if arguments.json is not None:
        result = {"environment": environment(detect()), "summary": summary, "runs": runs}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if not summary["equals_the_oracle"] or summary["ttft_ratio"] > 0.5:
        sys.exit(1)


if __name__ == "__main__":
    main()
