"""Section: transformers on the same work, in the same run: the 8B shape, random weights, greedy.

Requests as long as the Azure trace's (`traffic.lengths`), all there at once and the same for all.
Tokens that were asked for over the whole time, prompts included, after a run that isn't counted.
transformers has its own ways: `generate` on batches of requests of about one length, padded to the
longest and run until the last is through, and continuous batching.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.document import Context, Item
from benchmarks.gpu.models import make
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.gpu.traffic import lengths

from penstock.bench.workload import greedy, raise_errors

BATCHES = (16, 32, 8)
REQUESTS = 32
Requests = list[tuple[list[int], int]]
"""Prompts, and how many tokens each asks for."""


def items(context: Context) -> Iterator[Item]:
    yield "penstock", lambda: penstock(context)
    *most, last = (1, 2) if context.dry else BATCHES
    for batch in most:
        yield f"transformers-{batch}", lambda batch=batch: by_generate(context, batch)
    yield "transformers-continuous", lambda: continuous(context)
    yield f"transformers-{last}", lambda: by_generate(context, last)


def _shape(context: Context) -> dict[str, Any]:
    return TINY if context.dry else LLAMA_1B if context.quick else LLAMA_8B


def requests(context: Context) -> Requests:
    """The same for everybody."""
    sizes, _ = lengths(2 if context.dry else REQUESTS, 3)
    if context.dry:
        sizes = [(min(a, 9), min(b, 3)) for a, b in sizes]
    draw = np.random.default_rng(3)
    most = _shape(context)["vocab_size"]
    return [(draw.integers(3, most, a).tolist(), b) for a, b in sizes]


def _figures(context: Context, run: Callable[[Requests], int]) -> dict[str, Any]:
    """Time `run`, which gives the tokens it made, after it has seen short requests."""
    given = requests(context)
    run([(prompt[:64], 4) for prompt, _ in given])
    begun = time.perf_counter()
    made = run(given)
    seconds = time.perf_counter() - begun
    asked = sum(count for _, count in given)
    if made != asked:
        raise RuntimeError(f"{made} tokens were made of {asked}.")
    return {
        "requests": len(given),
        "prompt_tokens": sum(len(prompt) for prompt, _ in given),
        "output_tokens": asked,
        "seconds": seconds,
        "output_tokens_per_s": asked / seconds,
    }


def penstock(context: Context) -> dict[str, Any]:
    given = requests(context)
    longest = max(len(prompt) + count for prompt, count in given)
    whole = sum(len(prompt) + count + 64 for prompt, count in given)
    made = make(
        context,
        _shape(context),
        max_model_len=longest + 8,
        batch=len(given),
        tokens_a_step=512 if context.dry else 8192,
        cache_tokens=whole,
        graphs_of=(1, 8, 16, 24, 32),
    )
    engine = made.meter().engine

    def run(given: Requests) -> int:
        for i, (prompt, count) in enumerate(given):
            engine.add_request(f"{time.monotonic_ns()}-{i}", prompt, greedy(count))
        done = 0
        while engine.has_unfinished:
            step = engine.step()
            raise_errors(step)
            done += sum(len(o.outputs[0].token_ids) for o in step if o.finished)
        return done

    return _figures(context, run)


def _model(context: Context) -> Any:
    """transformers' own, with random weights made on the device: one for all that it does."""
    if "peer" not in context.scratch:
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = {
            k: v for k, v in _shape(context).items() if k not in ("architectures", "torch_dtype")
        }
        config = AutoConfig.for_model(**shape)
        with torch.device(context.device):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        model.eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        context.scratch["peer"] = model
    return context.scratch["peer"]


def by_generate(context: Context, batch: int) -> dict[str, Any]:
    """`generate`, `batch` requests at a time: those of about one length together."""
    model = _model(context)

    def together(given: Requests) -> int:
        longest = max(len(prompt) for prompt, _ in given)
        ids = torch.zeros(len(given), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (prompt, _) in enumerate(given):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        most = max(count for _, count in given)
        found = model.generate(
            ids.to(context.device),
            attention_mask=mask.to(context.device),
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
        )
        made = found.shape[1] - longest
        return sum(min(count, made) for _, count in given)

    def run(given: Requests) -> int:
        sorted_by_length = sorted(given, key=lambda one: len(one[0]))
        return sum(together(sorted_by_length[i : i + batch]) for i in range(0, len(given), batch))

    return _figures(context, run)


def continuous(context: Context) -> dict[str, Any]:
    """transformers' paged cache and scheduler."""
    if context.dry:
        return {"missing": "it wants a GPU"}
    from transformers import GenerationConfig

    model = _model(context)
    asked = GenerationConfig(
        max_new_tokens=2048, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    manager = model.init_continuous_batching(generation_config=asked)
    manager.start()

    def run(given: Requests) -> int:
        for prompt, count in given:
            manager.add_request(prompt, max_new_tokens=count)
        made, left = 0, len(given)
        while left:
            if context.due():
                raise TimeoutError(f"{left} of {len(given)} requests were left at the end.")
            found = manager.get_result(timeout=1)
            if found is not None and found.is_finished():
                left -= 1
                made += len(found.generated_tokens)
            elif found is None and not manager.is_running():
                raise RuntimeError("transformers' own thread has ended.")
        return made

    try:
        return _figures(context, run)
    finally:
        manager.stop(block=True, timeout=5)
