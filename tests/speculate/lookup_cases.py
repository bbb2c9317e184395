"""Sequences, wishes and constraints for proposers that look things up."""

from __future__ import annotations

import random

from penstock import SamplingParams
from penstock.errors import RequestError
from penstock.sampling import Bits, Constraint, SequenceSampling
from penstock.speculate.proposer import Wish

VOCAB = 1000


class Only:
    """A constraint: so many tokens out of a set may come, then none."""

    def __init__(self, allowed: frozenset[int], left: int) -> None:
        self.allowed, self.left = allowed, left

    def fill(self, bits: Bits) -> None:
        bits[:] = 0
        for token in self.allowed:
            bits[token // 32] |= 1 << token % 32

    def accept(self, token_id: int) -> None:
        if not self.left or token_id not in self.allowed:
            raise RequestError(f"{token_id} mustn't come")
        self.left -= 1

    def forced(self) -> list[int]:
        return []

    is_complete = is_over = may_end = False

    def fork(self) -> Only:
        return Only(self.allowed, self.left)

    def rollback(self, count: int) -> None:
        self.left += count


def wish(
    tokens: list[int],
    prompt: int,
    limit: int,
    key: object,
    salt: str | None = None,
    constraint: Constraint | None = None,
) -> Wish:
    sampling = SequenceSampling(
        SamplingParams(), tokens[:prompt], VOCAB, 0, frozenset(), constraint=constraint
    )
    return Wish(key, tokens, sampling, [], limit, salt)


def letters(rng: random.Random, alphabet: int, length: int) -> list[int]:
    return [rng.randrange(alphabet) for _ in range(length)]


def places_of(text: list[int], run: list[int]) -> list[int]:
    """After where `run` stands in `text` with something behind it, the latest first."""
    n = len(run)
    return [at for at in range(len(text) - 1, n - 1, -1) if text[at - n : at] == run]
