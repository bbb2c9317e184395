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
from penstock.speculate.proposer import ROOT, Computed, Draft, Wish

HeadsForward = Callable[[Tensor], Tensor]
"""Logits [R, K, V] of K heads after each of some states [R, D], good until the next call."""

Ids = NDArray[np.int64]
Chances = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """The last state of a sequence that a step has computed."""

    key: object  # held, so that its id stays its own
    position: int  # of its token
    states: Tensor  # [R, D], of this and other sequences …
    row: int  # … whose place this is


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
        self._known: dict[int, _State] = {}  # by the key's id

    def saw(self, computed: Sequence[Computed]) -> None:
        """Note the last state of each sequence: the store is written to in the next step."""
        seen = [one for one in computed if one.rows]
        if not seen:
            return
        with torch.inference_mode():
            states = self._store.index_select(0, torch.tensor([one.rows[-1] for one in seen]))
        for row, one in enumerate(seen):
            at = one.first + len(one.rows) - 1
            self._known[id(one.key)] = _State(one.key, at, states, row)

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish; of no tokens where the token before the last wasn't seen."""
        drafts = [Draft(wish.sampling) for wish in wishes]
        found = [self._known.get(id(wish.key)) for wish in wishes]
        rows = [
            i
            for i, (wish, state) in enumerate(zip(wishes, found, strict=True))
            if state is not None and state.position == len(wish.tokens) - 2
        ]
        if not rows:
            return drafts
        states = _stacked([state for i in rows if (state := found[i]) is not None])
        params = [wishes[i].sampling.params for i in rows]
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        ids, chances = self._candidates(states, temperatures)
        for i, tokens, odds in zip(rows, ids, chances, strict=True):
            depth = min(wishes[i].limit, self._limits.depth)
            _grow(drafts[i], tokens[:depth], odds[:depth], self._limits.most)
        return drafts

    def forget(self, key: object) -> None:
        """The sequence of that key has ended."""
        self._known.pop(id(key), None)

    def _candidates(self, states: Tensor, temperatures: list[float]) -> tuple[Ids, Chances]:
        """Of each state [R, D] and head, the likeliest ids and their probabilities, [R, K, k]."""
        with torch.inference_mode():
            logits = self._heads(states)
            rows, heads, _ = logits.shape
            scale = torch.tensor(temperatures).repeat_interleave(heads)
            _, ids, chances = ops.softmax_top_k(logits.flatten(0, 1), scale, self._limits.width)
            shape = (rows, heads, -1)
            found: Ids = ids.view(shape).numpy()
            odds: Chances = chances.view(shape).numpy()
        return (found if self._ids is None else self._ids[found]), odds


def _stacked(states: Sequence[_State]) -> Tensor:
    """Their rows, [R, D]."""
    first = states[0].states
    places = [state.row for state in states]
    if all(state.states is first for state in states):
        whole = places == list(range(len(first)))
        return first if whole else first[places]
    return torch.stack([state.states[state.row] for state in states])


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
