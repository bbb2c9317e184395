"""How far a lossy format drifts from bfloat16: next-token distributions all over a text.

Source of the measure: Dutta et al. 2024, arXiv:2407.09141 (accuracy hides flips, KL shows them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.errors import ConfigError, PenstockError
from penstock.quant import formats_of
from penstock.runtime import Runtime, load_runtime
from penstock.step import Step

DRIFT_ROWS = 64
"""Distributions that are compared at once: in float64, a large vocabulary takes a MB each."""

_TYPICAL = 4096


@dataclass(frozen=True, slots=True)
class Variant:
    """What is held against the same model in bfloat16."""

    quantization: str | None = None
    kv_cache_dtype: str = "auto"

    @property
    def name(self) -> str:
        cache = "" if self.kv_cache_dtype == "auto" else f"{self.kv_cache_dtype} cache"
        return ", ".join(filter(None, (self.quantization, cache))) or "bfloat16"

    @property
    def bytes_per_weight(self) -> float:
        """Of a layer's matrix, scales and zero points included."""
        matrix = formats_of(self.quantization, torch.bfloat16).matrix
        return matrix.nbytes(_TYPICAL, _TYPICAL) / _TYPICAL**2


VARIANTS = (
    *(Variant(name) for name in ("w8a16", "w8a16-g32", "w8a16-tensor", "w8a8", "w8a8-asym")),
    *(Variant(name) for name in ("fp8", "fp8-tensor", "fp8-block", "fp8-e5m2")),
    *(Variant(f"w4a16-{shared}") for shared in ("g32", "channel", "channel-asym", "tensor")),
    *(Variant(f"w4a8-g{group}{zero}") for group in (32, 64, 128) for zero in ("", "-asym")),
    *(Variant(name) for name in ("nf4-g64", "mxfp4", "nvfp4")),
    *(Variant(None, cache) for cache in ("int8", "fp8")),
)


@dataclass(frozen=True, slots=True)
class Drift:
    """Of one variant, over all positions."""

    positions: int
    kl: float  # mean KL(p_bfloat16 ‖ p) in nats
    kl_p99: float  # one position in a hundred is worse
    agreement: float  # share of positions where the likeliest token is the same
    perplexity: float  # of the text
    reference_perplexity: float  # in bfloat16


def load(model: str | Path, variant: Variant, window: int) -> Runtime:
    """`variant` of `model` for one sequence of up to `window` tokens."""
    return load_runtime(
        EngineConfig.of(
            model=model,
            dtype="bfloat16",
            quantization=variant.quantization,
            kv_cache_dtype=variant.kv_cache_dtype,
            max_model_len=window,
            max_num_seqs=1,
            skip_tokenizer_init=True,
        )
    )


def logits_of(runtime: Runtime, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] after each of `tokens`, a sequence of its own, in one step."""
    size = len(tokens)
    blocks = runtime.layout.blocks_for(size)
    if blocks > runtime.num_blocks:
        raise ConfigError(
            f"A window of {size} tokens needs {blocks} blocks, but the cache holds "
            f"{runtime.num_blocks}. Take a shorter window."
        )

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    rows = torch.arange(size, dtype=torch.int32)
    logits = runtime.runner.forward(
        Step(
            tokens=ints(tokens),
            positions=rows,
            slots=rows,
            query_start=ints([0, size]),
            context_len=ints([size]),
            block_table=torch.arange(blocks, dtype=torch.int32)[None],
            sample_at=rows,
        )
    )
    return logits.clone()  # a runner's own are good until its next step


class DriftSum:
    """Adds up how far distributions lie from their references."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same = 0
        self._loss = torch.zeros(2, dtype=torch.float64)
        self._scored = 0

    def add(self, reference: Tensor, other: Tensor, targets: Tensor) -> None:
        """Log-probabilities or logits [T, V] of both, and the tokens that came: [T] or fewer."""
        self._same += int((reference.argmax(-1) == other.argmax(-1)).sum())
        self._scored += len(targets)
        for row in range(0, len(reference), DRIFT_ROWS):
            rows = slice(row, row + DRIFT_ROWS)
            p, q = (x[rows].double().log_softmax(-1) for x in (reference, other))
            self._kl.append((p.exp() * (p - q)).sum(-1))
            known = targets[rows, None]
            self._loss -= torch.stack([x[: len(known)].gather(1, known).sum() for x in (p, q)])

    def result(self) -> Drift:
        """Of all that was added."""
        each = torch.cat(self._kl)
        before, after = (math.exp(nats / self._scored) for nats in self._loss.tolist())
        return Drift(
            positions=len(each),
            kl=float(each.mean()),
            kl_p99=float(each.quantile(0.99)),
            agreement=self._same / len(each),
            perplexity=after,
            reference_perplexity=before,
        )


def measure_drift(
    reference: Runtime, runtime: Runtime, tokens: Sequence[int], window: int
) -> Drift:
    """Hold `runtime` against `reference` over `tokens`, in windows that start from nothing."""
    found = DriftSum()
    for part in windows(tokens, window):
        targets = torch.tensor(part[1:])  # of all but the window's last
        found.add(logits_of(reference, part), logits_of(runtime, part), targets)
    return found.result()


def windows(tokens: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    """Pieces of `window` tokens; the last one may be shorter, but not of a single token."""
    for start in range(0, len(tokens) - 1, window):
        yield tokens[start : start + window]


def drift(
    model: str | Path,
    tokens: Sequence[int],
    window: int,
    variants: Sequence[Variant] = VARIANTS,
) -> Iterator[tuple[Variant, Drift | str]]:
    """Each variant's drift, or why there is none: the words of the error."""
    if len(tokens) < 2 or window < 2:
        raise ConfigError(f"{len(tokens)} tokens in windows of {window}: two are the least.")
    reference = load(model, Variant(), window)
    for variant in variants:
        try:
            runtime = load(model, variant, window)
        except PenstockError as error:
            yield variant, str(error)
            continue
        if variant.kv_cache_dtype != "auto" and _same_cache(reference, runtime):
            yield variant, f"kv_cache_dtype={variant.kv_cache_dtype} leaves the cache as it is"
            continue
        yield variant, measure_drift(reference, runtime, tokens, window)


def _same_cache(a: Runtime, b: Runtime) -> bool:
    return a.layout.bytes_per_block == b.layout.bytes_per_block
