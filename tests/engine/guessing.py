"""Proposers for tests: they know what comes, and are wrong as often as they are told to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from penstock.engine import Engine
from penstock.engine.speculation import Speculation
from penstock.sampling import Sampler, SequenceSampling
from penstock.speculate import Controller, Draft, Wish

from .toy import VOCAB, logits_of

Next = Callable[[Sequence[int], SequenceSampling], int]
"""The token after some."""


def by_the_toy(tokens: Sequence[int], state: SequenceSampling) -> int:
    """What the toy would go on with."""
    logits = torch.from_numpy(logits_of(tokens))[None]
    return Sampler(VOCAB)(logits, [state]).token_ids[0]


class Guesser:
    """Right but for a share of its tokens, which are any."""

    name = "guesser"
    last_caught_up = 0

    def __init__(
        self, follow: Next, wrong: float = 0.0, *, by_passes: bool = False, seed: int = 0
    ) -> None:
        self.follow = follow
        self.wrong = wrong
        self.by_passes = by_passes
        self.forgotten: list[object] = []
        self.limits: list[int] = []
        self._rng = random.Random(seed)

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        self.limits += [wish.limit for wish in wishes]
        return [self._draft(wish) for wish in wishes]

    def _draft(self, wish: Wish) -> Draft:
        draft, tokens = Draft(wish.sampling), list(wish.tokens)
        for _ in range(self._rng.choice([wish.limit, self._rng.randint(0, wish.limit)])):
            if self._rng.random() < self.wrong:
                token = self._rng.randrange(2, 60)
            else:
                token = self.follow(tokens, draft.states[-1])
            tokens.append(token)
            if token < 0 or not draft.add(token):
                break
        return draft

    def forget(self, key: object) -> None:
        self.forgotten.append(key)


def speculate(
    engine: Engine, guesser: Guesser, most: int = 4, *, adaptive: bool = False
) -> Speculation:
    """Let `guesser` make drafts for an engine."""
    controller = Controller(most, adaptive=adaptive, by_passes=guesser.by_passes)
    engine.speculation = Speculation(guesser, controller, engine.scheduler)
    if engine.runtime.runner.recent is not None:
        engine.runtime.runner.recent.unsure = most
    return engine.speculation
