"""A step's tokens: as the host gets them, and before it knows them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.sampling.logprobs import TokenLogprobs
from penstock.sampling.transfer import Gathered, Part

NO_TOKEN = -1
"""Stands in ``Sampled.token_ids`` for a row that failed."""

MASKED = "Every token is masked"
"""How the error begins that a row gets of which nothing is left."""

NOT_FINITE = "The model's logits hold"
"""How the error begins of a row that the model itself has spoilt."""


@dataclass(slots=True)
class Sampled:
    """One step's tokens, one per row."""

    token_ids: list[int]  # NO_TOKEN where the row is in `errors`
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)  # by row: why it has no token

    def take(self, rows: Sequence[int]) -> Sampled:
        """These rows of it, in this order."""
        return Sampled(
            [self.token_ids[row] for row in rows],
            [self.logprobs[row] for row in rows],
            {at: self.errors[row] for at, row in enumerate(rows) if row in self.errors},
        )


class Pending(Protocol):
    """A step that has been begun."""

    @property
    def device_tokens(self) -> Tensor:
        """The tokens [S] int32 on the device of the logits, so that a next step can be begun with
        them before the host knows them. A row that fails has one too: 0, or any other.
        """

    def result(self) -> Sampled:
        """The tokens on the host, as soon as they are there."""


class Done:
    """What was sampled at once, on the host."""

    __slots__ = ("_device", "_sampled")

    def __init__(self, sampled: Sampled, device: torch.device) -> None:
        self._sampled = sampled
        self._device = device

    @property
    def device_tokens(self) -> Tensor:
        tokens = [max(token, 0) for token in self._sampled.token_ids]
        return torch.tensor(tokens, dtype=torch.int32, device=self._device)

    def result(self) -> Sampled:
        return self._sampled


class Launched:
    """What the device still works on, or has on its way to the host."""

    def __init__(
        self, tokens: Tensor, gathered: Gathered, read: Callable[[list[Part]], Sampled]
    ) -> None:
        """read: makes the tokens out of what was gathered, once."""
        self.device_tokens = tokens
        self._gathered = gathered
        self._read: Callable[[list[Part]], Sampled] | None = read
        self._sampled = Sampled([], [])

    def result(self) -> Sampled:
        if self._read is not None:
            self._sampled = self._read(self._gathered.wait())
            self._read = None
        return self._sampled


def failures(members: Sequence[int], peaks: list[float]) -> dict[int, str]:
    """By row, what is wrong with those whose largest logit isn't a finite number."""
    if math.isfinite(sum(peaks)):  # floats of 32 bits: as Python's numbers they can't overflow
        return {}
    found = zip(members, peaks, strict=True)
    return {i: _describe(peak) for i, peak in found if not math.isfinite(peak)}


def _describe(peak: float) -> str:
    if peak == -math.inf:
        return (
            f"{MASKED}: allowed_token_ids, min_tokens or a grammar leave none of the vocabulary. "
            "Loosen one of them."
        )
    return not_finite(peak)


def not_finite(peak: float) -> str:
    """What is wrong with logits of which the largest is NaN or +infinity."""
    return (
        f"{NOT_FINITE} a {'NaN' if math.isnan(peak) else '+infinity'}, so no token can be chosen."
    )
