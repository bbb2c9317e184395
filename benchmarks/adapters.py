"""What adapters cost: a decoding step and a prompt with and without, taking turns.

    python benchmarks/adapters.py checkpoints/qwen --out adapters.json

Adapters are random, of all matrices of the layers. The checkpoint needs no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.engine import RequestOptions
from penstock.hardware import detect

FORMATS = ("bfloat16", "w8a8", "w4a8")
COUNT = 4
CASES: dict[str, tuple[int, tuple[str | None, ...]]] = {
    "1 without": (1, (None,)),
    "1 with": (1, ("0",)),
    "16 without": (16, (None,)),
    "16 with one": (16, ("0",)),
    "16 with four": (16, ("0", "1", "2", "3")),
}
"""Sequences that decode, and their adapters in turns."""

PROMPT = 512


def write_adapter(folder: Path, llm: LLM, rank: int, seed: int) -> None:
    """Of all matrices of a Llama-like model's layers."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, layer in enumerate(llm.runtime.model.spec.decoder.layers):
        a, hidden = layer.attention, llm.runtime.model.spec.decoder.hidden
        q, kv, wide = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim, layer.mlp.intermediate
        shapes = {
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }  # fmt: skip
        for name, (n, k) in shapes.items():
            at = f"base_model.model.model.layers.{i}.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, k, generator=random) / k**0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(n, rank, generator=random) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def step_ms(llm: LLM, count: int, adapters: Sequence[str | None]) -> float:
    """The median time between two tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts: list[Any] = [{"prompt_token_ids": [5 + i] + [7] * 15} for i in range(count)]
    options = [RequestOptions(adapter=adapters[i % len(adapters)]) for i in range(count)]
    times = llm.generate(prompts, params, options=options)[0].metrics.token_times
    return 1e3 * statistics.median(b - a for a, b in pairwise(times[2:]))


def prompt_ms(llm: LLM, adapter: str | None) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    prompt: Any = {"prompt_token_ids": list(range(5, 5 + PROMPT))}
    begun = time.perf_counter()
    llm.generate([prompt], params, options=RequestOptions(adapter=adapter))
    return 1e3 * (time.perf_counter() - begun)


def measure(model: Path, form: str, rank: int, rounds: int, room: Path) -> dict[str, Any]:
    """Medians of one format, in ms."""
    chosen: dict[str, Any] = {"dtype": "bfloat16"}
    if form != "bfloat16":
        chosen["quantization"] = form
    llm = LLM(
        model,
        enable_lora=True,
        max_lora_rank=rank,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        **chosen,
    )
    loads = []
    for i in range(COUNT):
        if not (room / str(i)).exists():
            write_adapter(room / str(i), llm, rank, i)
        begun = time.perf_counter()
        llm.load_lora(str(i), room / str(i))
        loads.append(1e3 * (time.perf_counter() - begun))
    assert llm.runtime.adapters is not None
    found: dict[str, list[float]] = {name: [] for name in CASES}
    found |= {"prompt without": [], "prompt with": []}
    for _ in range(rounds + 1):
        for name, (count, adapters) in CASES.items():
            found[name].append(step_ms(llm, count, adapters))
        found["prompt without"].append(prompt_ms(llm, None))
        found["prompt with"].append(prompt_ms(llm, "0"))
    medians = {name: round(statistics.median(each[1:]), 2) for name, each in found.items()}
    nbytes = llm.runtime.adapters.loaded[0].nbytes
    return {"ms": medians, "load_ms": round(statistics.median(loads), 1), "adapter_bytes": nbytes}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(argv)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in asked.formats:
            found[form] = measure(asked.model, form, asked.rank, asked.rounds, Path(folder))
            print(form, json.dumps(found[form]), flush=True)
    if asked.out is not None:
        about = {"benchmark": "adapters", **environment(detect()), "rank": asked.rank}
        document = {**about, "prompt_tokens": PROMPT, "rounds": asked.rounds, "found": found}
        asked.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
