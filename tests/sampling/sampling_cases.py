"""Shared by this folder's tests: sequences made in one line, and draws at chosen numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.sampling import Sampler, SamplingParams, SequenceSampling

EOS = 2


def sequence(
    vocab_size: int,
    *,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    seed: int = 0,
    sample_index: int = 0,
    eos: frozenset[int] = frozenset({EOS}),
    text: list[int] | None = None,
    **params: Any,
) -> SequenceSampling:
    params.setdefault("max_tokens", None)
    state = SequenceSampling(
        SamplingParams(**params), prompt or [], vocab_size, seed, eos, sample_index, text=text
    )
    for token in output or []:
        state.append(token)
    return state


def chosen(logits: Tensor, rows: list[SequenceSampling]) -> list[int]:
    """The tokens of one step, from a copy of the logits; no row may fail."""
    sampled = Sampler(logits.shape[1])(logits.clone(), rows)
    assert sampled.errors == {}
    return sampled.token_ids


def normal_logits(rows: int, vocab_size: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread
