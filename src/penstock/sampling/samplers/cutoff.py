"""Epsilon and eta cutoffs: drop tokens below a probability, fixed or bounded by the entropy.

Source: Hewitt, Manning & Liang 2022, "Truncation Sampling as Language Model Desmoothing",
arXiv:2210.15191.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.sampling.samplers.rows import entropies, log_softmax, softmax


def cut_epsilon_(scaled: Tensor, epsilon: Tensor) -> None:
    """Keep what has at least probability epsilon [R, 1], and the likeliest. scaled [R, V]."""
    _keep_from_(scaled, softmax(scaled), epsilon)


def cut_eta_(scaled: Tensor, epsilon: Tensor) -> None:
    """Keep what has at least min(ε, √ε·e^−H), and the likeliest. scaled [R, V], epsilon [R, 1]."""
    log_p = log_softmax(scaled)
    eta = torch.minimum(epsilon, epsilon.sqrt() * (-entropies(log_p)).exp())
    _keep_from_(scaled, log_p.exp(), eta)


def _keep_from_(scaled: Tensor, weights: Tensor, floor: Tensor) -> None:
    floor = torch.minimum(floor, weights.amax(-1, keepdim=True))
    scaled.masked_fill_(weights < floor, -torch.inf)
