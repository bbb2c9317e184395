"""What the benchmarks share: prompts, and words about what was run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.meter import Meter
from penstock.bench.report import count
from penstock.config import EngineConfig
from penstock.engine import RequestOutput
from penstock.errors import ConfigError
from penstock.models import read_spec
from penstock.models.hub import resolve
from penstock.models.load import max_positions
from penstock.roofline import CAUSES, StepRecord, StepSize
from penstock.runtime import Runtime
from penstock.runtime.engine_folder import EngineFolder, is_engine
from penstock.sampling import SamplingParams

TOKENS_A_STEP = 2048
"""Of prompts, unless there are more sequences."""


def engine_config(
    model: str,
    *,
    max_model_len: int,
    max_num_seqs: int,
    num_blocks: int | None = None,
    **forms: Any,
) -> EngineConfig:
    """An engine for random tokens: no tokenizer, nothing found in the cache.

    forms: `dtype`, `quantization`, `kv_cache_dtype`.
    """
    chosen = {"max_num_seqs": max_num_seqs}
    if max_num_seqs > TOKENS_A_STEP:
        chosen["max_num_batched_tokens"] = max_num_seqs
    config = EngineConfig.of(
        model=model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        **chosen,
        **forms,
    )
    return config.suggesting(max_num_batched_tokens=max(TOKENS_A_STEP, max_num_seqs))


def random_prompts(
    draw: np.random.Generator, runtime: Runtime, count: int, length: int
) -> list[list[int]]:
    """Token ids of `count` prompts, of those that the model has and that stand for no picture."""
    size, seeing = runtime.model.spec.decoder.vocab_size, runtime.model.spec.pictures
    drawn = draw.integers(0, size, (count, length))
    if seeing is not None:
        drawn[drawn == seeing.token_id] = (seeing.token_id + 1) % size
    kept = runtime.vocab_map
    ids: list[list[int]] = (drawn if kept is None else kept.kept[drawn]).tolist()
    return ids


def greedy(tokens: int) -> SamplingParams:
    """Exactly `tokens` tokens, whatever they are."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def raise_errors(outputs: Sequence[RequestOutput]) -> None:
    """A request that failed fails the benchmark."""
    for output in outputs:
        if output.error is not None:
            raise output.error


def run_batch(
    meter: Meter, draw: np.random.Generator, batch: int, input_len: int, output_len: int
) -> list[StepRecord]:
    """Run one batch of random prompts to its end; every step of it."""
    meter.take()
    for i, prompt in enumerate(random_prompts(draw, meter.runtime, batch, input_len)):
        meter.engine.add_request(str(i), prompt, greedy(output_len))
    while meter.engine.has_unfinished:
        raise_errors(meter.step())
    return meter.take()


def overhead(records: Sequence[StepRecord]) -> dict[str, float]:
    """Medians over `records`: a step's time outside the forward pass, and each part of a step."""
    names = [f"{part}_s" for part in (*CAUSES, "forward")]
    parts = {name: statistics.median(getattr(r, name) for r in records) for name in names}
    return {"step_s": statistics.median(r.overhead_s for r in records), **parts}


def title(name: str, meter: Meter, where: dict[str, Any]) -> str:
    """The table's heading."""
    model = setup(meter)
    return (
        f"{name}: {model['model']} ({model['family']}, {model['weights']} weights, "
        f"{model['weight_bytes'] / 1e6:,.1f} MB a step), {where['isa']} kernels, "
        f"{count(where['threads'], 'thread')}"
        f"{', ' + count(model['ranks'], 'rank') if model['ranks'] > 1 else ''}"
    )


def longest(model: str) -> int:
    """Tokens that a sequence of `model` can have."""
    folder = resolve(model)
    if is_engine(folder):
        return EngineFolder.open(folder).limits.max_model_len
    return max_positions(read_spec(folder).decoder)


def check_length(model: str, prompt: int, output: int, options: str) -> None:
    """Refuse a workload that is longer than the model; `options`: what to lower."""
    most = longest(model)
    if prompt + output > most:
        raise ConfigError(
            f"{prompt} tokens in the cache and {output} to generate are {prompt + output}, but "
            f"this model has {most} positions. Lower {options}."
        )


def setup(meter: Meter) -> dict[str, Any]:
    """What was loaded."""
    one = meter.engine.ledger.costs.cost(StepSize([1], [1], 1))
    return {
        "model": Path(meter.engine.config.model.model).name,
        "family": meter.runtime.model.spec.family,
        "dtype": str(meter.runtime.model.dtype).removeprefix("torch."),
        "weights": meter.weight_format,
        "compute": meter.compute,
        "weight_bytes": one.weight_bytes,
        "ranks": meter.engine.config.parallel.size,
    }
