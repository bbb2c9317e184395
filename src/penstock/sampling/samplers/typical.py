"""Locally typical sampling: keep the tokens whose surprise is nearest to the expected one.

Source: Meister et al. 2022, "Locally Typical Sampling", arXiv:2202.00666.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.sampling.samplers.rows import entropies


def cut_(scaled: Tensor, p: Tensor) -> None:
    """Keep of each row of scaled logits [R, V] the tokens with the smallest |−log p − H| that hold
    at least mass p [R, 1]; equal distances stay or go together.
    """
    log_p = scaled.log_softmax(-1)
    distance = (log_p + entropies(log_p)).abs_()  # inf where a token is impossible
    scaled.masked_fill_(distance > _reach(distance, log_p.exp(), p), -torch.inf)


def _reach(distance: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """The least distance within which the weights sum to p, [R, 1].

    Distance and weight are sorted as the halves of one integer: floats that aren't negative have
    the order of their bits, and integers sort many times faster than indices.
    """
    near = distance.numpy(force=True).view(np.uint32).astype(np.uint64)
    both = near << np.uint64(32) | weights.numpy(force=True).view(np.uint32)
    both.sort(axis=-1)
    mass = (both & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.float32).cumsum(-1, np.float64)
    at = np.minimum((mass < p.numpy(force=True)).sum(-1, keepdims=True), mass.shape[1] - 1)
    found = np.take_along_axis(both, at, -1) >> np.uint64(32)
    return torch.from_numpy(found.astype(np.uint32).view(np.float32)).to(distance.device)
