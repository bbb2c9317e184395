"""Draws of one token of each row: weights of the vocabulary in blocks, then a program a row.

Sums whose places are looked for are of numbers that aren't negative, in one order: more of them
never sum to less, so the first place whose sum passes a target is found by halving.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.argmax import BLOCK, block_best, ordered, peak_of
from penstock.kernels.triton.launch import cdiv, implement, power_of_2
from penstock.kernels.triton.top_k import is_finite, kth_key, scaled_by, softmax_top_k
from penstock.ops import draw as reference

_PART: tl.constexpr = tl.constexpr(128)  # tokens a sum, when drawing from a whole vocabulary
_TILE: tl.constexpr = tl.constexpr(4096)  # of the program that goes through a row
_NO_DRAW: tl.constexpr = tl.constexpr(reference.NO_DRAW)
_BEYOND: tl.constexpr = tl.constexpr(reference.BEYOND)


@triton.jit
def _first_id(ids, weight, target):
    """The least id up to which weights [K] sum to more than target, else the last with a weight."""
    low = tl.min(tl.where(weight > 0.0, ids, 0x7FFFFFFF), axis=0)
    high = tl.max(tl.where(weight > 0.0, ids, -1), axis=0)
    while low < high:
        middle = low + (high - low) // 2
        passes = tl.sum(tl.where(ids <= middle, weight, 0.0), axis=0) > target
        high = tl.where(passes, middle, high)
        low = tl.where(passes, low, middle + 1)
    return high


@triton.jit
def _draw_from(
    ids, weights, u, top_p, tokens, k, vocab_size,
    K: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """CUT: to the nucleus. WHOLE: of k of a vocabulary, which may not hold it all."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, K)
    inside = at < k
    given = tl.load(weights + row * k + at, mask=inside, other=0.0)
    weight = given
    floor = 0.0
    if CUT:
        p = tl.load(top_p + row)
        sums = tl.cumsum(given.to(tl.float64), axis=0).to(tl.float32)
        last = tl.min(tl.where(inside & (sums >= p), at, k - 1), axis=0)
        floor = tl.sum(tl.where(at == last, given, 0.0), axis=0)
        floor = tl.where(p < 1.0, floor, 0.0)  # rounded sums may reach 1 before the last
        weight = tl.where(given < floor, 0.0, given)
    weight = weight.to(tl.float64)
    total = tl.sum(weight, axis=0)
    place = tl.load(ids + row * k + at, mask=inside, other=0)
    token = _first_id(place, weight, tl.load(u + row) * total)
    token = tl.where((total > 0.0) & (total < float("inf")), token, _NO_DRAW)
    if WHOLE:
        least = tl.sum(tl.where(at == k - 1, given, 0.0), axis=0)
        largest = tl.sum(tl.where(at == 0, given, 0.0), axis=0)
        token = tl.where((k < vocab_size) & (least >= floor) & (largest > 0.0), _BEYOND, token)
    tl.store(tokens + row, token)


@triton.jit
def _invert(weight, u, N: tl.constexpr):
    """The place where the running sum of weights [N] float64 passes u of the total, and how far
    into its weight u lies. One with a weight, if there is any.
    """
    at = tl.arange(0, N)
    sums = tl.cumsum(weight, axis=0)
    target = u * tl.sum(weight, axis=0)
    first = tl.min(tl.where((weight > 0.0) & (sums > target), at, N), axis=0)
    last = tl.max(tl.where(weight > 0.0, at, 0), axis=0)  # should rounding leave none
    place = tl.where(first < N, first, last)
    own = tl.sum(tl.where(at == place, weight, 0.0), axis=0)
    below = tl.sum(tl.where(at == place, sums - weight, 0.0), axis=0)
    rest = tl.minimum(tl.maximum((target - below) / own, 0.0), 1.0)
    return place, rest


@triton.jit
def _part_sums(
    logits, best, temperature, sums, stride, vocab_size, blocks, parts,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    peak, _ = peak_of(best + row * blocks, logits + row * stride, blocks, BLOCKS)
    part = block * (BLOCK // _PART) + tl.arange(0, BLOCK // _PART)
    at = part[:, None] * _PART + tl.arange(0, _PART)[None, :]
    value = tl.load(logits + row * stride + at, mask=at < vocab_size, other=float("-inf"))
    weight = tl.exp(scaled_by(value, peak, tl.load(temperature + row)))
    tl.store(sums + row * parts + part, tl.sum(weight, axis=1), mask=part < parts)


@triton.jit
def _draw_plain(
    logits, best, temperature, u, sums, ids, peaks, stride, vocab_size, blocks, parts,
    BLOCKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    peak, _ = peak_of(best + row * blocks, logits + row * stride, blocks, BLOCKS)
    at = tl.arange(0, PARTS)
    mass = tl.load(sums + row * parts + at, mask=at < parts, other=0.0)
    part, rest = _invert(mass.to(tl.float64), tl.load(u + row), PARTS)
    within = part * _PART + tl.arange(0, _PART)
    value = tl.load(logits + row * stride + within, mask=within < vocab_size, other=float("-inf"))
    weight = tl.exp(scaled_by(value, peak, tl.load(temperature + row)))
    place, _ = _invert(weight.to(tl.float64), rest, _PART)
    token = (part * _PART + place).to(tl.int64)
    tl.store(ids + row, tl.where(is_finite(peak), token, _NO_DRAW))
    tl.store(peaks + row, peak)


@triton.jit
def _weights(logits, at, vocab_size, kth, peak, temperature, log_min_p, scale):
    """What cuts leave of the tokens at some places, and their `ordered` keys, int64."""
    inside = at < vocab_size
    value = tl.load(logits + at, mask=inside, other=float("-inf"))
    key = ordered(value).to(tl.int64)
    scaled = scaled_by(value, peak, temperature)
    kept = inside & (key >= kth) & (scaled >= log_min_p)
    return tl.where(kept, tl.exp(scaled) * scale, 0.0), key


@triton.jit
def _mass(logits, vocab_size, kth, peak, temperature, log_min_p, scale, floor):
    """The sum of those weights of a row that are at least floor, in float64."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab_size, _TILE):
        at = start + tl.arange(0, _TILE)
        weight, _ = _weights(logits, at, vocab_size, kth, peak, temperature, log_min_p, scale)
        total += tl.sum(tl.where(weight >= floor, weight, 0.0).to(tl.float64), axis=0)
    return total


@triton.jit
def _nucleus_key(logits, vocab_size, kth, peak, temperature, log_min_p, scale, p, low, high):
    """The highest key from which on weights sum to p, from low to high, else the lowest."""
    while low < high:
        middle = high - (high - low) // 2  # above low
        total = tl.full((), 0.0, tl.float64)
        least, most = high, low
        for start in range(0, vocab_size, _TILE):
            at = start + tl.arange(0, _TILE)
            weight, key = _weights(logits, at, vocab_size, kth, peak, temperature, log_min_p, scale)
            above = (key >= middle) & (weight > 0.0)
            total += tl.sum(tl.where(above, weight, 0.0).to(tl.float64), axis=0)
            least = tl.minimum(least, tl.min(tl.where(above, key, high), axis=0))
            below = (key >= low) & (key < middle) & (weight > 0.0)
            most = tl.maximum(most, tl.max(tl.where(below, key, low), axis=0))
        enough = total.to(tl.float32) >= p
        low = tl.where(enough, least, low)
        high = tl.where(enough, high, most)
    return low


@triton.jit
def _inverted(logits, vocab_size, kth, peak, temperature, log_min_p, scale, floor, target):
    """The first place where the running sum of a row's weights of at least floor passes target."""
    below = tl.full((), 0.0, tl.float64)
    found, last = vocab_size, 0
    for start in range(0, vocab_size, _TILE):
        at = start + tl.arange(0, _TILE)
        weight, _ = _weights(logits, at, vocab_size, kth, peak, temperature, log_min_p, scale)
        weight = tl.where(weight >= floor, weight, 0.0).to(tl.float64)
        passes = (weight > 0.0) & (below + tl.cumsum(weight, axis=0) > target)
        found = tl.minimum(found, tl.min(tl.where(passes, at, vocab_size), axis=0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, at, 0), axis=0))
        below += tl.sum(weight, axis=0)
    return tl.where(found < vocab_size, found, last)


@triton.jit
def _peak(logits, vocab_size):
    """A row's largest logit and its key, int64."""
    highest = tl.full((), -0x7F800000, tl.int32)
    for start in range(0, vocab_size, _TILE):
        at = start + tl.arange(0, _TILE)
        value = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(ordered(value), axis=0))
    bits = tl.where(highest < 0, -highest ^ -0x80000000, highest)
    return bits.to(tl.float32, bitcast=True), highest.to(tl.int64)


@triton.jit
def _draw_beyond(
    tokens, logits, temperature, top_k, top_p, log_min_p, u, drawn, stride, vocab_size
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + row)
    if token == _BEYOND:
        line = logits + row * stride
        t, least, p = tl.load(temperature + row), tl.load(log_min_p + row), tl.load(top_p + row)
        k = tl.load(top_k + row)
        peak, high = _peak(line, vocab_size)
        lowest = tl.full((), -0x7F800000, tl.int64)
        whole = is_finite(peak)
        kth = kth_key(line, vocab_size, k, lowest, tl.where(whole & (k < vocab_size), high, lowest))
        scale = 1.0 / _mass(line, vocab_size, kth, peak, t, least, 1.0, 0.0)
        scale = scale.to(tl.float32)
        low = tl.where(whole & (p < 1.0), kth, high)
        edge = _nucleus_key(line, vocab_size, kth, peak, t, least, scale, p, low, high)
        bits = tl.where(edge < 0, -edge ^ -0x80000000, edge).to(tl.int32)
        value = bits.to(tl.float32, bitcast=True)
        floor = tl.exp(scaled_by(value, peak, t)) * scale
        floor = tl.where(p < 1.0, floor, 0.0)
        target = tl.load(u + row) * _mass(line, vocab_size, kth, peak, t, least, scale, floor)
        found = _inverted(line, vocab_size, kth, peak, t, least, scale, floor, target)
        token = tl.where(whole, found.to(tl.int64), _NO_DRAW)
    tl.store(drawn + row, token)


def _draw(
    ids: Tensor, weights: Tensor, u: Tensor, top_p: Tensor | None, vocab_size: int | None
) -> Tensor:
    rows, k = ids.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=ids.device)
    if rows:
        _draw_from[(rows,)](
            ids.contiguous(), weights.contiguous(), u, top_p, tokens, k, vocab_size or 0,
            K=power_of_2(k), CUT=top_p is not None, WHOLE=vocab_size is not None,
        )  # fmt: skip
    return tokens


@implement("draw_from")
def draw_from(ids: Tensor, weights: Tensor, u: Tensor, top_p: Tensor | None = None) -> Tensor:
    """`ops.draw_from`: a program a row; instead of sorting by id it halves the range of ids."""
    return _draw(ids, weights, u, top_p, None)


@implement("draw_nucleus")
def draw_nucleus(
    logits: Tensor, temperature: Tensor, top_p: Tensor, u: Tensor, narrow: int, wide: int
) -> tuple[Tensor, Tensor]:
    """`ops.draw_nucleus`: its parts, of the `wide` largest at once; narrow changes nothing."""
    values, ids, weights = softmax_top_k(logits, temperature, wide)
    tokens = _draw(ids, weights, u, top_p, logits.shape[1])
    return tokens, values[:, 0].contiguous()


@implement("draw_plain")
def draw_plain(logits: Tensor, temperature: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.draw_plain`: the largest, sums of 128 tokens in float32, and a program a row."""
    rows, vocab_size = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        best = block_best(logits)
        blocks, parts = best.shape[1], cdiv(vocab_size, _PART.value)
        sums = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
        sides = (logits.stride(0), vocab_size, blocks, parts)
        _part_sums[(rows, blocks)](
            logits, best, temperature, sums, *sides, BLOCK=BLOCK, BLOCKS=power_of_2(blocks)
        )
        _draw_plain[(rows,)](
            logits, best, temperature, u, sums, ids, peaks, *sides,
            BLOCKS=power_of_2(blocks), PARTS=power_of_2(parts),
        )  # fmt: skip
    return ids, peaks


@implement("draw_beyond")
def draw_beyond(
    tokens: Tensor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    u: Tensor,
) -> Tensor:
    """`ops.draw_beyond`: a program a row, which ends at once where there is nothing to draw."""
    drawn = torch.empty_like(tokens)
    if len(tokens):
        _draw_beyond[(len(tokens),)](
            tokens, logits, temperature, top_k, top_p, log_min_p, u, drawn, logits.stride(0),
            logits.shape[1], num_warps=16,
        )  # fmt: skip
    return drawn
