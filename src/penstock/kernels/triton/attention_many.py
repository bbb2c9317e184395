"""Many queries a sequence: a tile of them at a time, that joins its spans as it goes."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention_sunk import finish_rows
from penstock.kernels.triton.attention_tile import (
    blocks_of,
    earliest_of,
    join,
    owner,
    queries,
    scales_of,
    side_of,
    tile_step,
)
from penstock.kernels.triton.launch import wait_turn


@triton.jit(
    do_not_specialize=["batch", "least", "window", "reach", "table_row"],
    do_not_specialize_on_alignment=["query_start", "context_len", "block_table", "sinks"],
)
def many(
    q,
    out,
    key,
    value,
    key_scale,
    value_scale,
    sinks,
    query_start,
    context_len,
    block_table,
    batch,
    heads,
    least,
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
    WHOLE: tl.constexpr,
):
    """One tile of queries of one KV head; the last ones, which see most, come first.

    WHOLE: rows see all of their sequence, as its last one does.
    """
    wait_turn()
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    b = owner(query_start, batch, index, GROUP, ROWS)
    start = tl.load(query_start + b)
    count = tl.load(query_start + b + 1) - start
    begin = (index - (start * GROUP // ROWS + b)) * ROWS
    if (begin >= count * GROUP) | (count * GROUP <= least):
        return
    length = tl.load(context_len + b)
    D: tl.constexpr = side_of(DIM)
    query, at, token, head, inside = queries(
        q, begin, start, count, length, kv_head, q_token, q_head, GROUP, DIM, ROWS
    )
    last = length - count + (tl.minimum(begin + ROWS, count * GROUP) - 1) // GROUP
    lowest = length - 1 if WHOLE else length - count + begin // GROUP
    highest = length - 1 if WHOLE else last
    if WHOLE:
        at = tl.where(inside, highest, -1)
    low = earliest_of(lowest, window, reach, WINDOW, SUNK) // KEYS
    high = tl.cdiv(highest + 1, KEYS)
    table = block_table + b.to(tl.int64) * table_row
    key += kv_head * stride_head
    value += kv_head * stride_head
    if SCALED:
        key_scale += kv_head * scale_head
        value_scale += kv_head * scale_head
    all_top = tl.full([ROWS], float("-inf"), tl.float32)
    all_total = tl.zeros([ROWS], tl.float32)
    all_values = tl.zeros([ROWS, D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, D], tl.float32)
    first, second = blocks_of(table, low, length, P, KEYS)
    k_scales, v_scales = None, None
    if SCALED:
        k_scales, v_scales = scales_of(
            key_scale, value_scale, first, second, low, length, scale_block, scale_row, P, KEYS
        )
    for tile in tl.range(low, high, num_stages=STAGES):
        if tile % (SPAN // KEYS) == 0:  # a span from nothing: its first tile weighs `values` by 0
            all_top, all_total, all_values = join(
                all_top, all_total, all_values, top, total, values
            )
            top = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
        following, other = blocks_of(table, tile + 1, length, P, KEYS)
        masked = tile * KEYS + KEYS > lowest + 1
        if WINDOW:
            masked = masked | (tile * KEYS <= highest - window)
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
    all_top, all_total, all_values = join(all_top, all_total, all_values, top, total, values)
    place = (start + token).to(tl.int64) * heads + head
    finish_rows(
        out, place, all_top, all_total, all_values, sinks, head, sunk_space, sunk_stats, inside,
        DIM, SUNK, HAS_SINKS,
    )  # fmt: skip
