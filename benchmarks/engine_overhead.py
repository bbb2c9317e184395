"""What a step costs beside the model: the engine on a stub that returns constant logits.

    python benchmarks/engine_overhead.py --tokenizer ../shared/data/tokenizers/qwen2.5

Prints microseconds a step by cause, in steady decode, as the median over windows of 32 steps (one
per position in a block, so that every window allocates the same blocks) and their best window.
`sample` includes the argmax over [seqs, vocab]. Detokenizing is what `output` costs more with a
tokenizer than without one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from penstock.cache import PagedLayout
from penstock.config import EngineConfig
from penstock.engine import Engine
from penstock.models.load import LoadedModel
from penstock.models.spec import ModelSpec
from penstock.nn import AttentionSpec, Decoder, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from penstock.quant import formats_of
from penstock.runtime import Runner, Runtime
from penstock.sampling import SamplingParams
from penstock.step import KV, Step
from penstock.tokenizer import Tokenizer

WINDOW = 32
CAUSES = ("schedule", "batch", "forward", "sample", "output")


def stub(vocab: int, tokenizer: Tokenizer | None, seqs: int, length: int, answer: int) -> Runtime:
    """A runtime whose forward gives every row the same Zipfian logits, `answer` first."""
    attention = AttentionSpec(1, 1, 16, 1.0, None)
    decoder = DecoderSpec(vocab, 16, (LayerSpec(attention, MlpSpec(16)),), NormSpec(), length)
    spec = ModelSpec("stub", decoder, (), "float32", None, ())
    model = Decoder(decoder, formats_of(None, torch.float32), torch.float32)
    ranks = torch.arange(1, vocab + 1).roll(answer)
    constant = (-1.2 * ranks.log()).repeat(seqs, 1)

    def forward(step: Step, kv: KV) -> torch.Tensor:
        return constant[: step.sample_at.shape[0]]  # neither an argmax nor a nucleus changes them

    layout = PagedLayout(((1, 16),), torch.float32, 32)
    blocks = seqs * layout.blocks_for(length)
    loaded = LoadedModel(model, spec, torch.float32, length, {}, ())
    return Runtime(loaded, tokenizer, layout, blocks, Runner(forward, layout.allocate(blocks)))


def measure(
    seqs: int, vocab: int, steps: int, tokenizer: Tokenizer | None, stream: bool, sampled: bool
) -> dict[str, tuple[float, float]]:
    """(median, best) microseconds a step by cause, and `step`: all of `Engine.step`."""
    length = steps + 256
    config = EngineConfig.of(max_num_seqs=seqs)
    runtime = stub(vocab, tokenizer, seqs, length, min(300, vocab - 1))
    engine = Engine(config, runtime)
    params = SamplingParams(
        temperature=0.7 if sampled else 0.0, top_p=0.9, seed=1, max_tokens=steps + 100
    )
    for i in range(seqs):
        engine.add_request(str(i), [5 + i % 64] * 40, params, stream=stream)
    for _ in range(WINDOW):
        engine.step()
    windows: dict[str, list[float]] = {cause: [] for cause in (*CAUSES, "step")}
    for _ in range(steps // WINDOW):
        before = engine.ledger.total
        start = time.perf_counter()
        for _ in range(WINDOW):
            engine.step()
        windows["step"].append((time.perf_counter() - start) / WINDOW * 1e6)
        spent = engine.ledger.total.since(before)
        for cause in CAUSES:
            windows[cause].append(getattr(spent, f"{cause}_s") / WINDOW * 1e6)
    return {cause: (statistics.median(v), min(v)) for cause, v in windows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=32)
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32000, 151936])
    parser.add_argument("--steps", type=int, default=1024)
    parser.add_argument("--tokenizer", type=Path, help="a folder: detokenize too")
    parser.add_argument("--stream", action="store_true", help="an output for each step")
    parser.add_argument("--sample", action="store_true", help="draw with top_p, not greedily")
    parser.add_argument("--threads", type=int, help="of kernels; one is less disturbed by others")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_folder(options.tokenizer) if options.tokenizer else None
    found = {
        vocab: measure(
            options.seqs, vocab, options.steps, tokenizer, options.stream, options.sample
        )
        for vocab in options.vocab
    }
    how = "top_p" if options.sample else "greedy"
    title = f"{options.seqs} sequences, {how}, {torch.get_num_threads()} threads"
    print(f"{title}: µs a step, median (best) by vocabulary")
    print(f"{'':10}" + "".join(f"{vocab:>18,}" for vocab in found))
    for cause in (*CAUSES, "step"):
        cells = ["{:.0f} ({:.0f})".format(*rows[cause]) for rows in found.values()]
        print(f"{cause:10}" + "".join(f"{cell:>18}" for cell in cells))
    if options.json:
        where = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        load = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
        options.json.write_text(json.dumps({**where, **load, "us_per_step": found}, indent=1))


if __name__ == "__main__":
    main()
