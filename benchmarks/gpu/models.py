"""Engines over random weights, one place for how they are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.document import Context

from penstock.bench.meter import Meter
from penstock.bench.random_model import random_runtime
from penstock.bench.workload import TOKENS_A_STEP
from penstock.config import EngineConfig
from penstock.runtime import Runtime

MODES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"cudagraph_mode": "none"},
    "compile": {"mode": "compile", "cudagraph_mode": "none"},
    "compile+graphs": {"mode": "compile"},
}
"""How the steps of a GPU are run: a compilation_config."""


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
    graphs_of: Sequence[int] = (),
) -> Made:
    """An engine for `batch` sequences of at most `max_model_len` tokens.

    cache_tokens: that the cache holds; None: every sequence at its longest. graphs_of: numbers
    of sequences for which graphs are recorded; none: `batch`, which is what is timed.
    """
    block = 32
    blocks = batch * (-(-max_model_len // block) + 1)
    if cache_tokens is not None:
        blocks = -(-cache_tokens // block)
    options: dict[str, Any] = {}
    if not context.dry:
        compilation = dict(MODES[mode])
        if "cudagraph_mode" not in compilation:
            compilation["cudagraph_capture_sizes"] = list(graphs_of or (batch,))
        options["compilation_config"] = compilation
    config, runtime = random_runtime(
        shape,
        device=context.device.type,
        dtype="bfloat16",
        quantization=quantization,
        max_model_len=max_model_len,
        max_num_seqs=batch,
        max_num_batched_tokens=max(tokens_a_step or TOKENS_A_STEP, batch),
        num_blocks=blocks,
        enable_prefix_caching=False,
        **options,
    )
    return Made(config, runtime)
