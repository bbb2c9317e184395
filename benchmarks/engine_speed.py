"""What an engine costs to build and gains at run time, beside the model unbuilt.

    python benchmarks/make_checkpoint.py qwen2.5-0.5b checkpoints/qwen
    python benchmarks/engine_speed.py checkpoints/qwen --quantization w4a8 --json results.json

A build with an empty timing cache and one that replays it; from `LLM(…)` to the first token in a
process of its own, files in the page cache; a decoding step of the engine and of its operators
called one by one, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.environment import environment
from penstock.bench.latency import Workload, run_once
from penstock.bench.meter import Meter
from penstock.bench.profile import decoding
from penstock.hardware import detect
from penstock.runtime import load_runtime

START = """
import json, sys, time
from penstock import LLM, SamplingParams
options = json.loads(sys.argv[1])
start = time.perf_counter()
llm = LLM(**options)
llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0, detokenize=False))
print(time.perf_counter() - start)
"""
LENGTH = 1024


def build(model: Path, engine: Path, quantization: str, cache: Path) -> dict[str, Any]:
    """The report of a build in a process of its own."""
    command = [
        *(sys.executable, "-c", "from penstock.cli.main import run; run()", "build", str(model)),
        *("-o", str(engine), "--quantization", quantization, "--force", "--json"),
        *("--max-model-len", str(LENGTH)),
    ]
    found = subprocess.run(
        command, check=True, capture_output=True, text=True,
        env={**os.environ, "PENSTOCK_CACHE": str(cache)},
    )  # fmt: skip
    report: dict[str, Any] = json.loads(found.stdout)
    return {
        "seconds": round(sum(report["seconds"].values()), 1),
        "phases": report["seconds"],
        "timings": report["timings"],
        "disturbed": report["disturbed"],
        "variants": len(report["chosen"]["variants"]),
        "peak_bytes": report["peak_bytes"],
    }


def starts(options: dict[str, Any], times: int) -> list[float]:
    """Seconds from `LLM(…)` to the first token."""
    found = []
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", START, json.dumps(options)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        found.append(round(float(done.stdout), 3))
    return found


def steps(engine: Path, rounds: int) -> dict[str, dict[str, float]]:
    """A decoding step of the engine, and of its operators one by one: medians of rounds in turns.

    Outside: what a step takes beyond its operators, in the same pass. One by one that includes what
    timing them costs.
    """
    ways, found = {"engine": False, "one by one": True}, dict[str, list[tuple[float, float]]]()
    work = Workload(input_len=64, output_len=64, batch_size=1, context=64, repeats=1)
    for _ in range(rounds):
        for name, eager in ways.items():
            config = work.config(str(engine), enforce_eager=eager)
            runtime = load_runtime(config)
            _, plain = run_once(Meter(config, runtime), np.random.default_rng(0), work)
            outside = [r.seconds - ops for r, ops in decoding(config, runtime, work)]
            seconds = [record.seconds for record in plain]
            found.setdefault(name, []).append(
                (statistics.median(seconds), statistics.median(outside))
            )
    return {
        name: {
            "step_s": statistics.median(seconds for seconds, _ in rows),
            "outside_s": statistics.median(outside for _, outside in rows),
        }
        for name, rows in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", default="w4a8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    checkpoint = sum(f.stat().st_size for f in given.model.glob("*.safetensors"))
    with tempfile.TemporaryDirectory() as folder:
        engine, cache = Path(folder) / "engine", Path(folder) / "cache"
        builds = [build(given.model, engine, given.quantization, cache) for _ in range(2)]
        options = {"max_model_len": LENGTH, "skip_tokenizer_init": True}
        started = {
            "engine": starts({"model": str(engine), **options}, 5),
            "unbuilt": starts(
                {"model": str(given.model), "quantization": given.quantization, **options}, 3
            ),
        }
        decode = steps(engine, given.rounds)
    ratio = decode["engine"]["step_s"] / decode["one by one"]["step_s"]
    for name, found in zip(("cold", "again"), builds, strict=True):
        print(
            f"build, {name}: {found['seconds']} s {found['phases']}, timings {found['timings']}"
            f"{', disturbed' if found['disturbed'] else ''}, {found['variants']} variants, peak "
            f"{found['peak_bytes'] / checkpoint:.2f} × the checkpoint"
        )
    for name, seconds in started.items():
        print(f"LLM() to the first token, {name}: {seconds} s")
    for name, way in decode.items():
        print(
            f"step, {name}: {way['step_s'] * 1e3:.2f} ms, outside {way['outside_s'] * 1e3:.2f} ms"
        )
    print(f"the engine's step takes {ratio:.2f} of the other's")
    if given.json is not None:
        data = {
            "benchmark": "engine_speed",
            "setup": {"quantization": given.quantization, "checkpoint_bytes": checkpoint},
            "results": {"builds": builds, "start_s": started, "decode": decode},
            **environment(detect()),
        }
        given.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
