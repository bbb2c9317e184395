"""The steps that both attention kernels take: keys of a tile, spans joined, the end of a row.

All is in base 2: a score is multiplied by log2(e) where it is scaled. Multiplications and
additions are fused where `tl.fma` says so and nowhere else (kernels are launched with
enable_fp_fusion=False): two kernels that call these functions give the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.launch import INTERPRETED, dot


@triton.constexpr_function
def side_of(dim):
    """Along a head, of a tile: a power of two, and 16 at least, or there is no product of tiles."""
    return max(16, triton.next_power_of_2(dim))


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
    D: tl.constexpr = side_of(DIM)
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
    d = tl.arange(0, side_of(DIM))
    mask = inside[:, None] & (d < DIM)[None, :]
    tl.store(to + row[:, None] * DIM + d[None, :], found.to(to.dtype.element_ty), mask=mask)


@triton.jit
def earliest_of(lowest, window, reach, WINDOW: tl.constexpr, SUNK: tl.constexpr):
    """The first position that a row at `lowest` sees, but for the first tokens."""
    earliest = tl.maximum(lowest - window + 1, 0) if WINDOW else 0
    if SUNK:
        earliest = tl.where(lowest < reach, 0, earliest)
    return earliest


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


_INT8_PAIRS: tl.constexpr = tl.constexpr("""{
.reg .b32 t, a, b, minus;
mov.b32 minus, 0xBF80BF80;
prmt.b32 t, $2, 0x43434343, 0x4140;
and.b32 a, t, 0xFF7FFF7F;
and.b32 b, t, 0xFF80FF80;
fma.rn.bf16x2 $0, b, minus, a;
prmt.b32 t, $2, 0x43434343, 0x4342;
and.b32 a, t, 0xFF7FFF7F;
and.b32 b, t, 0xFF80FF80;
fma.rn.bf16x2 $1, b, minus, a;
}""")
"""Four int8 to bfloat16: 0x43 above a byte is 128 and its low seven bits, less 128, or 256 if the
eighth is set; two at a time."""


@triton.jit
def widened(x, dtype: tl.constexpr):
    """One byte in q's dtype, exactly, by the fast ways there are."""
    if x.dtype == tl.int8:
        if INTERPRETED or dtype != tl.bfloat16:
            x = x.to(tl.float32)
        else:
            x = tl.inline_asm_elementwise(_INT8_PAIRS, "=r,=r,r", [x], tl.bfloat16, True, 4)
    elif x.dtype == tl.float8e4nv:  # from float16 to bfloat16 there is but a slow instruction
        x = x.to(tl.float16).to(tl.float32)
    return x.to(dtype)


@triton.constexpr_function
def halves_of(block, keys):
    """Blocks in which a tile's keys lie one half after the other: 1 or 2; 0: in smaller ones."""
    return 1 if block % keys == 0 else 2 if 2 * block == keys else 0


@triton.jit
def blocks_of(table, tile, length, P: tl.constexpr, KEYS: tl.constexpr):
    """The blocks that hold a tile's positions, 0 beyond the sequence: of each half one, or where
    blocks are smaller, of each position, twice the same."""
    if halves_of(P, KEYS) == 0:
        position = tile * KEYS + tl.arange(0, KEYS)
        first = tl.load(table + position // P, mask=position < length, other=0)
        second = first
    else:
        at = table + tile * KEYS // P
        first = tl.load(at, mask=tile * KEYS < length, other=0)
        second = first
        if halves_of(P, KEYS) == 2:
            second = tl.load(at + 1, mask=tile * KEYS + P < length, other=0)
    return first, second


@triton.jit
def starts_of(first, second, tile, stride_block, stride_row, P: tl.constexpr, KEYS: tl.constexpr):
    """Where each of a tile's rows [KEYS] begins in a cache, and in it."""
    row = tl.arange(0, KEYS)
    if halves_of(P, KEYS) == 1:
        at = first.to(tl.int64) * stride_block + tile * KEYS % P * stride_row
        start = at + tl.zeros([KEYS], tl.int64)
        offset = row * stride_row
    elif halves_of(P, KEYS) == 2:
        low = first.to(tl.int64) * stride_block
        start = tl.where(row < P, low, second.to(tl.int64) * stride_block)
        offset = row % P * stride_row
    else:
        start = first.to(tl.int64) * stride_block
        offset = (tile * KEYS + row) % P * stride_row
    return start, offset


@triton.jit
def rows_of(cache, start, offset, inside, DIM: tl.constexpr):
    """Keys or values [KEYS, D] of one tile; zeros where nobody may look."""
    D: tl.constexpr = side_of(DIM)
    d = tl.arange(0, D)
    mask = inside[:, None]
    if D != DIM:
        mask = mask & (d < DIM)[None, :]
    if DIM % 16 == 0:  # which the launch tells
        pointers = (cache + start)[:, None] + (offset[:, None] + d[None, :])
    else:
        pointers = cache + tl.multiple_of(start + offset, 8)[:, None] + d[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def scales_of(
    key_scale,
    value_scale,
    first,
    second,
    tile,
    length,
    stride_block,
    stride_row,
    P: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The scales of one tile's keys and values, [KEYS] float32.

    Each is loaded by one thread, in a column of four of which the others are left out: a load of
    fewer elements than threads is repeated by all that will need them.
    """
    position = tile * KEYS + tl.arange(0, KEYS)
    start, offset = starts_of(first, second, tile, stride_block, stride_row, P, KEYS)
    at = start + offset
    column = tl.zeros([KEYS], tl.int32)[:, None] + tl.arange(0, 4)[None, :]
    mask = (position < length)[:, None] & (column == 0)
    keys = tl.load(key_scale + at[:, None] + column, mask=mask, other=0.0)
    values = tl.load(value_scale + at[:, None] + column, mask=mask, other=0.0)
    return tl.sum(keys.to(tl.float32), 1), tl.sum(values.to(tl.float32), 1)


@triton.jit
def tile_step(
    q,
    at,
    tile,
    first,
    second,
    length,
    masked,
    key,
    value,
    key_scales,
    value_scales,
    stride_block,
    stride_row,
    unit,
    cap,
    window,
    reach,
    top,
    total,
    values,
    DIM: tl.constexpr,
    P: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """One tile of keys: (maximum, sum, values) of a span so far and with it.

    q [R, D] whose rows stand at the positions `at`; masked: whether some row mustn't see all of it;
    unit: what a score is multiplied by, log2(e) included; with a soft cap, what the argument of
    exp(2x) is, and `cap` has log2(e). SUNK: rows before `reach` see all before them.
    """
    position = tile * KEYS + tl.arange(0, KEYS)
    inside = position < length
    start, offset = starts_of(first, second, tile, stride_block, stride_row, P, KEYS)
    k = rows_of(key, start, offset, inside, DIM)
    nothing = tl.zeros([q.shape[0], KEYS], tl.float32)
    scores = dot(q, tl.trans(widened(k, q.dtype)), nothing)
    if SCALED:
        scores *= key_scales[None, :]
    factor = unit
    if SOFTCAP:  # cap · tanh(x) = cap − 2 · cap / (exp(2x) + 1)
        scores = cap - 2.0 * cap / (tl.exp2(scores * unit) + 1.0)
        factor = 1.0
    if masked:
        visible = position[None, :] <= at[:, None]
        if WINDOW:
            near = position[None, :] > at[:, None] - window
            if SUNK:
                near = near | (at < reach)[:, None]
            visible = visible & near
        scores = tl.where(visible, scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(tl.fma(scores, factor, -safe(new)[:, None]))
    old_weight = tl.exp2(top - safe(new))
    total = tl.fma(total, old_weight, tl.sum(weights, 1))
    if SCALED:
        weights *= value_scales[None, :]
    v = rows_of(value, start, offset, inside, DIM)
    kept = tl.fma(values, old_weight[:, None], 0.0)  # +0 of whatever a weight of 0 leaves behind
    return new, total, dot(weights.to(q.dtype), widened(v, q.dtype), kept)
