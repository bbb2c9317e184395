"""The largest logit of each row: blocks of the vocabulary, then a program a row joins them.

Logits are compared as integers: a float's order, and below it its place, so that of equal values
the first is the largest. No order of comparisons changes what comes out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import cdiv, early, implement, power_of_2, take_turn

LEAST: tl.constexpr = tl.constexpr(-(2**63))
"""Below the rank of every logit."""

BLOCK = 4096
"""Tokens a program; the order of sums over a vocabulary hangs on it."""

_FEW_ROWS, _FEW_BLOCK = 8, 1024
"""Up to so many rows, smaller blocks: 152,000 tokens are then one for each of 132 processors."""


@triton.jit
def ordered(value):
    """int32 in the order of float32 values: -0 is 0, and every NaN 2³¹ - 1, above infinity."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, tl.where(bits < 0, -size, size))


@triton.jit
def ranked(value, at):
    """int64 in the order of float32 values, among equal ones the first place above the others."""
    return (ordered(value).to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)


@triton.jit
def place_of(rank):
    """The place, int64, that a rank was made of."""
    return 0x7FFFFFFF - (rank & 0x7FFFFFFF)


@triton.jit
def peak_of(best, logits, blocks, BLOCKS: tl.constexpr):
    """A row's largest logit and its place, by the ranks of its blocks' largest."""
    at = tl.arange(0, BLOCKS)
    place = place_of(tl.max(tl.load(best + at, mask=at < blocks, other=LEAST), axis=0))
    return tl.load(logits + place), place


@triton.jit
def _block_best(logits, best, stride, vocab_size, BLOCK: tl.constexpr):
    take_turn()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    value = tl.load(logits + row * stride + at, mask=inside, other=0.0)
    rank = tl.max(tl.where(inside, ranked(value, at), LEAST), axis=0)
    tl.store(best + row * tl.num_programs(1) + block, rank)


@triton.jit
def _join(logits, best, ids, values, stride, blocks, BLOCKS: tl.constexpr):
    take_turn()
    row = tl.program_id(0).to(tl.int64)
    value, place = peak_of(best + row * blocks, logits + row * stride, blocks, BLOCKS)
    tl.store(ids + row, place)
    tl.store(values + row, value)


def block_best(logits: Tensor, block: int = BLOCK) -> Tensor:
    """The rank of the largest logit of every block of a vocabulary, [R, blocks] int64."""
    rows, vocab_size = logits.shape
    blocks = cdiv(vocab_size, block)
    best = torch.empty((rows, blocks), dtype=torch.int64, device=logits.device)
    _block_best[(rows, blocks)](
        logits, best, logits.stride(0), vocab_size, BLOCK=block, **early(rows)
    )
    return best


@implement("argmax")
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.argmax`: the best of each block, then of the blocks."""
    rows = logits.shape[0]
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        best = block_best(logits, _FEW_BLOCK if rows <= _FEW_ROWS else BLOCK)
        stride, blocks = logits.stride(0), best.shape[1]
        _join[(rows,)](
            logits, best, ids, values, stride, blocks, BLOCKS=power_of_2(blocks), **early(rows)
        )
    return ids, values
