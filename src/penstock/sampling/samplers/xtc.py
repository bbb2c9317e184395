"""XTC, "exclude top choices": of the tokens above a threshold only the least likely stays.

Source: p-e-w 2024, github.com/oobabooga/text-generation-webui, pull request 6335.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.sampling.samplers.rows import softmax


def cut_(scaled: Tensor, probability: Tensor, threshold: Tensor, u: Tensor) -> None:
    """Where u < probability, drop all tokens of scaled logits [R, V] that have at least
    probability `threshold`, but the least likely of those. probability, threshold, u [R, 1].

    Equal ones stay together: a row whose top choices are all equal keeps them.
    """
    weights = softmax(scaled)
    # what can't be chosen reaches no threshold, not even 0
    top = weights.masked_fill((weights < threshold) | (weights == 0), torch.inf)
    least = top.amin(-1, keepdim=True)  # inf where no token reaches the threshold
    scaled.masked_fill_((weights > least) & (u < probability), -torch.inf)
