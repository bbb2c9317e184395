"""Section: transformers on the same work, in the same run: the 8B shape, random weights, greedy.

Requests as long as the Azure trace's (`traffic.lengths`), all there at once and the same for all.
Counted are the tokens that were asked for, over the whole time, prompts included; whoever is timed
has been warmed up. transformers has its own ways: continuous batching, and `generate` on batches of
requests of about one length, padded to the longest and run until the last is through, its cache
growing or, with its code for a step compiled, of a fixed size.

transformers' ways have limits: one that is late is known to make fewer tokens a second than were
asked for in the time that it took (`output_tokens_per_s_below`).
"""

from __future__ import annotations

import importlib.util
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from benchmarks.gpu.document import Context, Item
from benchmarks.gpu.models import make
from benchmarks.gpu.shapes import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.gpu.traffic import lengths

from penstock.bench.workload import greedy, raise_errors

REQUESTS = 64
BATCHES = (16, 32, 8)
SAMPLE = 8
"""Requests of which a batch of one is timed: every eighth by length."""
STATIC = 8
"""The batch with a cache of fixed size, all of which every step reads."""
ENOUGH_S, TO_COMPILE_S = 12.0, 75.0
"""What must be left for a way to be tried, and for one that compiles its step first."""
CONTINUOUS_S = 30.0

Requests = Sequence[tuple[list[int], int]]
"""Prompts, and how many tokens each asks for."""
Run = Callable[[Requests, float], int]
"""Gives the tokens it made; raises LateError where time.monotonic() gets past its second."""


class LateError(Exception):
    """A run that was ended before it was through."""


def items(context: Context) -> Iterator[Item]:
    yield "penstock", lambda: penstock(context)
    yield "transformers-continuous", lambda: theirs(context, continuous)
    for batch in (2,) if context.dry else BATCHES:
        yield f"transformers-{batch}", lambda batch=batch: theirs(context, by_generate, batch)
    yield "transformers-1", lambda: theirs(context, one_by_one)
    batch = 2 if context.dry else STATIC
    yield f"transformers-static-{batch}", lambda: theirs(context, compiled, batch, TO_COMPILE_S)


def _shape(context: Context) -> dict[str, Any]:
    return TINY if context.dry else LLAMA_1B if context.quick else LLAMA_8B


def requests(context: Context) -> Requests:
    """The same for everybody."""
    sizes, _ = lengths(4 if context.dry else REQUESTS, 3)
    if context.dry:
        sizes = [(min(a, 9 + i), min(b, 3)) for i, (a, b) in enumerate(sizes)]
    draw = np.random.default_rng(3)
    most = _shape(context)["vocab_size"]
    return [(draw.integers(3, most, a).tolist(), b) for a, b in sizes]


def short(given: Requests) -> Requests:
    """To warm up with: their beginnings, and little asked for."""
    return [(prompt[:64], 4) for prompt, _ in given]


def timed(given: Requests, run: Run, end: float) -> dict[str, Any]:
    """Tokens a second, prompts included; where it is late, how many at most."""
    asked = sum(count for _, count in given)
    facts = {
        "requests": len(given),
        "prompt_tokens": sum(len(prompt) for prompt, _ in given),
        "output_tokens": asked,
    }
    begun = time.monotonic()
    try:
        made = run(given, end)
    except LateError as late:
        seconds = time.monotonic() - begun
        return {
            **facts, "late_after_s": seconds, "why": str(late),
            "output_tokens_per_s_below": asked / seconds,
        }  # fmt: skip
    seconds = time.monotonic() - begun
    if made != asked:
        raise RuntimeError(f"{made} tokens were made of {asked}.")
    return {**facts, "seconds": seconds, "output_tokens_per_s": asked / seconds}


# ── ours ─────────────────────────────────────────────────────────────────────────────────────


def penstock(context: Context) -> dict[str, Any]:
    """The engine as it is: all requests have seats, their tokens room in the cache."""
    given = requests(context)
    made = make(
        context,
        _shape(context),
        max_model_len=max(len(prompt) + count for prompt, count in given) + 8,
        batch=len(given),
        tokens_a_step=512 if context.dry else 8192,
        cache_tokens=sum(len(prompt) + count + 64 for prompt, count in given),
        graphs_of=(1, 4, 8, 16, 32, 64),
    )
    engine = made.meter().engine

    def run(given: Requests, end: float) -> int:
        for i, (prompt, count) in enumerate(given):
            engine.add_request(f"{time.monotonic_ns()}-{i}", prompt, greedy(count))
        done = 0
        while engine.has_unfinished:
            step = engine.step()
            raise_errors(step)
            done += sum(len(o.outputs[0].token_ids) for o in step if o.finished)
        return done

    longest = max(given, key=lambda one: len(one[0]))[0]
    run([*short(given), (longest, 4)], context.deadline)  # kernels for whole steps are compiled
    return timed(given, run, context.deadline)


# ── transformers ─────────────────────────────────────────────────────────────────────────────


def theirs(
    context: Context, way: Callable[..., dict[str, Any]], batch: int = 1, least_s: float = ENOUGH_S
) -> dict[str, Any]:
    """One of transformers' ways, where there is time and memory for it."""
    if importlib.util.find_spec("transformers") is None:
        return {"missing": "transformers isn't installed"}
    if context.due(least_s) and not context.dry:
        return {"skipped": f"{context.left_s:.0f} s were left, which is less than {least_s:.0f}"}
    try:
        return way(context, _model(context), requests(context), batch)
    except torch.OutOfMemoryError as error:
        return {"skipped": str(error).partition("\n")[0][:300]}


def _model(context: Context) -> Any:
    """Its own, with random weights made on the device: one for all that it does."""
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


def by_generate(
    context: Context, model: Any, given: Requests, batch: int, **how: Any
) -> dict[str, Any]:
    """`generate`, `batch` requests at a time: those of about one length together, longest first."""
    given = sorted(given, key=lambda one: -len(one[0]))

    def run(given: Requests, end: float) -> int:
        made, longest_s = 0, 0.0
        for i in range(0, len(given), batch):
            begun = time.monotonic()
            if begun + longest_s > end:
                raise LateError(f"{len(given) - i} of {len(given)} requests were left.")
            made += together(model, given[i : i + batch], **how)
            longest_s = max(longest_s, time.monotonic() - begun)
        return made

    run(short(given[:batch]), context.deadline)
    return {"batch": batch, **timed(given, run, context.deadline)}


def together(model: Any, given: Requests, **how: Any) -> int:
    """A batch, padded on the left, until the last is through; tokens that were asked for."""
    longest = max(len(prompt) for prompt, _ in given)
    ids = torch.zeros(len(given), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, (prompt, _) in enumerate(given):
        ids[i, longest - len(prompt) :] = torch.tensor(prompt)
        mask[i, longest - len(prompt) :] = 1
    found = model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max(count for _, count in given),
        do_sample=False,
        **how,
    ).cpu()
    made = found.shape[1] - longest
    return sum(min(count, made) for _, count in given)


def one_by_one(context: Context, model: Any, given: Requests, batch: int) -> dict[str, Any]:
    """A sample of all lengths, a request at a time."""
    step = max(len(given) // SAMPLE, 1)
    sample = sorted(given, key=lambda one: len(one[0]))[step // 2 :: step]
    return {"sampled": True, **by_generate(context, model, sample, batch)}


def compiled(context: Context, model: Any, given: Requests, batch: int) -> dict[str, Any]:
    """`generate` with a cache of fixed size: one for all, as each size is compiled anew."""
    most = max(len(prompt) for prompt, _ in given) + max(count for _, count in given)
    how = {"cache_implementation": "static", "max_cache_len": most}
    return by_generate(context, model, given, batch, **how)


def continuous(context: Context, model: Any, given: Requests, batch: int) -> dict[str, Any]:
    """transformers' paged cache and scheduler, which choose the batch."""
    from transformers import GenerationConfig

    asked = GenerationConfig(
        max_new_tokens=2048, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    prepare = model.init_continuous_batching
    manager = prepare(generation_config=asked, **accepted(prepare, **_sizes(context, given)))
    manager.warmup()
    manager.start()

    def run(given: Requests, end: float) -> int:
        for prompt, count in given:
            manager.add_request(prompt, max_new_tokens=count)
        made, left = 0, len(given)
        while left:
            if time.monotonic() > end:
                raise LateError(f"{left} of {len(given)} requests were left.")
            found = manager.get_result(timeout=1)
            if found is not None and found.is_finished():
                if found.error:
                    raise RuntimeError(found.error)
                left -= 1
                made += len(found.generated_tokens)
            elif found is None and not manager.is_running():
                raise RuntimeError("transformers' own thread has ended.")
        return made

    try:
        run(short(given), context.deadline)
        return timed(given, run, min(context.deadline, time.monotonic() + CONTINUOUS_S))
    finally:
        manager.stop(block=True, timeout=10, **accepted(manager.stop, hard_stop=True))


def _sizes(context: Context, given: Requests) -> dict[str, Any]:
    """What continuous batching is told of its work; a dry run's cache is small."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import utils

    found: dict[str, Any] = {}
    if hasattr(utils, "WorkloadHints"):
        found["workload_hints"] = utils.WorkloadHints(
            max(len(prompt) for prompt, _ in given), max(count for _, count in given), len(given)
        )
    if context.dry:
        found["continuous_batching_config"] = ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=256
        )
    return found


def accepted(call: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those options that this version of it has."""
    there = inspect.signature(call).parameters
    return {name: value for name, value in options.items() if name in there}
