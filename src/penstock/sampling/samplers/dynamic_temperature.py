"""Dynamic temperature: higher where the model is unsure, by the entropy of its distribution.

    t = low + (high − low) · (H / log n) ^ exponent,    low, high = max(t₀ − range, 0), t₀ + range

where H is the entropy at temperature 1 and n how many tokens are possible.
Source: llama.cpp's `dynatemp`, after kalomaze; Zhang et al. 2024, "EDT: Improving Large Language
Models' Generation by Entropy-based Dynamic Temperature Sampling", arXiv:2403.14541.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.sampling.samplers.rows import entropies, log_softmax, totals

LEAST = 1e-5
"""A temperature below this is taken as this: nearly greedy, and logits stay finite."""


def temperatures(logits: Tensor, base: Tensor, spread: Tensor, exponent: Tensor) -> Tensor:
    """The temperature of each row, [R, 1] float32. logits [R, V]; base, spread, exponent [R, 1]."""
    possible = totals((logits != -torch.inf).to(torch.float32)).to(torch.float32)
    share = entropies(log_softmax(logits)) / possible.clamp(min=2.0).log()
    low, high = (base - spread).clamp(min=0.0), base + spread
    return (low + (high - low) * share.clamp(0.0, 1.0) ** exponent).clamp_(min=LEAST)
