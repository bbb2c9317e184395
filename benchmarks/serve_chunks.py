"""Chunked prefill: how evenly streams run while long prompts come in.

    python -m benchmarks.make_checkpoint qwen2.5-0.5b checkpoints/qwen
    python -m benchmarks.serve_chunks --model checkpoints/qwen --tokenizer TOKENIZER \
        --json benchmarks/results/serve-chunks.json

A few short streams run all the time; beside them prompts of 2,000 tokens come one after the other.
The same with chunks of a few hundred tokens a step, and with each prompt computed whole.
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

_MODES = {
    "chunked": ("--max-num-batched-tokens", "256"),
    "whole": ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2304"),
}


def measure(mode: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The streams' times between tokens, and the long prompts' first token."""
    options = ("--quantization", arguments.quantization, "--max-model-len", "2304",
               "--tokenizer", str(arguments.tokenizer))  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(str(arguments.model), *options, *_MODES[mode]) as server,
    ):
        short, long = beside_long_prompts(
            server.url, Path(folder), arguments.tokenizer, arguments.prompts
        )
    return {"streams_itl_s": short["itl_s"], "long_ttft_s": long["ttft_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--quantization", default="w8a8")
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in _MODES}
    for _ in range(arguments.repeats):
        for mode in _MODES:
            runs[mode].append(measure(mode, arguments))
            print(mode, runs[mode][-1], flush=True)
    p99 = {m: statistics.median(run["streams_itl_s"]["p99"] for run in runs[m]) for m in runs}
    summary = {"streams_itl_p99_s": p99, "ratio": p99["chunked"] / p99["whole"]}
    print(json.dumps(summary, indent=2))
    if arguments.json is not None:
        result = {"environment": environment(detect()), "summary": summary, "runs": runs}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if summary["ratio"] > 0.4:
        sys.exit(1)


if __name__ == "__main__":
    main()
