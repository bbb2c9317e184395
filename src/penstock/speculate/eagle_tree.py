"""Drafts by an EAGLE head: a tree that grows where it is likeliest, or a chain.

The tree is EAGLE-2's: at each depth the few likeliest tokens, by the product of what the head gives
to all on the way to them, are gone on from, in one pass of all of them; in the end the likeliest of
all that were looked at are the draft. How likely is meant at the request's temperature. A chain is
drawn by the sampler instead, with each place's own random number: what the target will draw from
nearly the same distribution.
Source: Li et al. 2024, arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock import ops
from penstock.sampling import Sampler
from penstock.sampling.transfer import upload
from penstock.speculate.eagle_passes import HeadPasses, Ids, Reading
from penstock.speculate.proposer import ROOT, Draft

Floats = NDArray[np.float32]

_LEAST = 1e-30
"""What is likelier isn't impossible."""


class Trees:
    """Grows trees, all sequences together."""

    def __init__(self, passes: HeadPasses, width: int, most_tokens: int) -> None:
        """width: tokens that may follow one, and that are gone on from at each depth."""
        self._passes = passes
        self._width = width
        self._most = most_tokens

    def grow(
        self,
        drafts: Sequence[Draft],
        readings: Sequence[Reading],
        depths: Sequence[int],
        logits: Tensor,
        rows: Ids,
    ) -> None:
        """Make each draft a tree of up to its depth.

        logits: of each sequence's next token, by the pass over `readings`, of whose rows `rows`
        they are.
        """
        width, most = self._width, np.array(depths)
        heat = upload(torch.tensor([_heat(draft) for draft in drafts]), logits.device)
        tokens, chances = self._likeliest(logits, heat)
        levels = [_Level(np.arange(len(drafts)), tokens, chances, np.full((len(drafts), 1), ROOT))]
        going = np.flatnonzero(most > 1)
        if len(going):
            ways = self._passes.ways([readings[s] for s in going.tolist()], most[going].tolist())
            on_ways = self._on_ways_of(heat, going)
        first = 0  # the number of the last level's first token in its tree
        passed = np.arange(len(going))  # where those that go on were in the last pass
        while len(going):
            last = levels[-1].of(going)
            chosen = (-last.chances).argsort(axis=1, kind="stable")[:, :width]
            if len(levels) == 1:
                source = rows[going].repeat(width)
            else:
                way, chosen, forks = _on_ways(chosen, width)
                ways.fork(forks)
                source = (passed[:, None] * width + way).ravel()
            here = (np.arange(len(going))[:, None] * last.tokens.shape[1] + chosen).ravel()
            before = last.chances.ravel()[here]
            tokens, chances = self._likeliest(
                ways.go_on(last.tokens.ravel()[here], source), on_ways
            )
            shape = (len(going), -1)
            chances = (chances + before[:, None]).reshape(shape)
            levels.append(_Level(going, tokens.reshape(shape), chances, chosen + first))
            first += last.tokens.shape[1]
            passed = np.flatnonzero(most[going] > len(levels))
            if 0 < len(passed) < len(going):
                ways.keep(passed.tolist())
                on_ways = self._on_ways_of(heat, going[passed])
            going = going[passed]
        for s, draft in enumerate(drafts):
            self._settle(draft, s, levels)

    def _on_ways_of(self, heat: Tensor, going: Ids) -> Tensor:
        """That of the sequences that go on, once for each of their ways."""
        return heat.index_select(
            0, upload(torch.from_numpy(going.repeat(self._width)), heat.device)
        )

    def _likeliest(self, logits: Tensor, heat: Tensor) -> tuple[Ids, Floats]:
        """The likeliest tokens of each row and the logarithms of their shares, [R, width]."""
        _, found, weights = ops.softmax_top_k(logits, heat, self._width)
        ids = self._passes.head.ids
        columns: Ids = found.numpy(force=True)
        tokens = columns if ids is None else ids[columns]
        return tokens, np.log(np.maximum(weights.numpy(force=True), _LEAST))

    def _settle(self, draft: Draft, s: int, levels: Sequence[_Level]) -> None:
        """Make the draft of sequence `s` the likeliest of the tokens that its levels have."""
        own = [(level, level.at(s)) for level in levels]
        own = [(level, at) for level, at in own if at >= 0]
        chances = np.concatenate([level.chances[at] for level, at in own])
        tokens = np.concatenate([level.tokens[at] for level, at in own])
        each = self._width
        parents = np.concatenate([level.parents[at].repeat(each) for level, at in own])
        # no token is likelier than the one it follows, which stands before it
        order = (-chances).argsort(kind="stable")[: self._most]
        whole = np.exp(chances[order])
        order, whole = order[whole > _LEAST], whole[whole > _LEAST]
        place = np.full(len(tokens) + 1, ROOT)  # the last entry: that of ROOT
        place[order] = np.arange(len(order))
        draft.branch(tokens[order].tolist(), place[parents[order]].tolist(), whole.tolist())


def _heat(draft: Draft) -> float:
    """The temperature that a sequence's tokens are drawn at; greedy ones are likely as at 1."""
    params = draft.states[0].params
    return 1.0 if params.is_greedy else params.temperature


@dataclass(frozen=True, slots=True)
class _Level:
    """The tokens of one depth, of some sequences: as many after each token that was gone on from.

    In a tree, tokens are numbered by depth, then as they stand here.
    """

    owners: Ids  # the sequences' numbers, ascending
    tokens: Ids  # [S, n]
    chances: Floats  # the same
    parents: Ids  # [S, width]: the numbers of those that were gone on from

    def at(self, owner: int) -> int:
        """The row of a sequence; −1: it has none."""
        at = int(self.owners.searchsorted(owner))
        return at if at < len(self.owners) and int(self.owners[at]) == owner else -1

    def of(self, owners: Ids) -> _Level:
        """Those of some of its sequences, ascending."""
        if len(owners) == len(self.owners):
            return self
        chosen = self.owners.searchsorted(owners)
        return _Level(owners, self.tokens[chosen], self.chances[chosen], self.parents[chosen])


def _on_ways(chosen: Ids, width: int) -> tuple[Ids, Ids, list[tuple[int, int, int]]]:
    """Which of the chosen tokens [S, width] goes on on which way.

    The tokens after way w's number from w · width on. Gives the ways that the ways go on from,
    the tokens in the order of ways, and the copies that this takes: a token stays on the way of the
    one it follows, but two can't.
    """
    placed = list[list[int]]()
    forks: list[tuple[int, int, int]] = []
    for s, row in enumerate(chosen.tolist()):
        held: dict[int, int] = {}
        waiting = [t for t in row if held.setdefault(t // width, t) != t]
        for way in range(width):
            if way not in held:
                held[way] = waiting.pop(0)
                forks.append((s, held[way] // width, way))
        placed.append([held[way] for way in range(width)])
    tokens = np.array(placed)
    return tokens // width, tokens, forks


class Chains:
    """Draws tokens one after another, all sequences together."""

    def __init__(self, passes: HeadPasses, vocab_size: int) -> None:
        self._passes = passes
        self._sampler = Sampler(vocab_size)
        self._size = vocab_size
        ids = passes.head.ids
        where = passes.head.given.device
        self._ids = None if ids is None else torch.from_numpy(ids).to(where)
        self._wide = torch.empty((0, vocab_size), device=where)

    def draw(
        self,
        drafts: Sequence[Draft],
        readings: Sequence[Reading],
        depths: Sequence[int],
        logits: Tensor,
        rows: Ids,
    ) -> None:
        """Lengthen each draft up to its depth; arguments as of `Trees.grow`."""
        going = self._drawn(logits, drafts, depths, range(len(drafts)))
        if not going:
            return
        left = [readings[s] for s in going]
        ways = self._passes.ways(left, [depths[s] for s in going])
        source = rows[going]
        while True:
            tokens = np.array([drafts[s].tokens[-1] for s in going])
            logits = ways.go_on(tokens, source)
            on = self._drawn(logits, drafts, depths, going)
            if not on:
                return
            source = np.array([row for row, s in enumerate(going) if s in on])
            if len(on) < len(going):
                ways.keep(source.tolist())
            going = on

    def _drawn(
        self, logits: Tensor, drafts: Sequence[Draft], depths: Sequence[int], going: Sequence[int]
    ) -> list[int]:
        """Give each its next token, of the row of its place; which of them go on."""
        rows = [drafts[s].states[-1] for s in going]
        self._sampler.prepare(rows)
        sampled = self._sampler(self._over_all(logits), rows)
        on = []
        for row, s in enumerate(going):
            # one without a token has an error, which its request will be told by the target
            if row not in sampled.errors and drafts[s].add(sampled.token_ids[row]):
                if len(drafts[s]) < depths[s]:
                    on.append(s)
        return on

    def _over_all(self, logits: Tensor) -> Tensor:
        """Logits over the target's ids: −∞ where the head has none. Good until the next call."""
        if self._ids is None:
            return logits
        if len(logits) > len(self._wide):
            self._wide = logits.new_full((len(logits), self._size), -torch.inf)
        wide = self._wide[: len(logits)]
        return wide.scatter_(1, self._ids.expand(len(logits), -1), logits)
