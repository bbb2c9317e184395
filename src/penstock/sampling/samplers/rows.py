"""Functions of the rows of a batch whose bits don't depend on how many rows there are."""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128


def totals(values: Tensor) -> Tensor:
    """The sum of each row of [R, V], [R, 1] float64.

    By blocks of fixed size and then in order: a reduction over a whole row would be split over
    threads when the row is alone, and round differently.
    """
    rest = -values.shape[1] % _BLOCK
    padded = torch.nn.functional.pad(values, (0, rest)) if rest else values
    blocks: Tensor = padded.unflatten(-1, (-1, _BLOCK))
    if values.device.type != "cpu":
        return _folded(_folded(blocks.to(torch.float64))[..., 0])
    return blocks.sum(-1, dtype=torch.float64).cumsum(-1)[:, -1:]


def softmax(logits: Tensor) -> Tensor:
    """Probabilities of logits [R, V] float32."""
    return _aligned(logits).softmax(-1)[:, : logits.shape[1]]


def log_softmax(logits: Tensor) -> Tensor:
    """Their logarithms, by float32's log-softmax."""
    return _aligned(logits).log_softmax(-1)[:, : logits.shape[1]]


def _aligned(logits: Tensor) -> Tensor:
    """On a GPU rows begin on 16 bytes: the order of torch's additions depends on that."""
    rest = -logits.shape[1] % 4
    if rest and logits.device.type != "cpu":
        return torch.nn.functional.pad(logits, (0, rest), value=-torch.inf)
    return logits


def _folded(values: Tensor) -> Tensor:
    """The sum along the last dimension, kept, half by half: a GPU's own order hangs on the rows."""
    while (size := values.shape[-1]) > 1:
        half = size // 2
        folded = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat((folded, values[..., 2 * half :]), -1) if size % 2 else folded
    return values


def entropies(log_p: Tensor) -> Tensor:
    """−Σ p·log p of each row of log-probabilities [R, V], in nats, [R, 1] float32."""
    p = log_p.exp()
    terms = (p * log_p).masked_fill_(p == 0.0, 0.0)  # 0 · log 0 = 0
    return -totals(terms).to(torch.float32)
