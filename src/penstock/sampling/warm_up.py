"""The sampler's kernels, compiled and loaded before a request would wait for them."""

from __future__ import annotations

import torch

from penstock.sampling.params import SamplingParams
from penstock.sampling.pipeline import Sampler
from penstock.sampling.state import SequenceSampling

USUAL = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=5, repetition_penalty=1.1, presence_penalty=0.1),
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=0.7, top_p=0.9, seed=0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=0),
    SamplingParams(temperature=0.7, min_p=0.05, seed=0),
    SamplingParams(temperature=0.7, typical_p=0.9, seed=0),
)
"""What most requests ask for; other parameters' kernels are compiled when somebody asks."""

COUNTS = (1, 2, 16)
"""Numbers of rows. Triton compiles anew for a 1, and for what 16 divides."""


def warm_up(vocab_size: int, device: torch.device) -> None:
    """Draw tokens from logits that are nobody's: some are likely, or all are alike."""
    sampler = Sampler(vocab_size, gather=True)
    falling = torch.arange(vocab_size, dtype=torch.float32, device=device) * (-20.0 / vocab_size)
    for logits in (falling, torch.zeros_like(falling)):
        for params in USUAL:
            for count in COUNTS:
                rows = [
                    SequenceSampling(params, [0], vocab_size, number, frozenset())
                    for number in range(count)
                ]
                sampler(logits.expand(count, -1).clone(), rows)
                given = torch.zeros(count, dtype=torch.int32, device=device)
                sampler.begin(logits.expand(count, -1).clone(), rows, given=given).result()
