"""Cutting a distribution's tail, and drawing from what is left.

The order is temperature, min_p, top_k, top_p, each on what the one before it left, as in vLLM.
Every cut is a *threshold on values*: equal logits stay or go together. (The usual cut by position
in a sorted list separates equal logits by the accident of a sort, which differs with the batch.)

A full sort of the vocabulary is rarely needed: the few most likely tokens are fetched, and if the
threshold lies above the last of them, they hold all that survives. Otherwise that row (alone)
takes the full path. Which path a row takes depends on that row only, and so do its bits.

Sources: temperature, Ackley, Hinton & Sejnowski 1985; top-k, Fan et al. 2018, arXiv:1805.04833;
top-p, Holtzman et al. 2019, arXiv:1904.09751; min-p, Nguyen et al. 2024, arXiv:2407.01082.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

NARROW: Final = 128
"""How many tokens are fetched before sorting all: covers the usual top_k and nucleus."""

_BLOCK: Final = 128
"""Tokens per partial sum when drawing from a whole vocabulary."""


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


def scale_(logits: Tensor, temperature: Tensor) -> Tensor:
    """(l - max l) / t in place: the largest becomes 0, so no temperature can overflow it.

    logits [R, V] float32 with a finite maximum in each row; temperature [R, 1].
    """
    return logits.sub_(logits.amax(-1, keepdim=True)).div_(temperature)


def draw_plain(logits: Tensor, cuts: Cuts, u: Tensor) -> Tensor:
    """Rows with a temperature only. logits [R, V] (overwritten), u [R] in [0, 1); returns [R]."""
    return draw_from_vocab(scale_(logits, cuts.temperature).softmax(-1), u)


def draw_nucleus(logits: Tensor, cuts: Cuts, u: Tensor) -> Tensor:
    """Rows with a temperature and top_p. logits [R, V] (overwritten), u [R]; returns [R]."""
    return _nucleus_of(scale_(logits, cuts.temperature).softmax(-1), cuts.top_p, u)


def draw_leading(logits: Tensor, cuts: Cuts, u: Tensor) -> Tensor:
    """Rows with a top_k below NARROW, a min_p, or both, and perhaps top_p.

    No pass over the vocabulary but the one that fetches the candidates: what min_p and top_k
    leave is the whole of the distribution that top_p sees.
    logits [R, V], u [R]; returns [R].
    """
    narrow = min(NARROW, logits.shape[1])
    values, ids = logits.topk(narrow, dim=-1)
    scaled = (values - values[:, :1]).div_(cuts.temperature)
    kth = values.gather(1, (cuts.top_k - 1).clamp(max=narrow - 1))
    kth = torch.where(cuts.top_k < logits.shape[1], kth, -torch.inf)
    kept = (values >= kth) & (scaled >= cuts.log_min_p)
    weights = scaled.masked_fill_(~kept, -torch.inf).softmax(-1)
    weights.masked_fill_(weights < _nucleus_floor(weights, cuts.top_p), 0.0)
    tokens = _draw_from(ids, weights, u)
    if narrow == logits.shape[1]:
        return tokens
    rest = kept[:, -1].nonzero()[:, 0]  # more of these rows' survivors may lie beyond
    if len(rest):
        tokens[rest] = draw_full(logits[rest], cuts.take(rest), u[rest])
    return tokens


def draw_full(logits: Tensor, cuts: Cuts, u: Tensor) -> Tensor:
    """Rows with any parameters, at the price of passes over (and perhaps sorts of) the vocabulary.

    logits [R, V] (overwritten), u [R]; returns [R].
    """
    vocab_size = logits.shape[1]
    if bool((cuts.top_k < vocab_size).any()):
        kth = _descending(logits).gather(1, cuts.top_k - 1)
        logits.masked_fill_(logits < kth, -torch.inf)
    scaled = scale_(logits, cuts.temperature)
    scaled.masked_fill_(scaled < cuts.log_min_p, -torch.inf)
    weights = scaled.softmax(-1)
    if bool((cuts.top_p < 1.0).any()):  # a p of 1 beside others comes to the same draw there
        return _nucleus_of(weights, cuts.top_p, u)
    return draw_from_vocab(weights, u)


def _nucleus_of(weights: Tensor, top_p: Tensor, u: Tensor) -> Tensor:
    """Draw from the most likely tokens that hold ``top_p`` of the mass; weights [R, V] sum to 1."""
    narrow = min(NARROW, weights.shape[1])
    values, ids = weights.topk(narrow, dim=-1)
    floor = _nucleus_floor(values, top_p)
    tokens = _draw_from(ids, values.masked_fill(values < floor, 0.0), u)
    if narrow == weights.shape[1]:
        return tokens
    rest = (values[:, -1:] >= floor)[:, 0].nonzero()[:, 0]
    if len(rest):
        part = weights[rest]
        part.masked_fill_(part < _nucleus_floor(_descending(part), top_p[rest]), 0.0)
        tokens[rest] = draw_from_vocab(part, u[rest])
    return tokens


def _nucleus_floor(ordered: Tensor, top_p: Tensor) -> Tensor:
    """The least weight that top_p keeps: a token stays while those above it hold less than p.

    ordered [R, K] weights, largest first; top_p [R, 1]; returns [R, 1].
    """
    last = torch.searchsorted(ordered.cumsum(-1), top_p).clamp_(max=ordered.shape[1] - 1)
    # Rounded sums may reach 1 before the last token: a p of 1 must keep them all the same.
    return torch.where(top_p < 1.0, ordered.gather(1, last), 0.0)


def _descending(values: Tensor) -> Tensor:
    """Each row's values, largest first. On a CPU by numpy, whose vectorised sort of bare values
    takes a fifteenth of the time of torch's, which also carries the indices."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    negated = np.negative(values.numpy())
    negated.sort(axis=-1)
    return torch.from_numpy(np.negative(negated, out=negated))


def _draw_from(ids: Tensor, weights: Tensor, u: Tensor) -> Tensor:
    """Draw one of a few tokens; ids, weights [R, K], u [R]; returns [R].

    Summed in the order of ids: the order of equal weights, which ``topk`` leaves open, has no say.
    """
    ids, order = ids.sort(dim=-1)
    place, _ = _invert(weights.gather(1, order), u[:, None])
    return ids.gather(1, place)[:, 0]


def draw_from_vocab(weights: Tensor, u: Tensor) -> Tensor:
    """Draw from whole rows by inverting the distribution function; weights [R, V], u [R].

    In two steps, a block and then a token in it: one sum over the vocabulary in float32 would
    round away tokens below 2⁻²⁴ of the mass (and summing it in order costs ten times as much).
    """
    vocab_size = weights.shape[1]
    whole = vocab_size // _BLOCK
    sums = weights[:, : whole * _BLOCK].unflatten(-1, (whole, _BLOCK)).sum(-1)
    if whole * _BLOCK < vocab_size:
        sums = torch.cat((sums, weights[:, whole * _BLOCK :].sum(-1, keepdim=True)), -1)
    block, rest = _invert(sums, u[:, None])
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # [R, block]
    inside = weights.gather(1, ids.clamp(max=vocab_size - 1))
    place, _ = _invert(inside.masked_fill_(ids >= vocab_size, 0.0), rest)
    return ids.gather(1, place)[:, 0]


def _invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The place where the running sum of weights [R, K] passes u [R, 1] of the total.

    Returns places [R, 1] and how far into its weight each u lies, [R, 1] in [0, 1]. A place
    with no weight is never returned.
    """
    sums = weights.cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # Strictly below the total, whatever the product rounds to: some place does pass it.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(sums, target, right=True)
    upper = sums.gather(1, place)
    below = torch.where(place > 0, sums.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place, (target - below) / (upper - below)
