"""Drafts by an EAGLE head: a tree that grows where it is likeliest, or a chain.

The tree is EAGLE-2's: at each depth the few likeliest tokens, by the product of what the head gives
to all on the way to them, are gone on from, in one pass of all of them; in the end the likeliest of
all that were looked at are the draft. A chain is drawn by the sampler instead, with each place's
own random number: what the target will draw from nearly the same distribution.
Source: Li et al. 2024, arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock import ops
from penstock.sampling import Sampler
from penstock.speculate.eagle_passes import HeadPasses, Ids, Reading
from penstock.speculate.proposer import ROOT, Draft

Floats = NDArray[np.float64]


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
        width, count, most = self._width, len(drafts), np.array(depths)
        tokens, chances = self._likeliest(logits)
        levels = [_Level(np.arange(count), 0, tokens, chances, np.full(tokens.shape, ROOT))]
        going = np.flatnonzero(most > 1)
        if len(going):
            ways = self._passes.ways([readings[s] for s in going.tolist()], most[going].tolist())
        passed = np.arange(len(going))  # where those that go on were in the last pass
        while len(going):
            last = levels[-1].of(going)
            chosen = np.argsort(-last.chances, axis=1, kind="stable")[:, :width]
            if len(levels) == 1:
                source = np.repeat(rows[going], width)
            else:
                way, chosen, forks = _on_ways(chosen, width)
                ways.fork(forks)
                source = (passed[:, None] * width + way).ravel()
            before = np.take_along_axis(last.chances, chosen, 1)
            tokens = np.take_along_axis(last.tokens, chosen, 1)
            tokens, chances = self._likeliest(ways.go_on(tokens, source))
            levels.append(last.then(chosen, tokens, chances + before.reshape(-1, 1)))
            passed = np.flatnonzero(most[going] > len(levels))
            if len(passed) < len(going):
                going = going[passed]
                ways.keep(passed.tolist())
        for s, draft in enumerate(drafts):
            self._settle(draft, s, levels)

    def _likeliest(self, logits: Tensor) -> tuple[Ids, Floats]:
        """The likeliest tokens of each row and the logarithms of their shares, [R, width]."""
        with torch.inference_mode():
            _, found, weights = ops.softmax_top_k(logits, torch.ones(len(logits)), self._width)
        ids = self._passes.head.ids
        tokens: Ids = found.numpy() if ids is None else ids[found.numpy()]
        with np.errstate(divide="ignore"):
            return tokens, np.log(weights.numpy().astype(np.float64))

    def _settle(self, draft: Draft, s: int, levels: Sequence[_Level]) -> None:
        """Make the draft of sequence `s` the likeliest of the tokens that its levels have."""
        own = [level.of(np.array([s])) for level in levels if level.has(s)]
        chances = np.concatenate([level.chances[0] for level in own])
        tokens = np.concatenate([level.tokens[0] for level in own])
        parents = np.concatenate([level.parents[0] for level in own])
        # no token is likelier than the one it follows, which stands before it
        order = np.argsort(-chances, kind="stable")[: self._most]
        order = order[np.isfinite(chances[order])]
        place = np.full(len(tokens) + 1, ROOT)  # the last entry: that of ROOT
        place[order] = np.arange(len(order))
        whole = np.exp(chances[order]).tolist()
        draft.branch(tokens[order].tolist(), place[parents[order]].tolist(), whole)


class _Level:
    """The tokens of one depth: those of some sequences, [S, n]."""

    __slots__ = ("chances", "first", "owners", "parents", "tokens")

    def __init__(self, owners: Ids, first: int, tokens: Ids, chances: Floats, parents: Ids) -> None:
        """owners: the sequences' numbers, ascending. first: the number of the first token in its
        tree; parents: the numbers of those they follow.
        """
        self.owners, self.first = owners, first
        self.tokens, self.chances, self.parents = tokens, chances, parents

    def has(self, owner: int) -> bool:
        """Whether a sequence is among its own."""
        at = int(np.searchsorted(self.owners, owner))
        return at < len(self.owners) and int(self.owners[at]) == owner

    def of(self, owners: Ids) -> _Level:
        """Those of some of its sequences, ascending."""
        if len(owners) == len(self.owners):
            return self
        chosen = np.searchsorted(self.owners, owners)
        parts = self.tokens[chosen], self.chances[chosen], self.parents[chosen]
        return _Level(owners, self.first, *parts)

    def then(self, chosen: Ids, tokens: Ids, chances: Floats) -> _Level:
        """The next one: tokens [S · width, n] after those chosen here, [S, width]."""
        each, shape = tokens.shape[1], (len(chosen), -1)
        first = self.first + self.tokens.shape[1]
        parents = np.repeat(self.first + chosen, each, axis=1)
        return _Level(self.owners, first, tokens.reshape(shape), chances.reshape(shape), parents)


def _on_ways(chosen: Ids, width: int) -> tuple[Ids, Ids, list[tuple[int, int, int]]]:
    """Which of the chosen tokens [S, width] goes on on which way.

    The tokens after way w's number from w · width on. Gives the ways that the ways go on from,
    the tokens in the order of ways, and the copies that this takes: a token stays on the way of the
    one it follows, but two can't.
    """
    source, placed = np.empty_like(chosen), np.empty_like(chosen)
    forks: list[tuple[int, int, int]] = []
    for s, row in enumerate(chosen.tolist()):
        held: dict[int, int] = {}
        waiting = [t for t in row if held.setdefault(t // width, t) != t]
        for way in range(width):
            if way not in held:
                held[way] = waiting.pop(0)
                forks.append((s, held[way] // width, way))
            placed[s, way], source[s, way] = held[way], held[way] // width
    return source, placed, forks


class Chains:
    """Draws tokens one after another, all sequences together."""

    def __init__(self, passes: HeadPasses, vocab_size: int) -> None:
        self._passes = passes
        self._sampler = Sampler(vocab_size)
        self._size = vocab_size
        ids = passes.head.ids
        self._ids = None if ids is None else torch.from_numpy(ids)
        self._wide = torch.empty((0, vocab_size))

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
            tokens = np.array([[drafts[s].tokens[-1]] for s in going])
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
        with torch.inference_mode():
            if len(logits) > len(self._wide):
                self._wide = torch.full((len(logits), self._size), -torch.inf)
            wide = self._wide[: len(logits)]
            return wide.scatter_(1, self._ids.expand(len(logits), -1), logits)
