"""A model in one process and among several, side by side: times, and whether outputs are equal.

    python -m benchmarks.make_checkpoint qwen2.5-0.5b checkpoints/qwen
    python -m benchmarks.ranks checkpoints/qwen --quantization w8a8 --out ranks.json

All have the same threads in all: on one memory node nothing can be gained, and what is measured is
what sharing costs. With OMP_NUM_THREADS=1 each rank has one: what several machines gain, but for
their network.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect

WORK = {
    "decode 1 × 64 tokens @ 128": (1, 128, 64),
    "decode 8 × 32 tokens @ 128": (8, 128, 32),
    "prefill 1 × 1,000 tokens": (1, 1000, 1),
    "prefill 4 × 512 tokens": (4, 512, 1),
}
"""Sequences, tokens of each prompt, tokens of each answer."""


def timed(llm: LLM, sequences: int, prompt: int, answer: int) -> tuple[float, list[Any]]:
    prompts = [
        {"prompt_token_ids": [5 + (7 * i + 13 * j) % 997 for i in range(prompt)]}
        for j in range(sequences)
    ]
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, logprobs=1)
    greedy = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    said = [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
    start = time.perf_counter()
    llm.generate(prompts, greedy)
    return time.perf_counter() - start, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1, help="a pipeline of so many, too")
    parser.add_argument("--expert-parallel", action="store_true", help="experts are whole, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    ways: dict[str, dict[str, Any]] = {
        "one process": {},
        f"{asked.ranks} ranks": {"tensor_parallel_size": asked.ranks},
    }
    if asked.stages > 1:
        ways[f"{asked.stages} stages"] = {"pipeline_parallel_size": asked.stages}
    if asked.expert_parallel:
        shared = {"tensor_parallel_size": asked.ranks, "enable_expert_parallel": True}
        ways[f"{asked.ranks} ranks, whole experts"] = shared
    engines = {
        name: LLM(
            asked.model, quantization=asked.quantization, skip_tokenizer_init=True,
            max_model_len=2048, enable_prefix_caching=False, num_blocks=512, **way,
        )
        for name, way in ways.items()
    }  # fmt: skip
    seconds: dict[str, dict[str, float]] = {}
    for work, sizes in WORK.items():
        times: dict[str, list[float]] = {name: [] for name in ways}
        first = None
        for _ in range(asked.rounds):
            for name, llm in engines.items():
                took, said = timed(llm, *sizes)
                times[name].append(took)
                first = first or said
                assert said == first, f"{name} says something else"
        seconds[work] = {name: statistics.median(each) for name, each in times.items()}
        whole = seconds[work]["one process"]
        print(f"{work}: {whole * 1e3:.1f} ms in one process", end="")
        for name in list(ways)[1:]:
            took = seconds[work][name]
            print(f"; {name} {took * 1e3:.1f} ms, {whole / took:.3f} of its speed", end="")
        print(", equal", flush=True)
    report = {
        **environment(detect()), "benchmark": "ranks", "model": asked.model.name,
        "quantization": asked.quantization, "ranks": asked.ranks, "rounds": asked.rounds,
        "equal": True, "seconds": seconds,
    }  # fmt: skip
    if asked.out is not None:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
