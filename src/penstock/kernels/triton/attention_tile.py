"""The steps that both attention kernels take: keys of a tile, spans joined, the end of a row.

All is in base 2: a score is multiplied by log2(e) where it is scaled. Multiplications and
additions are fused where `tl.fma` says so and nowhere else (kernels are launched with
enable_fp_fusion=False): two kernels that call these functions give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.launch import dot


@triton.jit
def owner(query_start, batch, index, MUL: tl.constexpr, DIV: tl.constexpr):
    """The sequence of a tile: the last b with query_start[b] · MUL // DIV + b <= index.

    Each begins with a tile of its own, and there is room for all its tiles up to the next one's.
    """
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) * MUL // DIV + middle <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def queries(
    q,
    begin,
    start,
    count,
    length,
    kv_head,
    q_token,
    q_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of one KV head, from row `begin` of a sequence's: queries [ROWS, D], and of each row
    position (-1: there is no such row), token, head."""
    D: tl.constexpr = triton.next_power_of_2(DIM)
    d = tl.arange(0, D)
    row = begin + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    inside = row < count * GROUP
    at = tl.where(inside, length - count + token, -1)
    mask = inside[:, None] & (d < DIM)[None, :]
    first = (start + token).to(tl.int64) * q_token + head * q_head
    return tl.load(q + first[:, None] + d[None, :], mask=mask, other=0.0), at, token, head, inside


@triton.jit
def write(to, row, found, inside, DIM: tl.constexpr):
    """found [R, D] into rows of DIM."""
    d = tl.arange(0, triton.next_power_of_2(DIM))
    mask = inside[:, None] & (d < DIM)[None, :]
    tl.store(to + row[:, None] * DIM + d[None, :], found.to(to.dtype.element_ty), mask=mask)


@triton.jit
def safe(top):
    """A maximum to subtract: 0 in place of -inf, or -inf − -inf would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def join(top, total, values, span_top, span_total, span_values):
    """What the spans so far gave, and one span more: maxima, sums, values [R, D]."""
    new = tl.maximum(top, span_top)
    old_weight = tl.exp2(top - safe(new))
    weight = tl.exp2(span_top - safe(new))
    total = tl.fma(total, old_weight, span_total * weight)
    values = tl.fma(values, old_weight[:, None], span_values * weight[:, None])
    return new, total, values


@triton.jit
def finish(top, total, values, sinks, head, HAS_SINKS: tl.constexpr):
    """The weighted mean [R, D]: the sink enters its sum; a row that sees nothing is zero."""
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        new = tl.maximum(top, sink)
        weight = tl.exp2(top - new)
        total = tl.fma(total, weight, tl.exp2(sink - new))
        values = values * weight[:, None]
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    return values * share[:, None]


@triton.jit
def widened(x, dtype: tl.constexpr):
    """x in q's dtype; int8 by way of float32, as the interpreter has no other to bfloat16."""
    if x.dtype == tl.int8:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def blocks_of(table, tile, length, P: tl.constexpr, KEYS: tl.constexpr):
    """The blocks that hold a tile's positions; 0 beyond the sequence."""
    position = tile * KEYS + tl.arange(0, KEYS)
    return tl.load(table + position // P, mask=position < length, other=0)


@triton.jit
def rows_of(cache, blocks, offset, inside, stride_block, stride_row, DIM: tl.constexpr):
    """Keys or values [KEYS, D] of one tile; zeros where nobody may look."""
    D: tl.constexpr = triton.next_power_of_2(DIM)
    d = tl.arange(0, D)
    start = tl.multiple_of(blocks.to(tl.int64) * stride_block + offset * stride_row, 8)
    mask = inside[:, None]
    if D != DIM:
        mask = mask & (d < DIM)[None, :]
    return tl.load(cache + start[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def tile_step(
    q,
    at,
    tile,
    blocks,
    length,
    masked,
    key,
    value,
    key_scale,
    value_scale,
    stride_block,
    stride_row,
    scale_block,
    scale_row,
    unit,
    cap,
    window,
    top,
    total,
    values,
    DIM: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One tile of keys: (maximum, sum, values) of a span so far and with it.

    q [R, D] whose rows stand at the positions `at`; masked: whether some row mustn't see all of it;
    unit: what a score is multiplied by, log2(e) included; with a soft cap, what the argument of
    exp(2x) is, and `cap` has log2(e).
    """
    position = tile * KEYS + tl.arange(0, KEYS)
    inside = position < length
    offset = position % P
    k = rows_of(key, blocks, offset, inside, stride_block, stride_row, DIM)
    nothing = tl.zeros([q.shape[0], KEYS], tl.float32)
    scores = dot(q, tl.trans(widened(k, q.dtype)), nothing)
    if SCALED:
        scale_at = blocks.to(tl.int64) * scale_block + offset * scale_row
        scores *= tl.load(key_scale + scale_at, mask=inside, other=0.0).to(tl.float32)[None, :]
    factor = unit
    if SOFTCAP:  # cap · tanh(x) = cap − 2 · cap / (exp(2x) + 1)
        scores = cap - 2.0 * cap / (tl.exp2(scores * unit) + 1.0)
        factor = 1.0
    if masked:
        visible = position[None, :] <= at[:, None]
        if WINDOW:
            visible = visible & (position[None, :] > at[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(tl.fma(scores, factor, -safe(new)[:, None]))
    old_weight = tl.exp2(top - safe(new))
    total = tl.fma(total, old_weight, tl.sum(weights, 1))
    if SCALED:
        weights *= tl.load(value_scale + scale_at, mask=inside, other=0.0).to(tl.float32)[None, :]
    v = rows_of(value, blocks, offset, inside, stride_block, stride_row, DIM)
    values = dot(weights.to(q.dtype), widened(v, q.dtype), values * old_weight[:, None])
    return new, total, values
