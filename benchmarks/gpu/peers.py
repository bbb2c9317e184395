"""Section: transformers on the same work, in the same run: the 8B shape, random weights, greedy.

Its own ways to be fast: a static cache, for which `generate` compiles the forward pass (with CUDA
graphs), and continuous batching; and what one gets without asking. Prompts of 128 tokens, 128 more
of each. Output tokens over the whole time, prompts included, after a run that isn't counted.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.document import Context, Item
from benchmarks.gpu.models import make
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY

from penstock.bench.workload import greedy, raise_errors

BATCHES = (1, 8, 64)
PROMPT, OUTPUT = 128, 128


def items(context: Context) -> Iterator[Item]:
    yield "penstock", lambda: penstock(context)
    yield "transformers", lambda: by_generate(context, {})
    yield "transformers-continuous", lambda: continuous(context)
    yield (
        "transformers-static-compiled",
        lambda: by_generate(context, {"cache_implementation": "static"}),
    )


def _shape(context: Context) -> dict[str, Any]:
    return TINY if context.dry else LLAMA_1B if context.quick else LLAMA_8B


def _sizes(context: Context) -> tuple[tuple[int, ...], int, int]:
    return ((1, 2), 8, 4) if context.dry else (BATCHES, PROMPT, OUTPUT)


def prompts(context: Context, batch: int) -> list[list[int]]:
    """The same for everybody."""
    _, length, _ = _sizes(context)
    draw = np.random.default_rng(batch)
    most = _shape(context)["vocab_size"]
    found: list[list[int]] = draw.integers(3, most, (batch, length)).tolist()
    return found


def _each_batch(
    context: Context, run: Callable[[list[list[int]]], int], again: float = 1.2
) -> dict[str, Any]:
    """Time `run`, which gives the tokens it made, at every batch; once before for nothing."""
    batches, _, output = _sizes(context)
    found: dict[str, Any] = {}
    for batch in batches:
        if context.due(3.0) and not context.dry:
            found[str(batch)] = {"skipped": "no time was left"}
            continue
        given = prompts(context, batch)
        begun = time.perf_counter()
        run(given)
        ready = time.perf_counter() - begun
        seconds = []
        for _ in range(1 if context.dry else 3):
            begun = time.perf_counter()
            tokens = run(given)
            seconds.append(time.perf_counter() - begun)
            if tokens != batch * output:
                raise RuntimeError(f"{tokens} tokens were made of {batch * output}.")
            if context.due(again * seconds[-1]):
                break
        found[str(batch)] = {
            "first_s": ready,
            "seconds": min(seconds),
            "output_tokens_per_s": batch * output / min(seconds),
        }
    return found


def penstock(context: Context) -> dict[str, Any]:
    batches, length, output = _sizes(context)
    made = make(context, _shape(context), max_model_len=length + output + 8, batch=max(batches))
    engine = made.meter().engine

    def run(given: list[list[int]]) -> int:
        for i, prompt in enumerate(given):
            engine.add_request(f"{time.monotonic_ns()}-{i}", prompt, greedy(output))
        count = 0
        while engine.has_unfinished:
            step = engine.step()
            raise_errors(step)
            count += sum(len(o.outputs[0].token_ids) for o in step if o.finished)
        return count

    return _each_batch(context, run)


def _model(context: Context, attention: str) -> Any:
    """transformers' own, with random weights made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {k: v for k, v in _shape(context).items() if k not in ("architectures", "torch_dtype")}
    config = AutoConfig.for_model(**shape)
    with torch.device(context.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        )
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def by_generate(context: Context, how: dict[str, Any]) -> dict[str, Any]:
    model = _model(context, "sdpa")
    _, length, output = _sizes(context)
    if context.dry:
        how = {**how, "disable_compile": True} if how else how

    def run(given: list[list[int]]) -> int:
        ids = torch.tensor(given, device=context.device)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            **how,
        )
        return int((found.shape[1] - length) * found.shape[0])

    return _each_batch(context, run)


def continuous(context: Context) -> dict[str, Any]:
    """`generate_batch`: transformers' paged cache and scheduler."""
    from transformers import GenerationConfig

    if context.dry:
        return {"missing": "it wants a GPU"}
    model = _model(context, "sdpa")
    output = _sizes(context)[2]
    asked = GenerationConfig(
        max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )

    known = inspect.signature(model.generate_batch).parameters
    kept = {"persistent_manager": True} if "persistent_manager" in known else {}

    def run(given: list[list[int]]) -> int:
        found = model.generate_batch(inputs=given, generation_config=asked, **kept)
        return sum(len(one.generated_tokens) for one in found.values())

    return _each_batch(context, run)
