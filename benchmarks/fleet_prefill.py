"""Prompts computed beside those who decode: how evenly streams run while long prompts come in.

    python -m benchmarks.make_checkpoint qwen2.5-0.5b checkpoints/qwen
    python -m benchmarks.fleet_prefill --model checkpoints/qwen --tokenizer TOKENIZER \
        --json fleet-prefill.json

Two instances, each with half of the CPUs: both for everything, or one that computes long prompts
for the other. A few short streams run all the time; beside them prompts of 2,000 tokens come one
after the other. The two ways in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.server import beside_long_prompts, serving

from penstock.bench.environment import environment
from penstock.hardware import detect

_WAYS = {"alike": "instances = 2", "apart": "instances = 1\nprefill = 1\nprefill_from = 2000"}
_FLEET = """
[[model]]
name = "m"
model = "{model}"
cpus = "split"
options = ["--quantization={quantization}", "--max-model-len=2304", "--tokenizer={tokenizer}"]
{way}
"""


def measure(way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The streams' times between tokens, and the long prompts' first token."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fleet.toml"
        file.write_text(_FLEET.format(way=_WAYS[way], **vars(arguments)))
        with serving(str(file), command="fleet") as fleet:
            short, long = beside_long_prompts(
                fleet.url, Path(folder), arguments.tokenizer, arguments.prompts
            )
    return {
        "streams_itl_s": short["itl_s"],
        "streams_tokens_per_s": short["output_tokens_per_s"],
        "long_ttft_s": long["ttft_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--quantization", default="w8a8")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.model, arguments.tokenizer = arguments.model.resolve(), arguments.tokenizer.resolve()
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for _ in range(arguments.repeats):
        for way in _WAYS:
            runs[way].append(measure(way, arguments))
            print(way, json.dumps(runs[way][-1]), flush=True)

    def median(way: str, name: str, at: str) -> float:
        return statistics.median(run[name][at] for run in runs[way])

    summary = {
        way: {
            "streams_itl_p50_ms": 1e3 * median(way, "streams_itl_s", "p50"),
            "streams_itl_p99_ms": 1e3 * median(way, "streams_itl_s", "p99"),
            "streams_tokens_per_s": statistics.median(x["streams_tokens_per_s"] for x in runs[way]),
            "long_ttft_p50_s": median(way, "long_ttft_s", "p50"),
        }
        for way in _WAYS
    }
    print(json.dumps(summary, indent=2))
    if arguments.json is not None:
        about = {"environment": environment(detect()), "command": sys.argv[1:]}
        arguments.json.write_text(json.dumps({**about, "summary": summary, "runs": runs}, indent=2))


if __name__ == "__main__":
    main()
