"""The row layout: how a GPU reads what it multiplies.

Where a CPU wants panels (`ops.panels`), a GPU wants rows, whose ends its copies and its matrix
units put where they need them:

    weight   [N, K] in x.dtype; float8, int8 [N, K'] bytes; int4 [N, K'/2] uint8
             K' is K padded with zeros (of codes, what stands for nothing) to a multiple of 128;
             of each 128 codes of four bits, byte j holds j in its low half and 64 + j in its high
    scale, zero [N, G]; outer [N, 1]
    keys, values [blocks, Hkv, P, D]; their scales [blocks, Hkv, P]

A gated matrix is gate above up in all of its tensors, [2·N, …]. What the numbers mean is said in
`ops.linear` and `ops.rotary_cache`; a tensor's dimensions tell the two layouts apart.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
"""K of codes is a multiple, and two codes of a byte lie half of it apart."""


def pack_bytes(q: Tensor, padded: int) -> Tensor:
    """[N, K] bytes → [N, padded], a multiple of 128."""
    return functional.pad(q, (0, padded - q.shape[1])).contiguous()


def pack_nibbles(q: Tensor, padded: int, fill: int = 8) -> Tensor:
    """[N, K] uint8 below 16 → [N, padded / 2]."""
    whole = functional.pad(q, (0, padded - q.shape[1]), value=fill)
    halves = whole.unflatten(1, (-1, 2, BLOCK // 2))
    packed: Tensor = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    return packed


def unpack_codes(rows: Tensor) -> Tensor:
    """The [N, K'] codes, padding included: bytes as they are, or uint8 of four bits."""
    if rows.dtype is not torch.uint8:
        return rows
    parts = rows.unflatten(1, (-1, BLOCK // 2))
    return torch.stack((parts & 15, parts >> 4), dim=2).flatten(1)


def is_rows(weight: Tensor) -> bool:
    """Whether a weight is stored in rows, not in panels."""
    return weight.dim() == 2
