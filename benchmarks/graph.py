"""A step by every way to run a graph, side by side, and without each of the passes.

    python benchmarks/graph.py stories --json graph.json
    python benchmarks/graph.py checkpoints/qwen --quantization w4a8

Ways take turns, so that a busy machine slows all of them; the figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.bench.environment import environment
from penstock.cache import PagedLayout
from penstock.hardware import detect
from penstock.models.hub import resolve
from penstock.models.load import load_model
from penstock.nn import Decoder
from penstock.pipeline import PASSES, export_graph, optimize
from penstock.pipeline.compiled import compile_graph
from penstock.pipeline.graph import weights_of
from penstock.runtime import Forward, Program
from penstock.runtime.package import PackageForward
from penstock.step import KV, Step

BLOCK, CONTEXT, CHUNK = 32, 128, 256
FUSIONS = [name for name in PASSES if name.startswith("fuse-")]


def step(count: int, context: int) -> Step:
    """`count` tokens of one sequence that ends at `context`."""
    at = torch.arange(context - count, context, dtype=torch.int32)
    table = torch.arange(-(-context // BLOCK), dtype=torch.int32)[None]
    ends = torch.tensor([0, count], dtype=torch.int32)
    seen = torch.tensor([context], dtype=torch.int32)
    last = torch.tensor([count - 1], dtype=torch.int32)
    return Step(at % 100 + 3, at, at, ends, seen, table, last)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    done = work()
    return done, time.perf_counter() - begin


def ways(
    decoder: Decoder, kv: KV, folder: Path | None, figures: dict[str, Any]
) -> dict[str, Forward]:
    """Every `Forward` of the model; what making them took goes to `figures`."""
    weights = weights_of(decoder)
    plain, figures["export_s"] = timed(lambda: export_graph(decoder, kv))
    done, figures["passes_s"] = timed(lambda: optimize(plain))
    figures["operators"] = {"before": len(done.before), "after": len(done.after)}
    found: dict[str, Forward] = {
        "native program": Program(done.graph.bind(weights), kv),
        "operators one by one": decoder,
        "graph, one by one": done.graph.bind(weights),
    }
    if folder is not None:
        file, figures["compile_s"] = timed(lambda: compile_graph(done.graph, folder))
        _, figures["compile_again_s"] = timed(lambda: compile_graph(done.graph, folder))
        found["compiled package"] = PackageForward(file, weights)
    for name in FUSIONS:
        rest = [other for other in PASSES if other != name]
        graph = optimize(plain, rest).graph
        found[f"program without {name}"] = Program(graph.bind(weights), kv)
    graph = optimize(plain, ["fold-constants", "dead-code"]).graph
    found["program without fusion"] = Program(graph.bind(weights), kv)
    return found


def measure(found: dict[str, Forward], kv: KV, given: Step, rounds: int) -> dict[str, float]:
    """Median milliseconds a step."""
    times: dict[str, list[float]] = {name: [] for name in found}
    with torch.inference_mode():
        want = next(iter(found.values()))(given, kv).clone()
        for name, forward in found.items():
            if not torch.equal(forward(given, kv), want):
                raise SystemExit(f"{name} gives other logits.")
        for _ in range(rounds):
            for name, forward in found.items():
                times[name].append(timed(lambda forward=forward: forward(given, kv))[1] * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    decoder = load_model(
        resolve(given.model), max_model_len=512, quantization=given.quantization
    ).model
    layers = decoder.spec.layers
    heads = tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in layers)
    kv = PagedLayout(heads, decoder.dtype, BLOCK).allocate(16)
    figures: dict[str, Any] = {"model": given.model, "formats": decoder.formats.name}
    with tempfile.TemporaryDirectory() as folder:
        found = ways(decoder, kv, None if given.no_compile else Path(folder), figures)
        figures["decode_ms"] = measure(found, kv, step(1, CONTEXT), given.rounds)
        few = max(given.rounds // 10, 5)
        figures["chunk_ms"] = measure(found, kv, step(CHUNK, CHUNK), few)
    print(json.dumps({k: v for k, v in figures.items() if not k.endswith("_ms")}))
    for name in found:
        decode, chunk = figures["decode_ms"][name], figures["chunk_ms"][name]
        print(f"{name:32} {decode:9.3f} ms a token {chunk:9.2f} ms a chunk of {CHUNK}")
    if given.json:
        given.json.write_text(json.dumps({**environment(detect()), **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
