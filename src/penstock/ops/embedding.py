"""Rows of an embedding table, which may be the packed output head."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.panels import COLUMNS
from penstock.ops.registry import define_op


def _fake(tokens: Tensor, weight: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    return weight.new_empty((tokens.shape[0], dim))


@define_op(
    "embedding(Tensor tokens, Tensor weight, SymInt dim, float scale=1.0) -> Tensor", fake=_fake
)
def embedding(tokens: Tensor, weight: Tensor, dim: int, scale: float = 1.0) -> Tensor:
    """y[t] = W[tokens[t]] · scale.

    tokens [T] int32; weight [V, D] plain, or panels [V/16, D/v, 16, v]: a tied embedding is stored
    once, in the form that the output head needs. Returns [T, D] in weight.dtype.
    Cost: T·D·itemsize bytes (16 × the cache lines when packed, still far below one projection).
    """
    ids = tokens.long()
    if weight.dim() == 2:
        rows = weight[ids]
    else:
        rows = weight[ids // COLUMNS, :, ids % COLUMNS].reshape(ids.shape[0], -1)[:, :dim]
    if scale != 1.0:
        rows = (rows.float() * torch.tensor(scale, dtype=torch.float32)).to(weight.dtype)
    return rows.contiguous()
