"""Drafts by Medusa heads: one look at a sequence's last state, and a tree of what may follow.

The target's state of a token says its next one; head k guesses the one k + 1 places later. All
heads guess at once, none knowing what the others took. So what head k gives a token doesn't depend
on the way to it, and a way through the heads' likeliest tokens is as likely as the product of these
says. The tree is made of the likeliest ways, until it has its size.
Source: Cai et al. 2024, arXiv:2401.10774; their tree is the best one for a text on average, this
one is made anew of each state's own probabilities (as Li et al. 2024, arXiv:2406.16858, do).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock import ops
from penstock.sampling.transfer import upload
from penstock.speculate.proposer import ROOT, Computed, Draft, Wish

HeadsForward = Callable[[Tensor], Tensor]
"""Logits [R, K, V] of K heads after each of some states [R, D], good until the next call."""

Ids = NDArray[np.int64]
Chances = NDArray[np.float32]


GREEDY = 0.7
"""The temperature of heads whose target takes its likeliest token: surer than of one that draws.
Trees of eight and sixteen guesses of the first embedded model's heads were best so, of 0.4 to 1.6.
"""


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """How large a draft may be."""

    depth: int  # tokens one after another: so many heads guess
    width: int  # that may follow one; 1: no trees
    most: int  # in all


class MedusaProposer:
    """Guesses by heads. One thread's, as an engine is."""

    name = "medusa"
    by_passes = False  # one pass gives all guesses
    wants = 1  # step: the last one

    def __init__(
        self, heads: HeadsForward, store: Tensor, limits: TreeLimits, ids: Ids | None = None
    ) -> None:
        """store [N, D]: where the target keeps the states of a step. ids: what the columns of
        logits stand for; None: their own numbers.
        """
        self.last_caught_up = 0  # there is never anything to
        self._heads = heads
        self._store = store
        self._limits = limits
        self._ids = ids
        self._seen: Sequence[Computed] = ()  # by the last step, whose states are in the store

    def saw(self, computed: Sequence[Computed]) -> None:
        """Note who was computed; what isn't guessed by before the next step is never looked at."""
        self._seen = computed

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish; of no tokens where the last step hasn't computed the token before
        the last.
        """
        drafts = [Draft(wish.sampling) for wish in wishes]
        seen = {id(one.key): one for one in self._seen if one.rows}
        found: list[tuple[Draft, Wish, int]] = []
        for draft, wish in zip(drafts, wishes, strict=True):
            one = seen.get(id(wish.key))
            if one is not None and one.first + len(one.rows) == len(wish.tokens) - 1:
                found.append((draft, wish, one.rows[-1]))
        if not found:
            return drafts
        params = [wish.sampling.params for _, wish, _ in found]
        ids, chances = self._candidates(
            [row for *_, row in found], [GREEDY if p.is_greedy else p.temperature for p in params]
        )
        for (draft, wish, _), tokens, odds in zip(found, ids, chances, strict=True):
            depth = min(wish.limit, self._limits.depth)
            _grow(draft, tokens[:depth], odds[:depth], self._limits.most)
        return drafts

    def forget(self, key: object) -> None:
        """The sequence of that key has ended."""
        self._seen = [one for one in self._seen if one.key is not key]

    def _candidates(self, rows: list[int], temperatures: list[float]) -> tuple[Ids, Chances]:
        """Of each row of the store and each head, the likeliest ids and their probabilities,
        [R, K, k].
        """
        with torch.inference_mode():
            at = upload(torch.tensor(rows), self._store.device)
            logits = self._heads(self._store.index_select(0, at))
            count, heads, _ = logits.shape
            heats = torch.tensor([one for one in temperatures for _ in range(heads)])
            scale = upload(heats, logits.device)
            _, ids, chances = ops.softmax_top_k(logits.flatten(0, 1), scale, self._limits.width)
            shape = (count, heads, -1)
            found: Ids = ids.view(shape).numpy(force=True)
            odds: Chances = chances.view(shape).numpy(force=True)
        return (found if self._ids is None else self._ids[found]), odds


def _grow(draft: Draft, ids: Ids, chances: Chances, most: int) -> None:
    """Give `draft` the `most` likeliest places of the tree whose level d has the candidates
    ids[d, :], the likeliest first, with the probabilities chances[d, :] whatever was before.
    """
    parents, levels, ranks, whole = likeliest(chances, most)
    tokens = ids[levels, ranks].tolist() if levels else []
    if chances.shape[1] > 1:
        draft.branch(tokens, parents, whole)
    else:
        draft.extend(tokens)
        draft.chances = whole


def likeliest(chances: Chances, most: int) -> tuple[list[int], list[int], list[int], list[float]]:
    """The parents, levels, ranks and probabilities of a tree's likeliest `most` places, in order.

    chances [D, K], descending in each row: a place's own is the product of those on the way to it.
    A place comes after its parent and after its elder sibling, which are at least as likely; so
    only two can be next after one is taken: its next sibling and its first child.
    """
    table: list[list[float]] = chances.tolist()
    depth, width = chances.shape
    parents: list[int] = []
    levels: list[int] = []
    ranks: list[int] = []
    found: list[float] = []
    # (−probability, level, rank, parent, the parent's probability)
    waiting = [(-table[0][0], 0, 0, ROOT, 1.0)]
    while waiting and len(parents) < most:
        chance, level, rank, parent, before = heapq.heappop(waiting)
        if not chance:
            break
        at = len(parents)
        parents.append(parent)
        levels.append(level)
        ranks.append(rank)
        found.append(-chance)
        if rank + 1 < width:
            following = (-before * table[level][rank + 1], level, rank + 1, parent, before)
            heapq.heappush(waiting, following)
        if level + 1 < depth:
            heapq.heappush(waiting, (chance * table[level + 1][0], level + 1, 0, at, -chance))
    return parents, levels, ranks, found
