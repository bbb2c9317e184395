"""Keys and values in fewer dimensions beside all of them: what a long context then costs.

    python -m benchmarks.kv_rank llama-3.2-1b --rank 32 --quantization w8a8 --length 8192

A shape of `benchmarks.make_checkpoint` with random weights that no file holds, with and without
`kv_rank`, in turns: seconds of a prompt, milliseconds of a token behind it, bytes of a token in the
cache. What is lost of a text, `penstock prune --kv-rank` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.make_checkpoint import SHAPES

from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect

ANSWER = 48
SAID = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


def engine_of(asked: argparse.Namespace, rank: int, folder: Path) -> LLM:
    path = folder / str(rank)
    path.mkdir()
    config = SHAPES[asked.shape] | ({"kv_rank": rank} if rank else {})
    (path / "config.json").write_text(json.dumps(config))
    return LLM(
        path,
        load_format="dummy",
        quantization=asked.quantization,
        max_model_len=asked.length + ANSWER,
        max_num_seqs=1,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )


def once(llm: LLM, length: int) -> tuple[float, float]:
    """Seconds of a prompt, and milliseconds of each token after the first."""
    engine, start, first = llm.engine, time.perf_counter(), None
    engine.add_request("one", [5 + (i * i * 7) % 997 for i in range(length)], SAID)
    while engine.has_unfinished:
        engine.step()
        running = engine.scheduler.running
        if first is None and running and running[0].num_output:
            first = time.perf_counter()
    assert first is not None
    return first - start, 1e3 * (time.perf_counter() - first) / (ANSWER - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--quantization")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    times: dict[int, list[tuple[float, float]]] = {0: [], asked.rank: []}
    with tempfile.TemporaryDirectory() as folder:
        engines = {rank: engine_of(asked, rank, Path(folder)) for rank in times}
        for _ in range(asked.rounds):
            for rank, llm in engines.items():
                times[rank].append(once(llm, asked.length))
    costs: dict[str, dict[str, Any]] = {}
    for rank, each in times.items():
        layout = engines[rank].runtime.layout
        costs[str(rank or "all")] = {
            "prompt_s": statistics.median(a for a, _ in each),
            "token_ms": statistics.median(b for _, b in each),
            "cache_bytes_per_token": layout.bytes_per_block // layout.block_size,
        }
    ratios = {
        name: statistics.median(
            whole[at] / less[at] for whole, less in zip(times[0], times[asked.rank], strict=True)
        )
        for at, name in enumerate(("prompt", "token"))
    }
    report = {
        **environment(detect()), "benchmark": "kv_rank", "shape": asked.shape,
        "quantization": asked.quantization, "length": asked.length, "rounds": asked.rounds,
        "costs": costs, "times_as_fast": ratios,
    }  # fmt: skip
    for name, cost in costs.items():
        print(f"{name} dimensions: {cost}")
    print(f"times as fast: {ratios}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
