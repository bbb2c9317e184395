"""What queries of their own find at a sequence's first tokens, of rows that see those from afar."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.attention_tile import (
    blocks_of,
    finish,
    join,
    owner,
    queries,
    scales_of,
    side_of,
    tile_step,
    write,
)
from penstock.kernels.triton.launch import wait_turn


@triton.jit(
    do_not_specialize=["batch", "reach", "sink_tokens", "table_row"],
    do_not_specialize_on_alignment=["query_start", "context_len", "block_table"],
)
def sunk_rows(
    q,
    space,
    stats,
    key,
    value,
    key_scale,
    value_scale,
    query_start,
    context_len,
    block_table,
    batch,
    heads,
    reach,
    sink_tokens,
    unit,
    cap,
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
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """A tile of one KV head's rows: maxima and sums into stats [T · H, 2], values into space
    [T · H, D]. Of rows before `reach`, which see these tokens with the others, a maximum of −∞.
    """
    wait_turn()
    index = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    b = owner(query_start, batch, index, GROUP, ROWS)
    start = tl.load(query_start + b)
    count = tl.load(query_start + b + 1) - start
    begin = (index - (start * GROUP // ROWS + b)) * ROWS
    if begin >= count * GROUP:
        return
    length = tl.load(context_len + b)
    query, at, token, head, inside = queries(
        q + heads * q_head, begin, start, count, length, kv_head, q_token, q_head, GROUP, DIM, ROWS
    )
    row = (start + token).to(tl.int64) * heads + head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, side_of(DIM)], tl.float32)
    last = length - count + (tl.minimum(begin + ROWS, count * GROUP) - 1) // GROUP
    if last >= reach:
        seen = tl.where(at >= reach, sink_tokens - 1, -1)
        table = block_table + b.to(tl.int64) * table_row
        key += kv_head * stride_head
        value += kv_head * stride_head
        k_scales, v_scales = None, None
        if SCALED:
            key_scale += kv_head * scale_head
            value_scale += kv_head * scale_head
        for tile in tl.range(0, tl.cdiv(sink_tokens, KEYS)):
            first, second = blocks_of(table, tile, length, P, KEYS)
            if SCALED:
                k_scales, v_scales = scales_of(
                    key_scale, value_scale, first, second, tile, length, scale_block, scale_row,
                    P, KEYS,
                )  # fmt: skip
            top, total, values = tile_step(
                query, seen, tile, first, second, length, True, key, value, k_scales, v_scales,
                stride_block, stride_row, unit, cap, 0, 0,
                top, total, values, DIM, P, KEYS, False, False, SOFTCAP, SCALED,
            )  # fmt: skip
        write(space, row, values, inside, DIM)
    tl.store(stats + row * 2, top, mask=inside)
    tl.store(stats + row * 2 + 1, total, mask=inside)


@triton.jit
def finish_rows(
    out,
    row,
    top,
    total,
    values,
    sinks,
    head,
    space,
    stats,
    inside,
    DIM: tl.constexpr,
    SUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """What rows [R] found at the first tokens is joined to what spans gave them, and written."""
    if SUNK:
        top, total, values = _join_sunk(top, total, values, space, stats, row, inside, DIM)
    write(out, row, finish(top, total, values, sinks, head, HAS_SINKS), inside, DIM)


@triton.jit
def _join_sunk(top, total, values, space, stats, row, inside, DIM: tl.constexpr):
    """Of a row that found nothing there, the same bits."""
    d = tl.arange(0, side_of(DIM))
    sunk_top = tl.load(stats + row * 2, mask=inside, other=float("-inf"))
    sunk_total = tl.load(stats + row * 2 + 1, mask=inside, other=0.0)
    mask = (sunk_top > float("-inf"))[:, None] & (d < DIM)[None, :]
    sunk = tl.load(space + row[:, None] * DIM + d[None, :], mask=mask, other=0.0)
    return join(top, total, values, sunk_top, sunk_total, sunk)
