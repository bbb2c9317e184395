"""The sampler over Triton's operators: the tokens that the ordinary ones give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels.triton import launchers, register
from penstock.sampling import Sampled, Sampler, SamplingParams, SequenceSampling
from tests.kernels.triton.conftest import DEVICE
from tests.kernels.triton.logits import inf, nan, normal

VOCABULARY = 1100
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"top_p": 0.9},
    {"top_p": 0.98, "temperature": 30.0},  # beyond the candidates
    {"top_k": 40, "top_p": 0.8, "repetition_penalty": 1.3},
    {"top_k": 300, "temperature": 1.5},
    {"min_p": 0.001, "temperature": 6.0},
    {"min_p": 0.05, "logprobs": 0},
    {"allowed_token_ids": [5, 900, 7], "top_p": 0.95},
    {"mirostat": 2, "mirostat_tau": 3.0},
    {"mirostat": 1, "mirostat_tau": 2.0},
    {"typical_p": 0.8, "top_n_sigma": 2.0, "dynatemp_range": 0.3},
    {"xtc_probability": 0.9, "xtc_threshold": 0.01, "top_p": 0.9},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1, "eta_cutoff": 0.001},
]


def rows() -> list[SequenceSampling]:
    return [
        SequenceSampling(SamplingParams(**kind), [3, 5, 3], VOCABULARY, seed, frozenset({2}))
        for seed, kind in enumerate(KINDS)
    ]


def logits_of(seed: int) -> Tensor:
    logits = normal(len(KINDS), VOCABULARY, seed)
    if seed:
        logits[2, 7], logits[4, 9], logits[9] = nan, inf, -inf
    return logits


def ordinary(seed: int) -> Sampled:
    return Sampler(VOCABULARY)(logits_of(seed).cpu(), rows())


@pytest.fixture
def by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the dispatcher chooses them."""
    for name in ("argmax", "top_k", "scaled_top_k", "draw_from", "draw_nucleus", "draw_plain"):
        monkeypatch.setattr(ops, name, launchers()[name])
    for name in ("draw_beyond", "uniforms"):
        monkeypatch.setattr(ops, name, launchers()[name])


@pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"
)
@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_same_tokens(seed: int, request: pytest.FixtureRequest) -> None:
    wanted = ordinary(seed)
    request.getfixturevalue("by_triton")
    logits = logits_of(seed)
    pending = Sampler(VOCABULARY, gather=True).begin(logits.clone(), rows())
    found = pending.result()
    assert found.token_ids == wanted.token_ids
    assert found.errors == wanted.errors
    assert sorted(found.errors) == ([2, 4, 9] if seed else [])
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert {i: x.rank for i, x in one.items()} == {i: x.rank for i, x in other.items()}
            for token, known in one.items():
                assert known.logprob == pytest.approx(other[token].logprob, abs=1e-5)
    alone, states = Sampler(VOCABULARY, gather=True), rows()
    for i in (1, 6, 8) if seed else (2, 3, 5, 10):
        assert alone(logits[i : i + 1].clone(), [states[i]]).token_ids == [found.token_ids[i]]


@pytest.mark.gpu
def test_a_step_is_begun_without_waiting() -> None:
    """torch raises for whatever would wait for the GPU."""
    assert DEVICE == "cuda"
    register("CUDA")
    sampler, logits = Sampler(VOCABULARY), logits_of(0)
    wanted = sampler(logits.clone(), rows())  # compiles what is to be compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = sampler.begin(logits.clone(), rows())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.result() == wanted
    assert pending.device_tokens.tolist() == wanted.token_ids
