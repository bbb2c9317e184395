"""Rows of an embedding table, which may be the packed output head."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.panels import COLUMNS
from penstock.ops.records import has_records, unpack_records
from penstock.ops.registry import define_op
from penstock.ops.stored import unpack_quantized


def embedding_like(
    tokens: Tensor,
    weight: Tensor,
    dim: int,
    scale: float = 1.0,
    weight_scale: Tensor | None = None,
    zero: Tensor | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
) -> Tensor:
    """A tensor of the form that `embedding` of these returns."""
    plain = weight_scale is None and not has_records(weight)
    dtype = weight.dtype if plain else torch.bfloat16
    return weight.new_empty((tokens.shape[0], dim), dtype=dtype)


@define_op(
    "embedding(Tensor tokens, Tensor weight, SymInt dim, float scale=1.0, "
    "Tensor? weight_scale=None, Tensor? zero=None, int levels=0, Tensor? outer=None) -> Tensor",
    fake=embedding_like,
)
def embedding(
    tokens: Tensor,
    weight: Tensor,
    dim: int,
    scale: float = 1.0,
    weight_scale: Tensor | None = None,
    zero: Tensor | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
) -> Tensor:
    """y[t] = W[tokens[t]] · scale.

    tokens [T] int32; weight [V, D] plain, or panels as in `linear`, with their weight_scale and
    zero, levels and outer where they are quantized: a tied embedding is stored once, in the form
    that the output head needs. `tokens` may number the rows of anything. Returns [T, D] in
    weight.dtype, bfloat16 from quantized panels.
    Cost: T·D·itemsize bytes (16 × the cache lines when packed, still far below one projection).
    """
    ids = tokens.long()
    if weight.dim() == 2 and weight_scale is None:
        rows = weight[ids]
    elif weight.dim() == 2:
        parts = [None if t is None else t[ids] for t in (weight, weight_scale, zero, outer)]
        assert parts[0] is not None and parts[1] is not None  # weight and weight_scale
        size = len(ids), dim
        rows = unpack_quantized(parts[0], parts[1], parts[2], levels, parts[3], *size)
        rows = rows.to(torch.bfloat16)
    elif has_records(weight):
        each = torch.arange(len(ids), device=ids.device)
        whole = unpack_records(weight[ids // COLUMNS], COLUMNS * len(ids), dim)
        rows = whole[ids % COLUMNS + COLUMNS * each].to(torch.bfloat16)
    elif weight_scale is None:
        rows = weight[ids // COLUMNS, :, ids % COLUMNS].reshape(ids.shape[0], -1)[:, :dim]
    else:
        each = torch.arange(len(ids), device=ids.device)
        panel, column = ids // COLUMNS, ids % COLUMNS + COLUMNS * each
        parts = [None if t is None else t[panel] for t in (weight, weight_scale, zero, outer)]
        assert parts[0] is not None and parts[1] is not None  # weight and weight_scale
        size = COLUMNS * len(ids), dim
        whole = unpack_quantized(parts[0], parts[1], parts[2], levels, parts[3], *size)
        rows = whole[column].to(torch.bfloat16)
    if scale != 1.0:
        rows = (rows.float() * scale).to(rows.dtype)
    return rows.contiguous()
