"""Of several samples the best: those with the highest log-probability per token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from penstock.errors import ConfigError


class Ranked(Protocol):
    """What is read of a sample."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def cumulative_logprob(self) -> float | None: ...


Sample = TypeVar("Sample", bound=Ranked)


def best_of(outputs: Iterable[Sample], n: int) -> list[Sample]:
    """The n samples with the highest mean log-probability of their tokens, the best first.

    OpenAI's definition of `best_of`. Among equals the earlier comes first; a sample without
    tokens, or whose mean isn't a number, comes after all others.
    """
    samples = list(outputs)
    if not 1 <= n <= len(samples):
        raise ConfigError(
            f"n is {n}, but there are {len(samples)} samples to choose from. "
            "Ask for one at least, and make as many."
        )
    return sorted(samples, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(sample: Ranked) -> float:
    total = sample.cumulative_logprob
    if total is None:
        raise ConfigError(
            "A sample has no cumulative_logprob to be ranked by. Make it with logprobs=0."
        )
    mean = total / len(sample.token_ids) if sample.token_ids else -math.inf
    return -math.inf if math.isnan(mean) else mean
