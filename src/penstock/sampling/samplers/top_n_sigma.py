"""Top-nσ: keep the logits within n standard deviations of the largest.

A temperature moves logits and their deviation alike, so what is kept doesn't depend on it.
Source: Tang et al. 2024, "Top-nσ: Not All Logits Are You Need", arXiv:2411.07641.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.sampling.samplers.rows import totals


def cut_(logits: Tensor, n: Tensor) -> None:
    """Make every token of logits [R, V] impossible whose logit is below max − n·σ; n [R, 1].

    σ is of the tokens that are still possible.
    """
    possible = logits != -torch.inf
    count = totals(possible.to(torch.float32))
    mean = totals(logits.masked_fill(~possible, 0.0)) / count
    spread = (logits - mean).masked_fill_(~possible, 0.0)
    sigma = (totals(spread.square_()) / count).sqrt()
    floor = logits.amax(-1, keepdim=True) - n * sigma.to(torch.float32)
    logits.masked_fill_(logits < floor, -torch.inf)
