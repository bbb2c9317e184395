"""The row layout: how a GPU reads what it multiplies.

Where a CPU wants panels (`ops.panels`), a GPU wants rows, whose ends its copies and its matrix
units put where they need them:

    weight   [N, K] in x.dtype; float8, int8 [N, K'] bytes; int4 [N, K'/2] uint8
             K' is K padded with zeros (of codes, what stands for nothing) to a multiple of 128;
             of each 128 codes of four bits, 16-bit word c holds codes c, 32 + c, 64 + c and 96 + c
             from its low bits on: words are widened two at a time, to the pairs that are multiplied
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
"""K of codes is a multiple, and the four codes of a word lie a quarter of it apart."""


def pack_bytes(q: Tensor, padded: int) -> Tensor:
    """[N, K] bytes → [N, padded], a multiple of 128."""
    return functional.pad(q, (0, padded - q.shape[1])).contiguous()


def pack_nibbles(q: Tensor, padded: int, fill: int = 8) -> Tensor:
    """[N, K] uint8 below 16 → [N, padded / 2]."""
    whole = functional.pad(q, (0, padded - q.shape[1]), value=fill)
    parts = whole.unflatten(1, (-1, 2, 2, BLOCK // 4))
    pairs = parts[:, :, :, 0] | parts[:, :, :, 1] << 4  # a word's bytes, [N, blocks, 2, words]
    packed: Tensor = pairs.transpose(2, 3).flatten(1)
    return packed


def unpack_codes(rows: Tensor) -> Tensor:
    """The [N, K'] codes, padding included: bytes as they are, or uint8 of four bits."""
    if rows.dtype is not torch.uint8:
        return rows
    pairs = rows.unflatten(1, (-1, BLOCK // 4, 2)).transpose(2, 3)
    return torch.stack((pairs & 15, pairs >> 4), dim=3).flatten(1)


def is_rows(weight: Tensor) -> bool:
    """Whether a weight is stored in rows, not in panels."""
    return weight.dim() == 2
