"""The k largest logits of each row without a sort of the vocabulary.

A vocabulary is dealt into groups of a few tokens; the largest of each is entered in a histogram
over bins in the order of floats. The bin that k groups' largest reach is a lower bound that at
least k tokens reach, and few more do: these are gathered, and each one's place among the k is how
many are larger, counted. Where too many reach it (nearly flat rows, or a mask that leaves tokens in
fewer than k groups, however many they are), one program goes through that row and finds the k-th by
halving. Every comparison is of integers that differ (`argmax.ranked`), so no order of writes
changes what comes out.

Beyond _MOST the ranks are sorted by torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.argmax import BLOCK, LEAST, ordered, peak_of, place_of, ranked
from penstock.kernels.triton.launch import cdiv, implement, power_of_2

_MOST = 1024
"""The largest k that is chosen here."""

_ROOM = 4
"""There is room for so many times k candidates; at least twice, for ties of the k-th."""

_SLICE = 64
"""Candidates of which one program counts the places."""

_WIDEST_GROUP = 64

_BINS: tl.constexpr = tl.constexpr(2048)
_NEGATIVE_INFINITY: tl.constexpr = tl.constexpr(-0x7F800000)  # as `ordered` gives it
_TILE: tl.constexpr = tl.constexpr(4096)  # of the program that goes through a row


@triton.jit
def _bin(key):
    """Where an `ordered` key belongs in a histogram: 0 for -inf, else 1 … 2046 in order.

    Six bits of mantissa and sixteen exponents, 2⁻⁶ to 2¹⁰, of each sign; what is beyond is taken
    as the nearest.
    """
    step = tl.minimum(tl.maximum((tl.abs(key) >> 17) - 121 * 64, 0), 1022)
    return tl.where(key == _NEGATIVE_INFINITY, 0, tl.where(key < 0, 1023 - step, 1024 + step))


@triton.jit
def scaled_by(value, peak, temperature):
    """(l - m) / t, rounded as torch rounds it."""
    return tl.div_rn(value - peak, tl.zeros_like(value) + temperature)


@triton.jit
def is_finite(value):
    """Whether a float32 is neither infinite nor a NaN."""
    return (value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _survey(
    logits, best, histogram, stride, vocab_size, BLOCK: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups: tl.constexpr = BLOCK // GROUP
    within = tl.arange(0, GROUP)[:, None] * groups + tl.arange(0, groups)[None, :]
    at = block * BLOCK + within
    inside = at < vocab_size
    value = tl.load(logits + row * stride + at, mask=inside, other=0.0)
    largest = tl.max(tl.where(inside, ranked(value, at), LEAST), axis=0)
    counted = largest != LEAST
    place = tl.where(counted, _bin((largest >> 32).to(tl.int32)), 0)
    tl.atomic_add(histogram + row * _BINS + place, 1, mask=counted, sem="relaxed")
    tl.store(best + row * tl.num_programs(1) + block, tl.max(largest, axis=0))


@triton.jit
def _lower_bound(histogram, k):
    """The highest bin that k of those in a histogram reach."""
    at = tl.arange(0, _BINS)
    count = tl.load(histogram + at)
    reach = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count
    return tl.max(tl.where(reach >= k, at, 0), axis=0)


@triton.jit
def _gather(
    logits, best, histogram, counts, candidates, temperature, sums, stride, vocab_size, k,
    blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, ROOM: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    value = tl.load(logits + row * stride + at, mask=inside, other=float("-inf"))
    chosen = inside & (_bin(ordered(value)) >= _lower_bound(histogram + row * _BINS, k))
    count = tl.sum(chosen.to(tl.int32), axis=0)
    if count > 0:
        first = tl.atomic_add(counts + row, count, sem="relaxed")
        slot = first + tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        kept = chosen & (slot < ROOM)
        tl.store(candidates + row * ROOM + slot, ranked(value, at), mask=kept)
    if SUMS:
        peak, _ = peak_of(best + row * blocks, logits + row * stride, blocks, BLOCKS)
        weight = tl.exp(scaled_by(value, peak, tl.load(temperature + row)))
        tl.store(sums + row * blocks + block, tl.sum(tl.where(inside, weight, 0.0), axis=0))


@triton.jit
def kth_key(logits, vocab_size, k, low, high):
    """The `ordered` key of a row's k-th largest, int64, which lies from low to high.

    Each pass over the row halves the range, and ends it at keys that occur.
    """
    while low < high:
        middle = high - (high - low) // 2  # above low
        count = 0
        least, most = high, low
        for start in range(0, vocab_size, _TILE):
            at = start + tl.arange(0, _TILE)
            inside = at < vocab_size
            key = ordered(tl.load(logits + at, mask=inside, other=0.0)).to(tl.int64)
            above = inside & (key >= middle)
            count += tl.sum(above.to(tl.int32), axis=0)
            least = tl.minimum(least, tl.min(tl.where(above, key, high), axis=0))
            below = inside & (key >= low) & (key < middle)
            most = tl.maximum(most, tl.max(tl.where(below, key, low), axis=0))
        enough = count >= k
        low = tl.where(enough, least, low)
        high = tl.where(enough, high, most)
    return low


@triton.jit
def _possible(logits, vocab_size):
    """How many of a row's tokens aren't -inf."""
    count = 0
    for start in range(0, vocab_size, _TILE):
        at = start + tl.arange(0, _TILE)
        value = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
        count += tl.sum((ordered(value) > _NEGATIVE_INFINITY).to(tl.int32), axis=0)
    return count


@triton.jit
def _settle(logits, histogram, counts, candidates, stride, vocab_size, k, ROOM: tl.constexpr):
    """The candidates of a row that _gather found too many for: those above the k-th, of which there
    are fewer than k, and the first k that equal it.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(counts + row) > ROOM:
        lowest = tl.full((), _NEGATIVE_INFINITY, tl.int64)
        high = tl.full((), 0x7FFFFFFF, tl.int64)
        if _lower_bound(histogram + row * _BINS, k) == 0:
            # Fewer than k groups have a token that isn't masked; fewer than k tokens, under most
            # grammars, and there is nothing to look for.
            few = _possible(logits + row * stride, vocab_size) < k
            high = tl.where(few, lowest, high)
        kth = kth_key(logits + row * stride, vocab_size, k, lowest, high)
        taken, ties = 0, 0
        for start in range(0, vocab_size, _TILE):
            at = start + tl.arange(0, _TILE)
            inside = at < vocab_size
            value = tl.load(logits + row * stride + at, mask=inside, other=0.0)
            key = ordered(value).to(tl.int64)
            tied = (inside & (key == kth)).to(tl.int32)
            first_ties = (tied > 0) & (ties + tl.cumsum(tied, axis=0) <= k)
            chosen = ((inside & (key > kth)) | first_ties).to(tl.int32)
            slot = taken + tl.cumsum(chosen, axis=0) - 1
            kept = (chosen > 0) & (slot < ROOM)  # fewer than 2k are: no row writes into the next
            tl.store(candidates + row * ROOM + slot, ranked(value, at), mask=kept)
            taken += tl.sum(chosen, axis=0)
            ties += tl.sum(tied, axis=0)
        tl.store(counts + row, taken)


@triton.jit
def _place(
    logits, best, counts, candidates, temperature, sums, values, ids, weights, stride, k, blocks,
    BLOCKS: tl.constexpr, ROOM: tl.constexpr, SLICE: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    if tl.program_id(1) * SLICE < count:
        at = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
        mine = tl.load(candidates + row * ROOM + at, mask=at < count, other=LEAST)
        above = tl.zeros([SLICE], tl.int32)
        for start in range(0, count, SLICE):
            to = start + tl.arange(0, SLICE)
            theirs = tl.load(candidates + row * ROOM + to, mask=to < count, other=LEAST)
            above += tl.sum((theirs[None, :] > mine[:, None]).to(tl.int32), axis=1)
        kept = (at < count) & (above < k)
        place = place_of(mine)
        value = tl.load(logits + row * stride + place, mask=kept, other=0.0)
        tl.store(values + row * k + above, value, mask=kept)
        tl.store(ids + row * k + above, place, mask=kept)
        if SUMS:
            peak, _ = peak_of(best + row * blocks, logits + row * stride, blocks, BLOCKS)
            block = tl.arange(0, BLOCKS)
            parts = tl.load(sums + row * blocks + block, mask=block < blocks, other=0.0)
            total = tl.sum(parts.to(tl.float64), axis=0)
            weight = tl.exp(scaled_by(value, peak, tl.load(temperature + row)))
            weight = (weight.to(tl.float64) / total).to(tl.float32)
            weight = tl.where(is_finite(peak), weight, 0.0)
            tl.store(weights + row * k + above, weight, mask=kept)


def _group(vocab_size: int, k: int) -> int:
    """Tokens a group: few enough that there are twice as many groups as are looked for."""
    group = _WIDEST_GROUP
    while group > 1 and vocab_size < 2 * k * group:
        group //= 2
    return group


def _leading(logits: Tensor, k: int, temperature: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Values, ids and, with a temperature, weights of the k largest; k is from 1 to _MOST."""
    rows, vocab_size = logits.shape
    device, stride = logits.device, logits.stride(0)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    weights = torch.empty_like(values if temperature is not None else values[:, :0])
    if not rows:
        return values, ids, weights
    blocks, room = cdiv(vocab_size, BLOCK), _ROOM * power_of_2(k, _MOST // _ROOM)
    sides = {"BLOCKS": power_of_2(blocks), "ROOM": room, "SUMS": temperature is not None}
    best = torch.empty((rows, blocks), dtype=torch.int64, device=device)
    sums = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    tally = torch.zeros(rows * (_BINS.value + 1), dtype=torch.int32, device=device)
    histogram, counts = tally[: rows * _BINS.value], tally[rows * _BINS.value :]
    candidates = torch.empty((rows, room), dtype=torch.int64, device=device)
    if temperature is None:
        temperature = weights  # isn't read
    group = _group(vocab_size, k)
    _survey[(rows, blocks)](
        logits, best, histogram, stride, vocab_size, BLOCK=BLOCK, GROUP=group, num_warps=8
    )
    _gather[(rows, blocks)](
        logits, best, histogram, counts, candidates, temperature, sums, stride, vocab_size, k,
        blocks, BLOCK=BLOCK, num_warps=16, **sides,
    )  # fmt: skip
    if vocab_size > room:
        _settle[(rows,)](
            logits, histogram, counts, candidates, stride, vocab_size, k, ROOM=room, num_warps=16
        )
    _place[(rows, room // _SLICE)](
        logits, best, counts, candidates, temperature, sums, values, ids, weights, stride, k,
        blocks, SLICE=_SLICE, **sides,
    )  # fmt: skip
    return values, ids, weights


def _sorted(logits: Tensor) -> tuple[Tensor, Tensor]:
    """All of each row in order, by torch's sort of integers that differ."""
    bits = logits.contiguous().view(torch.int32)
    size = bits & 0x7FFFFFFF
    order = torch.where(bits < 0, -size, size).masked_fill_(size > 0x7F800000, 0x7FFFFFFF)
    places = torch.arange(logits.shape[1], dtype=torch.int64, device=logits.device)
    ranks = (order.to(torch.int64) << 32) | (0x7FFFFFFF - places)
    ids = 0x7FFFFFFF - (ranks.sort(dim=-1, descending=True).values & 0x7FFFFFFF)
    return logits.gather(1, ids), ids


@implement("top_k")
def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`ops.top_k`: four launches that read the logits twice, the second time from cache."""
    k = min(k, logits.shape[1])
    if k > _MOST:
        values, ids = _sorted(logits)
        return values[:, :k].contiguous(), ids[:, :k].contiguous()
    values, ids, _ = _leading(logits, k, None)
    return values, ids


@implement("softmax_top_k")
def softmax_top_k(logits: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.softmax_top_k`: the sums of blocks of 4,096 are taken along as candidates are gathered.

    In float32 within a block, then in float64.
    """
    k = min(k, logits.shape[1])
    if k <= _MOST:
        return _leading(logits, k, temperature)
    values, ids = _sorted(logits)
    _, _, first = _leading(logits, 1, temperature)  # 1 / Σ of the row, in this order of additions
    powers = ((values - values[:, :1]) / temperature.view(-1, 1)).exp_()
    weights = torch.where(values[:, :1].isfinite(), powers * first, 0.0)
    return values[:, :k].contiguous(), ids[:, :k].contiguous(), weights[:, :k].contiguous()


@triton.jit
def _cut(
    values, temperature, top_k, log_min_p, scaled, peaks, more, k, vocab_size, K: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, K)
    inside = at < k
    value = tl.load(values + row * k + at, mask=inside, other=float("-inf"))
    peak = tl.load(values + row * k)
    most = tl.load(top_k + row)
    last = tl.minimum(tl.maximum(most - 1, 0), k - 1)
    kth = tl.where(most < vocab_size, tl.load(values + row * k + last), float("-inf"))
    found = scaled_by(value, peak, tl.load(temperature + row))
    kept = (value >= kth) & (found >= tl.load(log_min_p + row))
    tl.store(scaled + row * k + at, tl.where(kept, found, float("-inf")), mask=inside)
    tl.store(peaks + row, peak)
    stays = tl.sum((kept & (at == k - 1)).to(tl.int32), axis=0)  # the last of them
    tl.store(more + row, (stays > 0) & (k < vocab_size))


@implement("scaled_top_k")
def scaled_top_k(
    logits: Tensor, temperature: Tensor, top_k: Tensor, log_min_p: Tensor, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`ops.scaled_top_k`: `top_k`, then a program a row."""
    values, ids = _top_k(logits, k)
    rows, narrow = values.shape
    scaled = torch.empty_like(values)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    more = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        _cut[(rows,)](
            values, temperature, top_k, log_min_p, scaled, peaks, more, narrow, logits.shape[1],
            K=power_of_2(narrow),
        )  # fmt: skip
    return scaled, ids, peaks, more


_top_k = top_k  # by a name that no parameter hides
