"""Which experts a token goes to, and the order in which experts take their tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.launch import implement, power_of_2
from penstock.ops.route import check_experts, check_route

CHOICES: tl.constexpr = tl.constexpr(1024)
"""How many choices `sort_tokens` looks at together."""


@triton.jit
def _order(values):
    """float32 as integers in the same order: -0 as 0, NaN above all, none the least there is."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, ordered)  # noqa: PLR0124


@triton.jit
def _largest_first(values, at, WIDTH: tl.constexpr):
    """Integers in the order of values; of equal ones the first is the largest."""
    return _order(values).to(tl.int64) * WIDTH + (WIDTH - 1 - at)


@triton.jit
def _of_best_groups(
    wish, at, count,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, SIZE: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """-inf for the experts of all but the best groups: by the best of each, or its two best."""
    group, g = at // SIZE, tl.arange(0, WIDTH)
    best = tl.full((WIDTH,), -float("inf"), dtype=tl.float32)
    for i in tl.static_range(GROUPS):
        own = tl.where((group == i) & (at < count), wish, -float("inf"))
        sum_of = tl.max(own, axis=0)
        if PAIR:
            first = tl.min(tl.where(own == sum_of, at, 0x7FFFFFFF), axis=0)
            sum_of += tl.max(tl.where(at == first, -float("inf"), own), axis=0)
        best = tl.where(g == i, sum_of, best)
    keys = tl.where(g < GROUPS, _largest_first(best, g, WIDTH), -0x80000000 * WIDTH)
    kept = at < 0
    for _ in tl.static_range(TOP):
        own = keys == tl.max(keys, axis=0)
        kept = kept | (group == tl.sum(tl.where(own, g, 0), axis=0))
        keys = tl.where(own, -0x80000000 * WIDTH, keys)
    return tl.where(kept, wish, -float("inf"))


@triton.jit
def _route(
    logits, correction, weights, experts, stride, count, scale, eps,
    K: tl.constexpr, E: tl.constexpr, K2: tl.constexpr, NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    TOP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    at, j = tl.arange(0, E), tl.arange(0, K2)
    value = tl.load(logits + token * stride + at, mask=at < count, other=0.0).to(tl.float32)
    value = tl.where(at < count, value, -float("inf"))
    wish = value
    if CORRECTED:
        if SIGMOID:
            share = 1.0 / (1.0 + tl.exp(-value))
        else:
            share = tl.exp(value - tl.max(value, axis=0))
            share = share / tl.sum(share, axis=0)
        wish = share + tl.load(correction + at, mask=at < count, other=0.0)
    if GROUPS > 1:
        wish = _of_best_groups(wish, at, count, GROUPS, WIDTH, TOP, SIZE, CORRECTED and SIZE > 1)
    keys = tl.where(at < count, _largest_first(wish, at, E), -0x80000000 * E)
    chosen = tl.full((K2,), -float("inf"), dtype=tl.float32)
    numbers = tl.zeros((K2,), dtype=tl.int32)
    for i in tl.static_range(K):
        best = keys == tl.max(keys, axis=0)
        keys = tl.where(best, -0x80000000 * E, keys)
        chosen = tl.where(j == i, tl.sum(tl.where(best, value, 0.0), axis=0), chosen)
        numbers = tl.where(j == i, tl.sum(tl.where(best, at, 0), axis=0), numbers)
    if SIGMOID:
        powers = tl.where(j < K, 1.0 / (1.0 + tl.exp(-chosen)), 0.0)
        total = tl.sum(powers, axis=0) + eps if NORMALIZE else 1.0
    else:
        top = tl.max(chosen if NORMALIZE else value, axis=0)
        powers = tl.exp(chosen - top)
        total = tl.sum(powers if NORMALIZE else tl.exp(value - top), axis=0)
    tl.store(weights + token * K + j, powers / total * scale, mask=j < K)
    tl.store(experts + token * K + j, numbers, mask=j < K)


@implement("route")
def route(
    logits: Tensor,
    k: int,
    normalize: bool,
    correction: Tensor | None = None,
    sigmoid: bool = False,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor]:
    """`ops.route`: a program a token, whose logits stay in registers while k are picked."""
    check_route(logits, k, groups, top_groups)
    tokens, count = logits.shape
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    if tokens:
        _route[(tokens,)](
            logits, logits if correction is None else correction, weights, experts,
            logits.stride(0), count, scale, eps,
            K=k, E=power_of_2(count), K2=power_of_2(k, 2), NORMALIZE=normalize, SIGMOID=sigmoid,
            CORRECTED=correction is not None, GROUPS=groups, WIDTH=power_of_2(groups, 2),
            TOP=top_groups, SIZE=count // groups, num_warps=1,
        )  # fmt: skip
    return weights, experts


@triton.jit
def _sort_tokens(experts, rows, starts, places, count, num_experts, K: tl.constexpr):
    own = tl.program_id(0)
    at = tl.arange(0, CHOICES)
    before = tl.zeros((CHOICES,), dtype=tl.int32)
    for i in range(0, count, CHOICES):
        choice = tl.load(experts + i + at, mask=i + at < count, other=num_experts)
        before += ((choice >= 0) & (choice < own)).to(tl.int32)
    start = tl.sum(before, axis=0)
    tl.store(starts + own, start)
    for i in range(0, count, CHOICES):
        choice = tl.load(experts + i + at, mask=i + at < count, other=0)
        outside = (choice < 0) | (choice >= num_experts)
        mine = tl.where(outside, num_experts, choice) == own
        mine = mine & (i + at < count)
        place = start + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(rows + place, (i + at) // K, mask=mine)
        tl.store(places + i + at, tl.where(own < num_experts, place, -1), mask=mine)
        start += tl.sum(mine.to(tl.int32), axis=0)


@implement("sort_tokens")
def sort_tokens(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.sort_tokens`: a program an expert, which counts the choices of those before its own
    and then writes its own in order; one more for choices of none. All read every choice, from L2.
    """
    check_experts(experts, num_experts)
    flat = experts.contiguous()
    rows = torch.empty(flat.numel(), dtype=torch.int32, device=flat.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=flat.device)
    places = torch.empty_like(flat)
    _sort_tokens[(num_experts + 1,)](
        flat, rows, starts, places, flat.numel(), num_experts, K=max(flat.shape[1], 1)
    )
    return rows, starts, places
