"""Draws of one token of each row, by inverting its distribution function."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op
from penstock.ops.top_k import softmax_top_k

NO_DRAW = -1
"""Stands for the token of a row that has no weights to draw by."""

BEYOND = -2
"""Stands for the token of a row whose nucleus may hold more than its k largest."""

_BLOCK = 128
"""Tokens per partial sum when drawing from a whole vocabulary."""


def _fake_from(ids: Tensor, weights: Tensor, u: Tensor, top_p: Tensor | None = None) -> Tensor:
    return torch.empty_like(ids[:, 0])


@define_op(
    "draw_from(Tensor ids, Tensor weights, Tensor u, Tensor? top_p=None) -> Tensor",
    fake=_fake_from,
)
def draw_from(ids: Tensor, weights: Tensor, u: Tensor, top_p: Tensor | None = None) -> Tensor:
    """One of a few candidates, by weight.

    ids [R, K] int64 in any order, weights [R, K] float32 that sum to anything, u [R] float64 in
    [0, 1); returns [R] int64: the first id, in the order of ids, where the running sum of weights
    passes u of their total. -1 for a row without any weight, or with one that isn't finite.
    Summed in float64. A token without weight is never drawn.
    top_p [R, 1] float32: only of the nucleus (`nucleus_floor`); weights fall then.
    """
    if top_p is not None:
        weights = weights.masked_fill(weights < nucleus_floor(weights, top_p), 0.0)
    ids, order = ids.sort(dim=-1)
    place, _ = invert(weights.gather(1, order), u[:, None])
    total = weights.sum(-1)
    return torch.where(total.isfinite() & (total > 0), ids.gather(1, place)[:, 0], NO_DRAW)


def nucleus_floor(ordered: Tensor, top_p: Tensor) -> Tensor:
    """The least weight that top_p keeps: a token stays while those above it hold less than p.

    ordered [R, K] weights, largest first; top_p [R, 1]; returns [R, 1]. Summed in float64, each
    sum rounded to float32 before it is compared.
    """
    sums = running(ordered).to(torch.float32)
    last = torch.searchsorted(sums, top_p.view(-1, 1)).clamp_(max=ordered.shape[1] - 1)
    # Rounded sums may reach 1 before the last token: a p of 1 must keep them all the same.
    return torch.where(top_p.view(-1, 1) < 1.0, ordered.gather(1, last), 0.0)


def _fake_nucleus(
    logits: Tensor, temperature: Tensor, top_p: Tensor, u: Tensor, narrow: int, wide: int
) -> tuple[Tensor, Tensor]:
    return _fake_plain(logits, temperature, u)


@define_op(
    "draw_nucleus(Tensor logits, Tensor temperature, Tensor top_p, Tensor u, int narrow, int wide)"
    " -> (Tensor ids, Tensor peaks)",
    fake=_fake_nucleus,
)
def draw_nucleus(
    logits: Tensor, temperature: Tensor, top_p: Tensor, u: Tensor, narrow: int, wide: int
) -> tuple[Tensor, Tensor]:
    """A token of the nucleus of softmax(logits / temperature), if the `wide` largest hold it all.

    logits [R, V] float32, rows may be strided; temperature and top_p float32, one for each row; u
    [R] float64 in [0, 1); narrow: how many are looked at first, which changes only the time.
    Returns ids [R] int64 and peaks [R], each row's largest logit. Instead of an id: -2 where the
    nucleus may hold more than the `wide` largest, -1 where the largest isn't a finite number.
    It is what its parts make of the same row, by ==.
    Cost: as `softmax_top_k`; few rows are read by all threads.
    Source: Holtzman et al. 2019, arXiv:1904.09751.
    """
    values, ids, weights = softmax_top_k(logits, temperature, wide)
    tokens = draw_from(ids, weights, u, top_p)
    if ids.shape[1] < logits.shape[1]:
        beyond = weights[:, -1] >= nucleus_floor(weights, top_p)[:, 0]
        tokens = torch.where(beyond & (weights[:, 0] > 0.0), BEYOND, tokens)
    return tokens, values[:, 0].contiguous()


def _fake_plain(logits: Tensor, temperature: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.shape[0]
    return logits.new_empty((rows,), dtype=torch.int64), logits.new_empty((rows,))


@define_op(
    "draw_plain(Tensor logits, Tensor temperature, Tensor u) -> (Tensor ids, Tensor peaks)",
    fake=_fake_plain,
)
def draw_plain(logits: Tensor, temperature: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A token of softmax(logits / temperature).

    logits [R, V] float32, rows may be strided; temperature float32, one for each row; u [R]
    float64 in [0, 1); returns ids [R] int64, -1 where the row's largest logit isn't a finite
    number, and peaks [R]: that largest logit.
    Two passes: the largest, then sums of exp((l − largest) / t) over blocks of tokens. u picks a
    block and what is left of it a token in that block.
    Cost: R·V·4 bytes read, again from cache, and one exp for each; compute-bound on AVX2.
    Source: inversion, Devroye 1986, Non-Uniform Random Variate Generation, ch. III.2.
    """
    peaks = logits.amax(-1)
    scaled = (logits - peaks[:, None]) / temperature.view(-1, 1)
    ids = draw_from_vocab(scaled.softmax(-1), u)
    return torch.where(peaks.isfinite(), ids, -1), peaks


def _fake_beyond(
    tokens: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    u: Tensor,
) -> Tensor:
    return torch.empty_like(tokens)


@define_op(
    "draw_beyond(Tensor tokens, Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor log_min_p, Tensor u) -> Tensor",
    fake=_fake_beyond,
)
def draw_beyond(
    tokens: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    u: Tensor,
) -> Tensor:
    """The rows whose token is -2 drawn from what cuts leave of the whole vocabulary.

    tokens [R] int64, of which the others stay; logits [R, V] float32, rows may be strided;
    temperature, top_p and log_min_p float32, top_k int64, one for each row, where 1, -inf and V
    cut nothing; u [R] float64 in [0, 1); returns [R] int64, -1 for a row that is to be drawn and
    whose largest logit isn't a finite number. Cuts are thresholds on values, in the order min_p
    and top_k, top_p. For a GPU, which can't be asked which rows need it: nothing waits.
    Cost: R·V·4 bytes for each pass; up to 64 passes to find a row's thresholds, 2 without top_k
    and top_p, none for a row that has its token.
    """
    columns = (temperature.view(-1, 1), top_k.view(-1, 1), top_p, log_min_p.view(-1, 1))
    temperature, top_k, top_p, log_min_p = columns
    ordered = logits.sort(dim=-1, descending=True).values
    peaks, kth = ordered[:, :1], ordered.gather(1, top_k - 1)
    scaled = (logits.masked_fill(logits < kth, -torch.inf) - peaks) / temperature
    weights = scaled.masked_fill_(scaled < log_min_p, -torch.inf).softmax(-1)
    floor = nucleus_floor(weights.sort(dim=-1, descending=True).values, top_p)
    drawn = draw_from_vocab(weights.masked_fill_(weights < floor, 0.0), u)
    drawn.masked_fill_(~peaks[:, 0].isfinite(), NO_DRAW)
    return torch.where(tokens == BEYOND, drawn, tokens)


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
    block, rest = invert(sums, u[:, None])
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # [R, block]
    inside = weights.gather(1, ids.clamp(max=vocab_size - 1))
    place, _ = invert(inside.masked_fill_(ids >= vocab_size, 0.0), rest)
    return ids.gather(1, place)[:, 0]


def invert(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The place where the running sum of weights [R, K] passes u [R, 1] of the total.

    Returns places [R, 1] and how far into its weight each u lies, [R, 1] in [0, 1]. A place
    with no weight is never returned, unless the row has none or one that isn't a number.
    """
    sums = running(weights)
    total = sums[:, -1:]
    # Strictly below the total, whatever the product rounds to: some place does pass it.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)
    upper = sums.gather(1, place)
    below = torch.where(place > 0, sums.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place, (target - below) / (upper - below)


def running(weights: Tensor) -> Tensor:
    """Running sums of weights [R, K] in float64."""
    if weights.device.type == "cpu":
        return weights.cumsum(-1, dtype=torch.float64)
    return doubled(weights)


def doubled(weights: Tensor) -> Tensor:
    """The same in an order of additions that hangs on K alone, as a GPU's own doesn't.

    Each pass doubles how many are summed (Hillis & Steele 1986); rounding mustn't let a sum fall.
    """
    sums, step = weights.to(torch.float64), 1
    while step < sums.shape[1]:
        sums = torch.cat((sums[:, :step], sums[:, step:] + sums[:, :-step]), -1)
        step *= 2
    return sums.cummax(-1).values
