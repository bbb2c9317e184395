"""What a fleet costs, and what choosing instances by prefixes is worth.

    python -m benchmarks.fleet --trace mooncake.jsonl --json fleet.json

Cost: one server of the embedded model, asked directly and through a fleet that has it as its only
instance, in turns. It makes a token in about a millisecond, so that whatever the fleet adds shows.
Policies: two instances, each with half of the CPUs and half of the blocks, on the trace's arrivals,
sped up; every policy in turn, and one instance with all of both beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.server import ended, load, results, serving

from penstock.bench.environment import environment
from penstock.hardware import detect

POLICIES = ("prefix", "least", "round_robin")
FLEET = """
policy = "{policy}"
[[model]]
name = "stories"
{where}
"""


@contextmanager
def fleet_of(where: str, policy: str) -> Iterator[str]:
    """The address of a fleet of one model."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(FLEET.format(policy=policy, where=where))
        with serving(str(file), command="fleet") as server:
            yield server.url


def run(url: str, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        ended(load(url, path, *options))
        return results(path)


def cost(repeats: int) -> dict[str, Any]:
    """Through a fleet over directly: time to the first token, between tokens, tokens a second."""
    found: dict[str, Any] = {}
    with serving("stories", "--max-queue-size", "5000") as server:
        where = f'workers = ["{server.url}"]'
        with fleet_of(where, "prefix") as fleet:
            for concurrency, prompts in ((1, 100), (32, 600)):
                options = (
                    "--dataset-name", "random", "--random-input-len", "200", "--random-output-len",
                    "100", "--num-prompts", str(prompts), "--max-concurrency", str(concurrency),
                )  # fmt: skip
                runs: dict[str, list[dict[str, Any]]] = {"directly": [], "fleet": []}
                for _ in range(repeats):
                    for name, url in (("directly", server.url), ("fleet", fleet)):
                        runs[name].append(run(url, *options))
                found[f"at {concurrency}"] = {
                    name: {
                        "ttft_ms": 1e3 * median(x["ttft_s"]["p50"] for x in several),
                        "itl_ms": 1e3 * median(x["itl_s"]["p50"] for x in several),
                        "output_tokens_per_s": median(x["output_tokens_per_s"] for x in several),
                        "failed": sum(x["failed"] for x in several),
                    }
                    for name, several in runs.items()
                }
                print(f"at {concurrency}", json.dumps(found[f"at {concurrency}"]), flush=True)
    return found


def policies(trace: Path, requests: int, scale: float, repeats: int) -> dict[str, Any]:
    """Each policy's hit rate and time to the first token."""
    options = (
        "--dataset-name", "mooncake", "--dataset-path", str(trace), "--block-tokens", "8",
        "--block-size", "32", "--max-input-len", "470", "--long-prompts", "cut",
        "--max-output-len", "8", "--num-prompts", str(requests), "--time-scale", str(scale),
    )  # fmt: skip
    two = 'model = "stories"\ninstances = 2\ncpus = "split"\n' + _options(2000)
    one = 'model = "stories"\n' + _options(4000)
    ways = {**{policy: (two, policy) for policy in POLICIES}, "one instance": (one, "least")}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            with fleet_of(*way) as url:
                found = run(url, *options)
            runs[name].append(found)
            print(name, found["ttft_s"], found["prefix_hit_rate"], found["failed"], flush=True)
    return {
        name: {
            "prefix_hit_rate": median(x["prefix_hit_rate"]["server"] for x in several),
            "ttft_p50_ms": 1e3 * median(x["ttft_s"]["p50"] for x in several),
            "ttft_p99_ms": 1e3 * median(x["ttft_s"]["p99"] for x in several),
            "failed": sum(x["failed"] for x in several),
        }
        for name, several in runs.items()
    }


def _options(blocks: int) -> str:
    return f'options = ["--num-gpu-blocks-override={blocks}", "--max-queue-size=5000"]'


def median(values: Iterator[float]) -> float:
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, help="Mooncake's; without it only the cost")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--time-scale", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = {"cost": cost(arguments.repeats)}
    if arguments.trace:
        found["policies"] = policies(
            arguments.trace, arguments.requests, arguments.time_scale, arguments.repeats
        )
    report = {"environment": environment(detect()), "command": sys.argv[1:], **found}
    print(json.dumps(found, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
