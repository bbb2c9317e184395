"""Cutting a distribution's tail, and drawing from what is left.

The order is temperature, min_p, top_k, top_p, each on what the one before it left, as in vLLM.
Every cut is a *threshold on values*: equal logits stay or go together. (The usual cut by position
in a sorted list separates equal logits by the accident of a sort, which differs with the batch.)

A full sort of the vocabulary is rarely needed: the few most likely tokens are fetched by one
operator, and if the threshold lies above the last of them, they hold all that survives. Otherwise
that row (alone) takes the full path. Which path a row takes depends on that row only, and so do
its bits. Every way also returns each row's largest logit; where it isn't a finite number, the row
is broken and its token means nothing.

Sources: temperature, Ackley, Hinton & Sejnowski 1985; top-k, Fan et al. 2018, arXiv:1805.04833;
top-p, Holtzman et al. 2019, arXiv:1904.09751; min-p, Nguyen et al. 2024, arXiv:2407.01082.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from penstock import ops
from penstock.ops.draw import BEYOND, draw_from_vocab, nucleus_floor
from penstock.sampling.samplers.rows import softmax

NARROW: Final = 128
"""How many tokens are fetched at first: covers the usual top_k and nucleus."""

WIDE: Final = 1024
"""How many are fetched for a wider nucleus, before sorting all."""

Drawn = tuple[Tensor, Tensor]
"""A token of each of R rows, and each row's largest logit."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The parameters of R rows, [R, 1] each; a value that cuts nothing stands for 'off'."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64; V = off
    top_p: Tensor  # float32; 1 = off
    log_min_p: Tensor  # float32; -inf = off

    def take(self, rows: Tensor) -> Cuts:
        """Those of the given rows."""
        return Cuts(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.log_min_p[rows]
        )


def draw_plain(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Rows with a temperature only. logits [R, V], u [R] in [0, 1)."""
    return ops.draw_plain(logits, cuts.temperature, u)


def draw_nucleus(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Rows with a temperature and top_p. logits [R, V], u [R].

    A row whose nucleus may hold more than NARROW tokens tries WIDE, then sorts.
    """
    tokens, peaks = ops.draw_nucleus(logits, cuts.temperature, cuts.top_p, u, NARROW, WIDE)
    if BEYOND in tokens.tolist():
        rest = (tokens == BEYOND).nonzero()[:, 0]
        tokens[rest] = draw_full(logits[rest], cuts.take(rest), u[rest])[0]
    return tokens, peaks


def draw_leading(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Rows with a top_k below NARROW, a min_p, or both, and perhaps top_p.

    No pass over the vocabulary but the one that fetches the candidates: what min_p and top_k
    leave is the whole of the distribution that top_p sees. logits [R, V], u [R].
    """
    scaled, ids, peaks, more = ops.scaled_top_k(
        logits, cuts.temperature, cuts.top_k, cuts.log_min_p, NARROW
    )
    tokens = ops.draw_from(ids, scaled.softmax(-1), u, cuts.top_p)
    if True in more.tolist():  # more of these rows' survivors may lie beyond
        rest = more.nonzero()[:, 0]
        tokens[rest] = draw_full(logits[rest], cuts.take(rest), u[rest])[0]
    return tokens, peaks


def draw_full(logits: Tensor, cuts: Cuts, u: Tensor) -> Drawn:
    """Rows with any parameters, at the price of passes over (and perhaps sorts of) the vocabulary.

    logits [R, V] (overwritten), u [R].
    """
    _, peaks = ops.argmax(logits)
    if bool((cuts.top_k < logits.shape[1]).any()):
        cut_top_k_(logits, cuts.top_k)
    scaled = scale_(logits, peaks[:, None], cuts.temperature)
    scaled.masked_fill_(scaled < cuts.log_min_p, -torch.inf)
    weights = softmax(scaled)
    if bool((cuts.top_p < 1.0).any()):  # a p of 1 beside others comes to the same draw there
        weights.masked_fill_(weights < nucleus_floor(_descending(weights), cuts.top_p), 0.0)
    return draw_from_vocab(weights, u), peaks


def cut_top_k_(logits: Tensor, top_k: Tensor) -> None:
    """Make all but each row's largest impossible. logits [R, V], top_k [R, 1] int64."""
    kth = _descending(logits).gather(1, top_k - 1)
    logits.masked_fill_(logits < kth, -torch.inf)


def cut_top_p_(scaled: Tensor, top_p: Tensor) -> None:
    """Make all but each row's nucleus impossible. scaled [R, V] logits, top_p [R, 1]."""
    weights = softmax(scaled)
    floor = nucleus_floor(_descending(weights), top_p)
    scaled.masked_fill_(weights < floor, -torch.inf)


def scale_(logits: Tensor, peaks: Tensor, temperature: Tensor) -> Tensor:
    """(l - max l) / t in place: the largest becomes 0, so no temperature can overflow it."""
    return logits.sub_(peaks).div_(temperature)


def _descending(values: Tensor) -> Tensor:
    """Each row's values, largest first. On a CPU by numpy, whose vectorised sort of bare values
    takes a fifteenth of the time of torch's, which also carries the indices."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    negated = np.negative(values.numpy())
    negated.sort(axis=-1)
    return torch.from_numpy(np.negative(negated, out=negated))
