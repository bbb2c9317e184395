"""Locally typical sampling: keep the tokens whose surprise is nearest to the expected one.

Source: Meister et al. 2022, "Locally Typical Sampling", arXiv:2202.00666.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.ops.draw import running
from penstock.sampling.samplers.rows import entropies, log_softmax

Row = npt.NDArray[np.float32]

_BUCKETS = 1 << 15


def cut_(scaled: Tensor, p: Tensor, on_device: bool = False) -> None:
    """Keep of each row of scaled logits [R, V] the tokens with the smallest |−log p − H| that hold
    at least mass p [R, 1]; equal distances stay or go together. on_device: without the host.
    """
    log_p = log_softmax(scaled)
    distance = (log_p + entropies(log_p)).abs_()  # inf where a token is impossible
    reach = _reach_on_device if on_device else _reach
    scaled.masked_fill_(distance > reach(distance, log_p.exp(), p), -torch.inf)


def _reach_on_device(distance: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """The same as `_reach`, by a sort of the vocabulary."""
    near, order = distance.sort(dim=-1, stable=True)
    mass = weights.gather(1, order)
    sums = running(mass)
    place = torch.arange(mass.shape[1], device=mass.device)
    last = torch.where(mass > 0, place, 0).amax(-1, keepdim=True)
    return near.gather(1, torch.searchsorted(sums, p.to(torch.float64)).minimum(last))


def _reach(distance: Tensor, weights: Tensor, p: Tensor) -> Tensor:
    """The least distance within which the weights sum to p, [R, 1]."""
    rows = zip(
        distance.numpy(force=True), weights.numpy(force=True), p.numpy(force=True), strict=True
    )
    found = [_least(near, mass, float(share[0])) for near, mass, share in rows]
    return torch.tensor(found, dtype=torch.float32, device=distance.device)[:, None]


def _least(near: Row, mass: Row, share: float) -> float:
    """The same of one row [V].

    Distances are dealt into buckets by their upper bits, which have the order of floats that aren't
    negative; only the bucket in which the sum passes the share is sorted.
    """
    buckets = near.view(np.uint32) >> np.uint32(16)
    sums = np.bincount(buckets, mass, minlength=_BUCKETS).cumsum()
    at = min(int(np.searchsorted(sums, share)), int(buckets[mass > 0].max()))
    inside = np.flatnonzero(buckets == at)
    order = inside[near[inside].argsort(kind="stable")]
    below = sums[at - 1] if at else 0.0
    last = np.searchsorted(below + mass[order].cumsum(dtype=np.float64), share)
    return float(near[order[min(int(last), len(order) - 1)]])
