"""Few queries a sequence: spans of keys side by side, and a second kernel that joins them."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention_sunk import finish_rows
from penstock.kernels.triton.attention_tile import (
    blocks_of,
    earliest_of,
    join,
    queries,
    scales_of,
    side_of,
    tile_step,
    write,
)
from penstock.kernels.triton.launch import take_turn, wait_turn


@triton.jit(
    do_not_specialize=["lanes", "spans", "window", "reach", "table_row"],
    do_not_specialize_on_alignment=["query_start", "context_len", "block_table", "sinks"],
)
def few(
    q,
    out,
    space,
    stats,
    key,
    value,
    key_scale,
    value_scale,
    sinks,
    query_start,
    context_len,
    block_table,
    heads,
    lanes,
    spans,
    unit,
    cap,
    window,
    reach,
    sunk_space,
    sunk_stats,
    q_token,
    q_head,
    stride_block,
    stride_head,
    stride_row,
    scale_block,
    scale_head,
    scale_row,
    table_row,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    SPAN: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Some spans of one sequence and KV head, one after another: `lanes` programs share them."""
    wait_turn()
    kv_head = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2)
    start = tl.load(query_start + b)
    count = tl.load(query_start + b + 1) - start
    length = tl.load(context_len + b)
    if (count == 0) | (count * GROUP > ROWS):
        return
    lowest = length - count
    earliest = earliest_of(lowest, window, reach, WINDOW, SUNK)
    low, high = _part(earliest, length, lanes, SPAN, KEYS)
    if (low >= high) & (not DIRECT):  # others have its spans; of one span, it writes the zeros
        return
    D: tl.constexpr = side_of(DIM)
    table = block_table + b.to(tl.int64) * table_row
    first, second = blocks_of(table, low, length, P, KEYS)
    query, at, token, head, inside = queries(
        q, 0, start, count, length, kv_head, q_token, q_head, GROUP, DIM, ROWS
    )
    place = (tl.minimum(start, b * (ROWS // GROUP)) + token).to(tl.int64) * heads + head
    key += kv_head * stride_head
    value += kv_head * stride_head
    k_scales, v_scales = None, None
    if SCALED:
        key_scale += kv_head * scale_head
        value_scale += kv_head * scale_head
        k_scales, v_scales = scales_of(
            key_scale, value_scale, first, second, low, length, scale_block, scale_row, P, KEYS
        )
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, D], tl.float32)
    for tile in tl.range(low, high, num_stages=STAGES):
        if not DIRECT:
            if (tile % (SPAN // KEYS) == 0) & (tile > low):
                span_at = place * spans + (tile // (SPAN // KEYS) - 1)
                _keep(space, stats, span_at, top, total, values, inside, DIM)
                top = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                values = tl.zeros([ROWS, D], tl.float32)
        following, other = blocks_of(table, tile + 1, length, P, KEYS)
        masked = tile * KEYS + KEYS > lowest + 1
        if WINDOW:
            masked = masked | (tile * KEYS <= length - 1 - window)
        top, total, values = tile_step(
            query, at, tile, first, second, length, masked, key, value, k_scales, v_scales,
            stride_block, stride_row, unit, cap, window, reach,
            top, total, values, DIM, P, KEYS, WINDOW, SUNK, SOFTCAP, SCALED,
        )  # fmt: skip
        first, second = following, other
        if SCALED:
            k_scales, v_scales = scales_of(
                key_scale, value_scale, first, second, tile + 1, length, scale_block, scale_row,
                P, KEYS,
            )  # fmt: skip
    if DIRECT:  # there is but one span, joined to nothing
        nothing = tl.full([ROWS], float("-inf"), tl.float32)
        top, total, values = join(
            nothing, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, D], tl.float32),
            top, total, values,
        )  # fmt: skip
        row = (start + token).to(tl.int64) * heads + head
        finish_rows(
            out, row, top, total, values, sinks, head, sunk_space, sunk_stats, inside,
            DIM, SUNK, HAS_SINKS,
        )  # fmt: skip
    else:
        span_at = place * spans + (high - 1) // (SPAN // KEYS)
        _keep(space, stats, span_at, top, total, values, inside, DIM)


@triton.jit
def _part(earliest, length, lanes, SPAN: tl.constexpr, KEYS: tl.constexpr):
    """The first tile of this program's spans, and the one behind its last."""
    first = earliest // SPAN
    end = tl.cdiv(length, SPAN)
    each = tl.cdiv(end - first, lanes)
    first += tl.program_id(0) * each
    end = tl.minimum(first + each, end)
    low = tl.maximum(first * SPAN, earliest) // KEYS
    return low, tl.cdiv(tl.minimum(end * SPAN, length), KEYS)


@triton.jit
def _keep(space, stats, span_at, top, total, values, inside, DIM: tl.constexpr):
    """A span's maxima, sums and values [R, D], for `join_spans`."""
    tl.store(stats + span_at * 2, top, mask=inside)
    tl.store(stats + span_at * 2 + 1, total, mask=inside)
    write(space, span_at, values, inside, DIM)


@triton.jit(
    do_not_specialize=["batch", "spans", "window", "reach"],
    do_not_specialize_on_alignment=["query_start", "context_len", "sinks"],
)
def join_spans(
    out,
    space,
    stats,
    sinks,
    query_start,
    context_len,
    batch,
    heads,
    spans,
    window,
    reach,
    sunk_space,
    sunk_stats,
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Joins the spans of one row that `few` has left: of one token and query head."""
    take_turn()
    place = tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.minimum(tl.load(query_start + middle), middle * TOKENS) <= place:
            low = middle
        else:
            high = middle
    start = tl.load(query_start + low)
    count = tl.load(query_start + low + 1) - start
    token = place - tl.minimum(start, low * TOKENS)
    if (token >= count) | (count > TOKENS):
        return
    length = tl.load(context_len + low)
    first = earliest_of(length - count, window, reach, WINDOW, SUNK)
    D: tl.constexpr = side_of(DIM)
    d = tl.arange(0, D)
    one = tl.arange(0, 1)
    row = (place.to(tl.int64) * heads + head) * spans + one
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([1, D], tl.float32)
    inside = (d < DIM)[None, :]
    for span in tl.range(first // SPAN, tl.cdiv(length, SPAN), loop_unroll_factor=32):
        span_top = tl.load(stats + (row + span) * 2)
        span_total = tl.load(stats + (row + span) * 2 + 1)
        span_values = tl.load(space + (row + span)[:, None] * DIM + d[None, :], mask=inside)
        top, total, values = join(top, total, values, span_top, span_total, span_values)
    at = (start + token).to(tl.int64) * heads + head + one
    finish_rows(
        out, at, top, total, values, sinks, head + one, sunk_space, sunk_stats, one == 0,
        DIM, SUNK, HAS_SINKS,
    )  # fmt: skip
