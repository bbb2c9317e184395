"""The k largest logits of each row, alone and with their probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def _fake(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], min(k, logits.shape[1]))
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int64)


@define_op("top_k(Tensor logits, int k) -> (Tensor values, Tensor ids)", fake=_fake)
def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row in a defined order: by value, the largest first, then by id.

    logits [R, V] float32, rows may be strided; returns values [R, K] and ids [R, K] int64 with
    K = min(k, V). NaN counts as the largest; -0 equals 0. So the first j of k are the j largest.
    Natively without a sort of the vocabulary: one pass of block maxima, whose k-th largest is a
    threshold that at least k values reach; those that do (few more than k) are gathered and sorted.
    Cost: R·V·4 bytes read, and the k blocks that hold candidates again, from cache; memory-bound.
    """
    return _leading(logits, k)


def _leading(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :k].contiguous(), ids[:, :k].contiguous()


def _fake_softmax(logits: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    values, ids = _fake(logits, k)
    return values, ids, torch.empty_like(values)


@define_op(
    "softmax_top_k(Tensor logits, Tensor temperature, int k) "
    "-> (Tensor values, Tensor ids, Tensor weights)",
    fake=_fake_softmax,
)
def softmax_top_k(logits: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`top_k`, and what each of the k holds of the whole row's softmax at a temperature.

    logits [R, V] float32, rows may be strided; temperature float32, one for each row; returns
    values, ids and weights [R, K]: w = exp((l − m) / t) / Σ exp((l − m) / t), m the row's largest.
    A row whose largest isn't a finite number has weights of 0.
    The native sum: 16 lanes in blocks of 256 tokens, the blocks' sums in order in float64, where
    exp is 0 below e⁻⁸⁷.
    Cost: as `top_k`, and one exp for each logit, read again from cache; compute-bound on AVX2.
    """
    values, ids = _leading(logits, k)
    scaled = (logits - values[:, :1]) / temperature.view(-1, 1)
    weights = scaled.softmax(-1).gather(1, ids)
    return values, ids, torch.where(values[:, :1].isfinite(), weights, 0.0)


def _fake_scaled(
    logits: Tensor, temperature: Tensor, top_k: Tensor, log_min_p: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, ids = _fake(logits, k)
    return values, ids, logits.new_empty(len(logits)), ids.new_empty(len(logits), dtype=torch.bool)


@define_op(
    "scaled_top_k(Tensor logits, Tensor temperature, Tensor top_k, Tensor log_min_p, int k) "
    "-> (Tensor scaled, Tensor ids, Tensor peaks, Tensor more)",
    fake=_fake_scaled,
)
def scaled_top_k(
    logits: Tensor, temperature: Tensor, top_k: Tensor, log_min_p: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The k largest, scaled by a temperature and cut by top_k and min_p.

    logits [R, V] float32, rows may be strided; temperature and log_min_p float32, top_k int64, one
    for each row, where V and -inf cut nothing. Returns scaled and ids [R, K], as `top_k` gives
    them: (l − m) / t with m the row's largest, -inf where l is below the top_k-th or the scaled
    value below log_min_p; peaks [R]: m; more [R] bool: whether the last of K < V isn't cut, so
    that others may stay too.
    Cost: as `top_k`.
    """
    values, ids = _leading(logits, k)
    columns = (temperature.view(-1, 1), top_k.view(-1, 1), log_min_p.view(-1, 1))
    temperature, top_k, log_min_p = columns
    narrow, peaks = ids.shape[1], values[:, :1]
    kth = values.gather(1, (top_k - 1).clamp(0, narrow - 1))
    kth = torch.where(top_k < logits.shape[1], kth, -torch.inf)
    scaled = (values - peaks).div_(temperature)
    kept = (values >= kth) & (scaled >= log_min_p)
    more = kept[:, -1] & (narrow < logits.shape[1])
    return scaled.masked_fill_(~kept, -torch.inf), ids, peaks[:, 0].contiguous(), more
