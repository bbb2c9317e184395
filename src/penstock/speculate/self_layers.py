"""Drafts by the target's own first layers, with its final norm and head.

They read and write the target's cache of these layers, where a guess's keys and values are, bit for
bit, what verification writes in their place. So there is nothing to load, to keep, or to catch up.
Source: Zhang et al. 2023, arXiv:2309.08168 (layers are skipped); Elhoushi et al. 2024,
arXiv:2404.16710 (LayerSkip: the last ones are).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.speculate.draft_loop import DraftForward, DraftLimits, DraftLoop, Run
from penstock.speculate.proposer import Draft, Wish


class SelfLayersProposer:
    """Lets the first layers go ahead. One thread's, as an engine is."""

    name = "self"
    by_passes = True

    def __init__(self, forward: DraftForward, limits: DraftLimits) -> None:
        """forward: of the first layers, over the target's cache."""
        self.last_caught_up = 0  # there is never anything to
        self._loop = DraftLoop(forward, limits)
        self._limits = limits

    @property
    def last_computed(self) -> int:
        """Tokens that the last call has run through the first layers."""
        return self._loop.last_computed

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish."""
        drafts = [Draft(wish.sampling) for wish in wishes]
        runs = []
        for wish, draft in zip(wishes, drafts, strict=True):
            count = len(wish.tokens)
            limit = min(wish.limit, self._limits.max_model_len - count + 1)
            if limit > 0:
                blocks = np.array(wish.blocks, dtype=np.int32)
                runs.append(Run(draft, wish.tokens[-1:], count - 1, blocks, limit))
        self._loop.run(runs)
        return drafts

    def forget(self, key: object) -> None:
        """Nothing is kept of a sequence."""
