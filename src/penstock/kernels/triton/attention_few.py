"""Few queries a sequence: spans of keys side by side, and a second kernel that joins them."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention_tile import (
    blocks_of,
    finish,
    join,
    queries,
    scales_of,
    side_of,
    tile_step,
    write,
)


@triton.jit(
    do_not_specialize=["lanes", "spans", "window", "table_row"],
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
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Every `lanes`-th span of one sequence and KV head, from span program_id(0) on."""
    kv_head = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2)
    start = tl.load(query_start + b)
    count = tl.load(query_start + b + 1) - start
    if (count == 0) | (count * GROUP > ROWS):
        return
    length = tl.load(context_len + b)
    D: tl.constexpr = side_of(DIM)
    query, at, token, head, inside = queries(
        q, 0, start, count, length, kv_head, q_token, q_head, GROUP, DIM, ROWS
    )
    first = tl.maximum(length - count - window + 1, 0) if WINDOW else 0
    place = (tl.minimum(start, b * (ROWS // GROUP)) + token).to(tl.int64) * heads + head
    table = block_table + b.to(tl.int64) * table_row
    key += kv_head * stride_head
    value += kv_head * stride_head
    if SCALED:
        key_scale += kv_head * scale_head
        value_scale += kv_head * scale_head
    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_values = tl.zeros([ROWS, D], tl.float32)
    for span in tl.range(first // SPAN + tl.program_id(0), tl.cdiv(length, SPAN), lanes):
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        values = tl.zeros([ROWS, D], tl.float32)
        low = tl.maximum(span * SPAN, first) // KEYS
        high = tl.cdiv(tl.minimum(span * SPAN + SPAN, length), KEYS)
        blocks = blocks_of(table, low, length, P, KEYS)
        k_scales, v_scales = None, None
        if SCALED:
            k_scales, v_scales = scales_of(
                key_scale, value_scale, blocks, low, length, scale_block, scale_row, P, KEYS
            )
        for tile in tl.range(low, high, num_stages=STAGES):
            following = blocks_of(table, tile + 1, length, P, KEYS)
            top, total, values = tile_step(
                query, at, tile, blocks, length, True, key, value, k_scales, v_scales,
                stride_block, stride_row, unit, cap, window,
                top, total, values, DIM, P, KEYS, WINDOW, SOFTCAP, SCALED,
            )  # fmt: skip
            blocks = following
            if SCALED:
                k_scales, v_scales = scales_of(
                    key_scale,
                    value_scale,
                    blocks,
                    tile + 1,
                    length,
                    scale_block,
                    scale_row,
                    P,
                    KEYS,
                )
        if DIRECT:  # there is but one
            all_top, all_total, all_values = join(
                all_top, all_total, all_values, top, total, values
            )
        else:
            span_at = place * spans + span
            tl.store(stats + span_at * 2, top, mask=inside)
            tl.store(stats + span_at * 2 + 1, total, mask=inside)
            write(space, span_at, values, inside, DIM)
    if DIRECT:
        found = finish(all_top, all_total, all_values, sinks, head, HAS_SINKS)
        write(out, (start + token).to(tl.int64) * heads + head, found, inside, DIM)


@triton.jit(
    do_not_specialize=["batch", "spans", "window"],
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
    DIM: tl.constexpr,
    SPAN: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Joins the spans of one row that `few` has left: of one token and query head."""
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
    first = tl.maximum(length - count - window + 1, 0) if WINDOW else 0
    D: tl.constexpr = side_of(DIM)
    d = tl.arange(0, D)
    one = tl.arange(0, 1)
    row = (place.to(tl.int64) * heads + head) * spans + one
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    values = tl.zeros([1, D], tl.float32)
    inside = (d < DIM)[None, :]
    for span in tl.range(first // SPAN, tl.cdiv(length, SPAN), loop_unroll_factor=16):
        span_top = tl.load(stats + (row + span) * 2)
        span_total = tl.load(stats + (row + span) * 2 + 1)
        span_values = tl.load(space + (row + span)[:, None] * DIM + d[None, :], mask=inside)
        top, total, values = join(top, total, values, span_top, span_total, span_values)
    found = finish(top, total, values, sinks, head + one, HAS_SINKS)
    write(out, (start + token).to(tl.int64) * heads + head + one, found, one == 0, DIM)
