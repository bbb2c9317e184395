"""Engines over random weights, one place for how they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.gpu.document import Context

from penstock.bench.meter import Meter
from penstock.bench.workload import engine_config
from penstock.config import EngineConfig
from penstock.runtime import Runtime

MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "compile": {"compilation_config": {"mode": "compile", "cudagraph_mode": "none"}},
    "compile+graphs": {"compilation_config": {"mode": "compile"}},
}
"""How the steps of a GPU are run."""


@dataclass(frozen=True, slots=True)
class Made:
    """A runtime with what it was made for."""

    config: EngineConfig
    runtime: Runtime

    def meter(self) -> Meter:
        return Meter(self.config, self.runtime)


def make(
    context: Context,
    shape: dict[str, Any],
    *,
    max_model_len: int,
    batch: int,
    quantization: str | None = None,
    mode: str = "graphs",
    tokens_a_step: int | None = None,
    cache_tokens: int | None = None,
) -> Made:
    """An engine for `batch` sequences of at most `max_model_len` tokens.

    cache_tokens: that the cache holds; None: every sequence at its longest.
    """
    from penstock.bench.random_model import random_runtime

    block = 32
    blocks = batch * (-(-max_model_len // block) + 1)
    if cache_tokens is not None:
        blocks = -(-cache_tokens // block)
    forms: dict[str, Any] = {} if context.dry else MODES[mode]
    config = engine_config(
        "random",
        max_model_len=max_model_len,
        max_num_seqs=batch,
        num_blocks=blocks,
        dtype="bfloat16",
        quantization=quantization,
        device=context.device.type,
        **forms,
    )
    if tokens_a_step is not None:
        config = config.suggesting(max_num_batched_tokens=max(tokens_a_step, batch))
    runtime = random_runtime(shape, context.device, torch.bfloat16, quantization, config=config)
    return Made(config, runtime)
