"""Random numbers by Philox4x32-10, one thread a number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import cdiv, implement

_BLOCK = 128


@triton.jit
def _half_round(word, multiplier):
    """The upper and the lower half of a product of two 32-bit words."""
    product = word.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit(do_not_specialize=["use"])
def _uniforms(seeds, samples, positions, found, count, use, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    seed = tl.load(seeds + at, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0)
    word0, word1 = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    word2 = tl.load(samples + at, mask=inside, other=0).to(tl.uint32)
    word3 = (tl.zeros([BLOCK], tl.int64) + use).to(tl.uint32)
    key0, key1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    multiplier0 = tl.full([BLOCK], 0xD2511F53, tl.uint64)
    multiplier1 = tl.full([BLOCK], 0xCD9E8D57, tl.uint64)
    step0 = tl.full([BLOCK], 0x9E3779B9, tl.uint32)  # the golden ratio
    step1 = tl.full([BLOCK], 0xBB67AE85, tl.uint32)  # sqrt(3) - 1
    for _ in range(10):
        high0, low0 = _half_round(word0, multiplier0)
        high1, low1 = _half_round(word2, multiplier1)
        word0, word1 = high1 ^ word1 ^ key0, low1
        word2, word3 = high0 ^ word3 ^ key1, low0
        key0 += step0
        key1 += step1
    whole = ((word0 >> 5).to(tl.int64) << 26) | (word1 >> 6).to(tl.int64)  # 27 + 26 bits
    tl.store(found + at, whole.to(tl.float64) * 1.1102230246251565e-16, mask=inside)  # · 2⁻⁵³


@implement("uniforms")
def uniforms(seeds: Tensor, samples: Tensor, positions: Tensor, use: int) -> Tensor:
    """`ops.uniforms`: all in registers; the tensors are contiguous."""
    found = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    count = seeds.numel()
    if count:
        grid = (cdiv(count, _BLOCK),)
        _uniforms[grid](seeds, samples, positions, found, count, use, BLOCK=_BLOCK)
    return found
