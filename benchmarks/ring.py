"""Long contexts in one process and among ranks that share them: times, memory, equal outputs.

    python -m benchmarks.make_checkpoint qwen2.5-0.5b checkpoints/qwen
    OMP_NUM_THREADS=1 python -m benchmarks.ring checkpoints/qwen --quantization w8a8 --out ring.json

With OMP_NUM_THREADS=1 each process has one thread, as if each had memory and cores of its own;
without it, all have the same threads in all, and what is measured is what sharing costs.

On a machine with other work, times say little: `busiest` is the processor time of a prompt in the
process that needs the most, which with one thread each is what it takes on cores of its own (with
what a rank spins before it sleeps, up to 2 ms a meeting).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect

WORK = {
    "1 prompt of 250": (1, 250, 2),
    "1 prompt of 2,000": (1, 2000, 24),
    "1 prompt of 6,000": (1, 6000, 4),
    "4 prompts of 500": (4, 500, 24),
}
"""Sequences, tokens of each prompt, tokens of each answer."""

WHAT = ("prompt", "decode", "busiest")

CACHE_TOKENS = 24_576


def timed(llm: LLM, sizes: tuple[int, int, int], logprobs: int | None) -> tuple[float, float, Any]:
    """Seconds until the last first token, and of a step that decodes; and what was said."""
    sequences, prompt, answer = sizes
    prompts = [
        {"prompt_token_ids": [5 + (7 * i + 13 * j) % 997 for i in range(prompt)]}
        for j in range(sequences)
    ]
    params = SamplingParams(
        temperature=0, max_tokens=answer, ignore_eos=True, logprobs=logprobs
    )  # fmt: skip
    outputs = llm.generate(prompts, params)
    metrics = [output.metrics for output in outputs]
    arrived = min(m.arrival_time for m in metrics)
    first = max(m.token_times[0] for m in metrics)
    last = max(m.token_times[-1] for m in metrics)
    said = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
    return first - arrived, (last - first) / max(answer - 1, 1), said


def processor_s(llm: LLM) -> list[float]:
    """That each process has taken."""
    team, found = llm.engine.runtime.team, [time.process_time()]
    for other in [] if team is None else team._others:
        ticks = Path(f"/proc/{other.process.pid}/stat").read_text().rpartition(")")[2].split()
        found.append((int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK"))
    return found


def busiest(llm: LLM, sizes: tuple[int, int, int]) -> float:
    """Processor time of the prompts, in the process that takes the most."""
    before = processor_s(llm)
    timed(llm, (*sizes[:2], 1), None)
    return max(b - a for a, b in zip(before, processor_s(llm), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    ranks = asked.ranks
    ways: dict[str, dict[str, int]] = {
        "one process": {"num_blocks": CACHE_TOKENS // 32},
        "context": {"context_parallel_size": ranks, "num_blocks": CACHE_TOKENS // (256 * ranks)},
        "tensor": {"tensor_parallel_size": ranks, "num_blocks": CACHE_TOKENS // 32},
    }
    engines = {
        name: LLM(
            asked.model, quantization=asked.quantization, skip_tokenizer_init=True,
            max_model_len=8192, enable_prefix_caching=False, **way,
        )
        for name, way in ways.items()
    }  # fmt: skip
    layouts = {name: llm.engine.runtime.layout for name, llm in engines.items()}
    cache = {name: layouts[name].nbytes(way["num_blocks"]) for name, way in ways.items()}
    seconds: dict[str, dict[str, dict[str, float]]] = {}
    for work, sizes in WORK.items():
        said = [timed(llm, sizes, 1)[2] for llm in engines.values()]
        assert said[1:] == said[:-1], f"{work}: not all say the same"
        times: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        for _ in range(asked.rounds):
            for name, llm in engines.items():
                times[name].append((*timed(llm, sizes, None)[:2], busiest(llm, sizes)))
        seconds[work] = {
            name: dict(zip(WHAT, map(statistics.median, zip(*each, strict=True)), strict=True))
            for name, each in times.items()
        }
        for what in WHAT:
            whole = seconds[work]["one process"][what]
            print(f"{work}, {what}: {whole * 1e3:.1f} ms in one process", end="")
            for name in list(ways)[1:]:
                took = seconds[work][name][what]
                print(f"; {name} {took * 1e3:.1f} ms, {whole / took:.2f} of its speed", end="")
            print(", equal", flush=True)
    report = {
        **environment(detect()), "benchmark": "ring", "model": asked.model.name,
        "quantization": asked.quantization, "ranks": ranks, "rounds": asked.rounds, "equal": True,
        "cache_bytes_of_each": cache, "seconds": seconds,
    }  # fmt: skip
    if asked.out is not None:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
