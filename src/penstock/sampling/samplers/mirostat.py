"""Mirostat: keep the surprise of what is chosen near a target, by feedback.

Each token's surprise s = −log₂ p under the model moves a bound µ by η·(s − τ) the other way.
Version 2 drops what would surprise more than µ; version 1 takes the top k whose surprise would be
µ if probabilities fell like Zipf's law, with its exponent estimated of the likeliest tokens.

Source: Basu et al. 2021, "Mirostat: A Neural Text Decoding Algorithm that Directly Controls
Perplexity", arXiv:2007.14966, algorithms 1 and 2.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock import ops
from penstock.sampling.samplers.rows import log_softmax, totals

LEADING = 100
"""How many tokens the exponent is estimated from, as in the paper."""

_LOG2 = math.log(2.0)


def cut_(scaled: Tensor, version: int, mu: float) -> Tensor:
    """Drop tokens of scaled logits [1, V] by the bound mu, in bits; the likeliest stays.

    Returns log₂-probabilities [1, V] as they were before: what surprise is measured by.
    """
    log2_p = log_softmax(scaled).div_(_LOG2)
    if version == 2:
        floor = min(-mu, float(log2_p.amax()))
        scaled.masked_fill_(log2_p < floor, -torch.inf)
        return log2_p
    leading = ops.top_k(scaled, min(LEADING, scaled.shape[1]))[0]
    count = _count(_slope(leading[0].double().numpy(force=True)), mu, scaled.shape[1])
    least = np.partition(scaled[0].numpy(force=True), -count)[-count]
    scaled.masked_fill_(scaled < float(least), -torch.inf)
    return log2_p


def cut_1_(scaled: Tensor, mu: Tensor) -> None:
    """Version 1 for rows of scaled logits [R, V] and bounds [R, 1] float64, without the host."""
    leading = ops.top_k(scaled, min(LEADING, scaled.shape[1]))[0].double()
    count = _counts(_slopes(leading), mu, scaled.shape[1])
    least = scaled.sort(dim=-1, descending=True).values.gather(1, count - 1)
    scaled.masked_fill_(scaled < least, -torch.inf)


def cut_2_(scaled: Tensor, mu: Tensor) -> None:
    """Version 2 for rows of scaled logits [R, V] and bounds [R, 1] float64, without the host."""
    log2_p = surprises(scaled).neg_()
    floor = torch.minimum(-mu.to(torch.float32), log2_p.amax(-1, keepdim=True))
    scaled.masked_fill_(log2_p < floor, -torch.inf)


def surprises(scaled: Tensor) -> Tensor:
    """−log₂ p of scaled logits [R, V]."""
    return log_softmax(scaled).div_(_LOG2).neg_()


def _slopes(leading: Tensor) -> Tensor:
    """`_slope` of rows of logits [R, m], [R, 1]."""
    ranks = torch.arange(1, leading.shape[1] + 1, dtype=torch.float64, device=leading.device)
    steps = ranks.log().diff()
    known = leading[:, 1:].isfinite()
    drops = torch.where(known, -leading.diff(dim=-1), 0.0)
    square = totals(known * steps.square())
    slope = totals(drops * steps) / square
    return torch.where(square > 0, slope, torch.inf)


def _counts(slope: Tensor, mu: Tensor, vocab_size: int) -> Tensor:
    """`_count` of rows [R, 1] float64, int64."""
    log_n = math.log(vocab_size)
    epsilon = slope - 1.0
    spread = (-torch.expm1(-epsilon * log_n) / epsilon).log()
    if log_n > 0.0:
        spread = torch.where(epsilon == 0.0, math.log(log_n), spread)
    log_k = (mu * _LOG2 - spread) / slope
    count = log_k.clamp(max=log_n).exp().nan_to_num(1.0).to(torch.int64).clamp(1, vocab_size)
    count = torch.where(slope.isinf() | (log_k <= 0.0), 1, count)
    return torch.where(slope <= 0.0, vocab_size, count)


def _slope(leading: npt.NDArray[np.float64]) -> float:
    """How fast logits [m], largest first, fall with the logarithm of their rank: Zipf's exponent
    ŝ, by least squares through the differences of neighbours; infinite for a single token.
    """
    drops = -np.diff(leading[np.isfinite(leading)])
    steps = np.diff(np.log(np.arange(1, len(drops) + 2)))
    return float(steps @ drops / (steps @ steps)) if len(drops) else math.inf


def _count(slope: float, mu: float, vocab_size: int) -> int:
    """k = (ε·2^µ / (1 − N^−ε))^(1/ŝ) with ε = ŝ − 1, from 1 to the N tokens there are."""
    if slope <= 0.0:  # all equal: as many as it takes
        return vocab_size
    if math.isinf(slope):
        return 1
    epsilon, log_n = slope - 1.0, math.log(vocab_size)
    # log of (1 − N^−ε) / ε, which is log N where ε is 0
    spread = math.log(-math.expm1(-epsilon * log_n) / epsilon) if epsilon else math.log(log_n)
    log_k = (mu * _LOG2 - spread) / slope
    return 1 if log_k <= 0.0 else min(int(math.exp(min(log_k, log_n))), vocab_size)


def moved(mu: float, surprise: float, target: float, rate: float) -> float:
    """The bound after a token of that surprise, in bits."""
    return mu - rate * (surprise - target)
