"""SmoothQuant: large channels of activations are made smaller, and the weights' columns larger.

Source: Xiao et al. 2022, arXiv:2211.10438, equation 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.errors import ConfigError


def smoothing_scales(weights: Sequence[Tensor], max_abs: Tensor, alpha: float = 0.5) -> Tensor:
    """s [K] = max|x|^α / max|W|^(1 − α) of each column, for matrices [N_i, K] that share an input.

    W·diag(s) is rounded, x / s multiplied with it. α = 0 leaves all difficulty in the activations,
    1 moves it all to the weights. 1 for a column without inputs or without weights.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"SmoothQuant with alpha={alpha}: it lies from 0 to 1.")
    largest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    scales = max_abs**alpha / largest.clamp(min=1e-12) ** (1 - alpha)
    return scales.clamp(1e-5, 1e5).masked_fill((max_abs <= 0) | (largest <= 0), 1.0)
