"""Proposers for tests: they know what comes, and are wrong as often as they are told to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from penstock.engine import Engine
from penstock.engine.speculation import Speculation
from penstock.sampling import Sampler, SequenceSampling
from penstock.speculate import ROOT, Computed, Controller, Draft, Wish

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


class TreeGuesser(Guesser):
    """Makes trees: what comes, unless it is wrong, among other tokens, in any order and shape.

    It also holds what it is shown of a step against what it has wished for.
    """

    wants = 1

    def __init__(
        self, follow: Next, wrong: float = 0.0, *, by_passes: bool = False, seed: int = 0
    ) -> None:
        super().__init__(follow, wrong, by_passes=by_passes, seed=seed)
        self.seen: dict[object, int] = {}

    def _draft(self, wish: Wish) -> Draft:
        rng, draft = self._rng, Draft(wish.sampling)
        tokens: list[int] = []
        parents: list[int] = []
        ways = {ROOT: (list(wish.tokens), wish.sampling, 0)}
        for _ in range(rng.randint(0, 3 * wish.limit)):
            parent = rng.choice(list(ways))
            text, state, depth = ways[parent]
            known = [t for t, above in zip(tokens, parents, strict=True) if above == parent]
            token = self.follow(text, state)
            if token in known or rng.random() < self.wrong:
                token = rng.randrange(2, 60)
            if token in known or token < 0:
                continue
            tokens.append(token)
            parents.append(parent)
            if depth + 1 < wish.limit:
                ways[len(tokens) - 1] = [*text, token], state.fork(token), depth + 1
        draft.branch(tokens, parents, [0.5] * len(tokens))
        return draft

    def saw(self, computed: Sequence[Computed]) -> None:
        rows = [row for one in computed for row in one.rows]
        assert len(set(rows)) == len(rows) and rows == sorted(rows)
        for one in computed:
            seen = self.seen.get(one.key)
            assert seen is None or seen >= one.first  # or it was computed again
            self.seen[one.key] = one.first + len(one.rows)
            assert self.seen[one.key] <= len(one.tokens)


def speculate(
    engine: Engine, guesser: Guesser, most: int = 4, *, adaptive: bool = False
) -> Speculation:
    """Let `guesser` make drafts for an engine."""
    trees = 3 * most if isinstance(guesser, TreeGuesser) else None
    controller = Controller(most, adaptive=adaptive, by_passes=guesser.by_passes, tree_tokens=trees)
    engine.speculation = Speculation(guesser, controller, engine.scheduler)
    if engine.runtime.runner.recent is not None:
        engine.runtime.runner.recent.unsure = most
    return engine.speculation
