"""A window and the first tokens beside all of a context: what is lost of a text, and what is saved.

    python -m benchmarks.reach stories --text held_out.txt --window 128 --length 1000
    python -m benchmarks.make_checkpoint qwen2.5-0.5b checkpoints/qwen
    python -m benchmarks.reach checkpoints/qwen --quantization w8a8 --window 1024 --length 10240

With a text: its perplexity beyond the first window, in pieces of `length` tokens, for those who see
all, a window with and without the first tokens, and nothing but what came since the last multiple
of the window. Without: seconds of a prompt, milliseconds of a token behind it, bytes of keys and
values, in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.hardware import detect

ANSWER = 64
READ = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
SAID = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


def ways(window: int) -> dict[str, dict[str, Any]]:
    return {
        "all": {},
        f"{window}, of which the first 4": {"max_attention_window": window},
        f"the latest {window}": {"max_attention_window": window, "sink_token_length": 0},
    }


def losses(llm: LLM, ids: list[int]) -> list[float]:
    """Of each token but the first, by what comes before it."""
    (output,) = llm.generate([{"prompt_token_ids": ids}], READ)
    assert output.prompt_logprobs is not None
    found = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
    return [-one[token].logprob for token, one in found]


def perplexities(asked: argparse.Namespace) -> dict[str, float]:
    """Of tokens that have more than a window before them."""
    window, length = asked.window, asked.length
    load = {"quantization": asked.quantization, "enable_prefix_caching": False}
    text, found = asked.text.read_text(encoding="utf-8"), {}
    for name, way in ways(window).items():
        llm = LLM(asked.model, max_model_len=length + 8, **load, **way)
        ids = llm.get_tokenizer().encode(text[: 8 * asked.pieces * length])
        pieces = [ids[at : at + length] for at in range(0, asked.pieces * length, length)]
        if len(pieces[-1]) < length:
            raise SystemExit(f"{asked.text} has fewer than {asked.pieces} × {length} tokens.")
        found[name] = [loss for one in pieces for loss in losses(llm, one)[window:]]
    restarted = []
    for one in pieces:
        for at in range(window, length, window):
            # a piece's first token has nothing before it, so it reads the last of those before
            restarted += losses(llm, one[at - 1 : at + window])
    found[f"since the last multiple of {window}"] = restarted[1:]
    return {name: math.exp(statistics.fmean(each)) for name, each in found.items()}


def costs(asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Of a prompt of `length` tokens and of what comes after it."""
    prompt = {"prompt_token_ids": [5 + (i * i * 7) % 997 for i in range(asked.length)]}
    shared: dict[str, Any] = {
        "quantization": asked.quantization,
        "skip_tokenizer_init": True,
        "max_model_len": asked.length + ANSWER,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }
    engines = {name: LLM(asked.model, **shared, **way) for name, way in ways(asked.window).items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    held = {}
    for _ in range(asked.rounds):
        for name, llm in engines.items():
            engine, start = llm.engine, time.perf_counter()
            engine.add_request("one", prompt["prompt_token_ids"], SAID)
            first, most = None, 0
            while engine.has_unfinished:
                engine.step()
                running = engine.scheduler.running
                most = max([most, *(engine.pool.filled(one.blocks) for one in running)])
                if first is None and running and running[0].num_output:
                    first = time.perf_counter()
            assert first is not None
            end = time.perf_counter()
            times[name].append((first - start, 1e3 * (end - first) / (ANSWER - 1)))
            held[name] = llm.runtime.layout.nbytes(most)
    return {
        name: {
            "prompt_s": statistics.median(a for a, _ in each),
            "token_ms": statistics.median(b for _, b in each),
            "kv_mib": held[name] / (1 << 20),
        }
        for name, each in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--quantization")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--length", type=int, default=10240)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--pieces", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any]
    if asked.text is not None:
        found = {"text": asked.text.name, "perplexity": perplexities(asked)}
    else:
        found = {"rounds": asked.rounds, "costs": costs(asked)}
    report = {
        **environment(detect()), "benchmark": "reach", "model": Path(asked.model).name,
        "quantization": asked.quantization, "window": asked.window, "length": asked.length, **found,
    }  # fmt: skip
    for name, each in (found.get("perplexity") or found["costs"]).items():
        print(f"{name}: {each}")
    if asked.out is not None:
        asked.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
