"""Preemption by recompute, by swapping, and by choice: what each was predicted to cost, and did.

    python benchmarks/preemption.py path/to/a/model --requests 64 --json preemption.json

Requests that together need far more blocks than the cache has, once in each mode, with and without
the prefix tree; the tokens must be the same in all. Prints for each how often requests gave way,
the median of what that was predicted to cost and of what it did, the median of |predicted ÷
measured − 1| after the warm-up, and the seconds of the whole run. Free preemptions (everything was
still in the cache) are counted apart: there is nothing to divide by. With --peaks a prefill is
predicted by its floor, without by its tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams
from penstock.config import DEFAULT_MODEL, EngineConfig
from penstock.engine import Engine, PreemptionRecord
from penstock.hardware import Peaks
from penstock.roofline import measure
from penstock.runtime import Runtime

MODES = ("recompute", "swap", "auto")


def prompts(options: argparse.Namespace, vocab: int) -> list[list[int]]:
    """Of random tokens and lengths: half of the longest and up."""
    rng = random.Random(0)
    lengths = [rng.randint(options.prompt // 2, options.prompt) for _ in range(options.requests)]
    return [[rng.randrange(10, vocab) for _ in range(length)] for length in lengths]


def errors(records: list[PreemptionRecord]) -> list[float]:
    """|predicted ÷ measured − 1| of each."""
    return [abs((r.predicted_s or 0.0) / r.measured_s - 1) for r in records]


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def summary(records: list[PreemptionRecord]) -> dict[str, Any]:
    paid = [r for r in records if r.measured_s > 0]
    found = sorted(errors(paid))
    return {
        "count": len(paid),
        "free": len(records) - len(paid),
        "median_tokens": median([r.tokens for r in paid]),
        "median_predicted_s": median([r.predicted_s or 0.0 for r in paid]),
        "median_measured_s": median([r.measured_s for r in paid]),
        "median_error": median(found),
        "p90_error": found[int(0.9 * len(found))] if found else None,
    }


def run(
    runtime: Runtime, options: argparse.Namespace, mode: str, caching: bool, peaks: Peaks | None
) -> tuple[dict[str, Any], list[list[int]]]:
    """One run: its figures, and every request's tokens."""
    config = EngineConfig.of(
        max_num_seqs=options.seqs,
        max_num_batched_tokens=max(options.budget, options.seqs),
        preemption_mode=mode,
        enable_prefix_caching=caching,
    )
    engine = Engine(config, runtime)
    engine.ledger.peaks = peaks
    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    for i, prompt in enumerate(prompts(options, engine.vocab_size)):
        engine.add_request(str(i), prompt, params)
    tokens: dict[str, list[int]] = {}
    start = time.perf_counter()
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
    seconds = time.perf_counter() - start
    stats = engine.stats()
    assert stats["used_blocks"] == stats["swapped_blocks"] == 0
    records = list(engine.preemption_log)[options.warm_up :]
    figures = {
        "mode": mode,
        "prefix_caching": caching,
        "seconds": seconds,
        "preemptions_recompute": stats["preemptions_recompute"],
        "preemptions_swap": stats["preemptions_swap"],
        "all": summary(records),
        "recompute": summary([r for r in records if r.mode == "recompute"]),
        "swap": summary([r for r in records if r.mode == "swap"]),
    }
    return figures, [tokens[str(i)] for i in range(options.requests)]


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'cache':7}{'mode':11}{'run':>8}{'way':>11}{'n':>6}{'free':>6}{'tokens':>8}"
        f"{'predicted':>11}{'measured':>11}{'error':>8}{'p90':>8}"
    )
    for row in rows:
        for way in ("recompute", "swap"):
            part = row[way]
            if not part["count"] + part["free"]:
                continue
            cache = "tree" if row["prefix_caching"] else "none"
            line = f"{cache:7}{row['mode']:11}{row['seconds']:7.2f}s{way:>11}"
            line += f"{part['count']:6}{part['free']:6}"
            if part["count"]:
                line += f"{part['median_tokens']:8.0f}{part['median_predicted_s'] * 1e3:9.2f}ms"
                line += f"{part['median_measured_s'] * 1e3:9.2f}ms"
                line += f"{part['median_error']:8.0%}{part['p90_error']:8.0%}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the longest")
    parser.add_argument("--tokens", type=int, default=250, help="to generate")
    parser.add_argument("--seqs", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--budget", type=int, default=512, help="tokens a step")
    parser.add_argument("--warm-up", type=int, default=10, help="preemptions that don't count")
    parser.add_argument("--rounds", type=int, default=1, help="of all modes, in turns")
    parser.add_argument(
        "--peaks", action="store_true", help="measure them: prefills are predicted by their floor"
    )
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    llm = LLM(
        options.model,
        max_model_len=options.prompt + options.tokens + 1,
        max_num_seqs=options.seqs,
        num_blocks=options.blocks,
        quantization=options.quantization,
        skip_tokenizer_init=True,
    )
    peaks = measure() if options.peaks else None
    rows, outputs = [], []
    for _ in range(options.rounds):
        for caching in (False, True):
            for mode in MODES:
                figures, tokens = run(llm.runtime, options, mode, caching, peaks)
                rows.append(figures)
                outputs.append(tokens)
    assert all(tokens == outputs[0] for tokens in outputs), "the modes disagree"
    print(f"{len(outputs)} runs, the same tokens in all")
    show(rows)
    if options.json:
        where = {
            "machine": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "options": {k: str(v) for k, v in vars(options).items()},
        }
        options.json.write_text(json.dumps({**where, "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
