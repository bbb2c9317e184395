"""Attention over keys and values in rows, with one order of additions for any mixture.

A query's bits don't depend on how many others there are, in its sequence or beside it. Keys are
taken in spans of SPAN, counted from position 0; in a span, tiles of keys follow one another from
nothing (online softmax); spans are joined in order; sinks come last. A tile or a span that a row
doesn't see at all changes none of its bits, so loops may begin and end where they like. All rows of
a tile are queries of one KV head: tokens times the heads that share it, so that keys are read once
for all of them.

- Few queries (decoding, short verifications: `rows` or less): a program a sequence, KV head and
  span, or some spans one after another where there are programs enough; a second kernel joins.
  Workspace: 4 · (D + 2) bytes for each query head and span, 1.6% of what keys take in bfloat16
  where four heads share them.
- Many queries: a program a tile of queries and a KV head, that joins as it goes. So are few where
  their workspace would be larger than WORKSPACE: many sequences beside a long context, so that
  there are programs enough without spans side by side.

Both multiply tiles whose sides along K and along the keys are the same, by the same instructions
(wgmma, whose order along K isn't affected by the number of rows), and keep a row's scores in the
same places, so that its sums fold alike. Work for a step of B sequences and T tokens is laid out
by T, B and the table's width; each program finds its sequence in `query_start`. Numbers that
differ from step to step aren't specialised on: nothing is compiled anew for another batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.gpu import WORKSPACE
from penstock.kernels.triton.attention_few import few, join_spans
from penstock.kernels.triton.attention_many import many
from penstock.kernels.triton.attention_sunk import sunk_rows
from penstock.kernels.triton.launch import cdiv, early, implement

SPAN = 256
"""Positions per softmax span, counted from position 0; part of the defined order of additions."""

LOG2_E = 1.4426950408889634
SLOTS = 264
"""Programs of few queries that run at once: two for each multiprocessor of an H200."""
PROGRAMS = 1056
"""About how many few queries are spread over where they are fewer than SLOTS: several times as
many, since those that end first make room for others."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How keys and queries are cut. span and keys define the bits, the others don't."""

    span: int  # positions
    keys: int  # in a tile
    rows: int  # of a tile of few queries
    many_rows: int  # of a tile of many
    stages: int  # tiles of keys on their way
    many_stages: int


def sizes(dtype: torch.dtype, dim: int) -> Sizes:
    """For queries of `dtype` and heads of `dim`: what registers and shared memory hold."""
    if dtype is torch.float32:
        return Sizes(SPAN, 32 if dim <= 128 else 16, 64, 64, 2, 2)
    if dim <= 64:
        return Sizes(SPAN, 128, 64, 64, 2, 3)
    if dim <= 128:
        return Sizes(SPAN, 64, 64, 64, 2, 3)
    return Sizes(SPAN, 32, 64, 64, 2, 2)


@implement("paged_attention")
def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    recent_keys: Tensor | None = None,
    recent_values: Tensor | None = None,
    recent_slots: Tensor | None = None,
    recent_window: Tensor | None = None,
    causal: bool = True,
    sink_tokens: int = 0,
) -> Tensor:
    """`ops.paged_attention`: few queries by spans of the keys, many by tiles of queries.

    T == B means one query a sequence.
    """
    if key_cache.dtype is torch.uint8 or recent_slots is not None:
        raise KernelError(
            "int4 and kivi caches aren't built for a GPU: use the cache dtypes auto, fp8 or int8."
        )
    return attend(
        q, (key_cache, value_cache), (key_scale, value_scale), (query_start, context_len),
        block_table, scale, window, softcap, sinks, sizes(q.dtype, q.shape[2]), causal,
        sink_tokens,
    )  # fmt: skip


def attend(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    ragged: tuple[Tensor, Tensor],
    block_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    cut: Sizes,
    causal: bool = True,
    sink_tokens: int = 0,
) -> Tensor:
    """`paged_attention` cut as `cut` says; ragged: query_start and context_len."""
    both = q
    if sink_tokens:
        q = q[:, : q.shape[1] // 2]
        _check_sunk(sink_tokens, window, both.shape[1])
    _check(q, caches, scales, block_table, scale)
    if not causal and window > 0:
        raise KernelError(f"What isn't causal has no window, but one of {window} is given.")
    tokens, heads, dim = q.shape
    batch, group = block_table.shape[0], heads // caches[0].shape[1]
    out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
    if not tokens or not batch:
        return out
    unit = 2.0 * scale / softcap if softcap > 0 else scale
    common = {
        "unit": unit * LOG2_E,
        "cap": softcap * LOG2_E,
        "window": window,
        "reach": sink_tokens + window,
        **_strides(q, caches[0], scales[0], block_table),
        "GROUP": group,
        "DIM": dim,
        "P": caches[0].shape[2],
        "SPAN": cut.span,
        "KEYS": cut.keys,
        "WINDOW": window > 0,
        "SUNK": sink_tokens > 0,
        "SOFTCAP": softcap > 0,
        "SCALED": scales[0] is not None,
        "HAS_SINKS": sinks is not None,
        "enable_fp_fusion": False,
    }
    inputs = (*caches, *scales, sinks, *ragged, block_table)
    common |= _sunk(both, inputs, common, cut, sink_tokens)
    each = cut.rows // group  # most queries that few are
    if not causal or workspace(q, block_table, caches[0].shape[2], cut, each) > WORKSPACE:
        each = 0
    if each and (batch > 1 or tokens <= each):
        _launch_few(q, out, inputs, common, cut, each)
    if tokens > each and (tokens != batch or not each):
        rows = cut.many_rows
        grid = (tokens * group // rows + batch, caches[0].shape[1])
        least = cut.rows if each and batch > 1 else 0
        many[grid](
            q, out, *inputs, batch, heads, least,
            **common, ROWS=rows, STAGES=cut.many_stages, WHOLE=not causal, num_warps=_warps(rows),
            **early(tokens),
        )  # fmt: skip
    return out


def _check_sunk(sink_tokens: int, window: int, heads: int) -> None:
    if window <= 0 or heads % 2:
        raise KernelError(
            f"sink_tokens are beside a window, and queries have their heads twice; here are "
            f"{sink_tokens} beside a window of {window}, and {heads} heads."
        )


def _sunk(
    q: Tensor,
    inputs: tuple[Tensor | None, ...],
    common: dict[str, Any],
    cut: Sizes,
    sink_tokens: int,
) -> dict[str, Any]:
    """What rows find at the first tokens, by queries of their own, as kernels take it."""
    if not sink_tokens:
        return {"sunk_space": None, "sunk_stats": None}
    keys, block_table = inputs[0], inputs[7]
    assert keys is not None and block_table is not None
    (tokens, both, dim), rows = q.shape, cut.many_rows
    heads = both // 2
    space = torch.empty((tokens * heads, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((tokens * heads, 2), dtype=torch.float32, device=q.device)
    names = ("q_token", "q_head", "stride_block", "stride_head", "stride_row", "scale_block",
             "scale_head", "scale_row", "table_row", "GROUP", "DIM", "P", "KEYS", "SOFTCAP",
             "SCALED")  # fmt: skip
    batch = block_table.shape[0]
    grid = (tokens * common["GROUP"] // rows + batch, keys.shape[1])
    sunk_rows[grid](
        q, space, stats, *inputs[:4], *inputs[5:], batch, heads, common["reach"], sink_tokens,
        common["unit"], common["cap"], **{name: common[name] for name in names}, ROWS=rows,
        num_warps=_warps(rows), enable_fp_fusion=False, **early(tokens),
    )  # fmt: skip
    return {"sunk_space": space, "sunk_stats": stats}


def workspace(q: Tensor, block_table: Tensor, block_size: int, cut: Sizes, each: int) -> int:
    """Bytes for the spans of few queries, up to `each` a sequence, before they are joined."""
    (tokens, heads, dim), (batch, width) = q.shape, block_table.shape
    spans = cdiv(width * block_size, cut.span)
    return min(tokens, batch * each) * heads * spans * 4 * (dim + 2) if spans > 1 else 0


def _launch_few(
    q: Tensor,
    out: Tensor,
    inputs: tuple[Tensor | None, ...],
    common: dict[str, Any],
    cut: Sizes,
    each: int,
) -> None:
    """`few`, and `join_spans` where a table has room for more than one span."""
    keys, sinks, query_start, context_len, block_table = inputs[0], *inputs[4:]
    assert keys is not None and block_table is not None
    (tokens, heads, dim), kv_heads = q.shape, keys.shape[1]
    batch, width = block_table.shape
    spans = max(1, cdiv(width * keys.shape[2], cut.span))
    pairs = batch * kv_heads
    lanes = 1 if pairs >= SLOTS else min(spans, cdiv(PROGRAMS, pairs))
    stages = cut.stages + (lanes * pairs <= SLOTS // 2)  # one to a multiprocessor: it has room
    places = min(tokens, batch * each) if spans > 1 else 0
    space = torch.empty((places * heads, spans, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((places * heads, spans, 2), dtype=torch.float32, device=q.device)
    few[(lanes, kv_heads, batch)](
        q, out, space, stats, *inputs, heads, lanes, spans,
        **common, ROWS=cut.rows, STAGES=stages, DIRECT=spans == 1,
        num_warps=_warps(cut.rows), **early(tokens),
    )  # fmt: skip
    if spans > 1:
        join_spans[(places, heads)](
            out, space, stats, sinks, query_start, context_len, batch, heads, spans,
            common["window"], common["reach"], common["sunk_space"], common["sunk_stats"],
            DIM=dim, SPAN=cut.span, TOKENS=each, WINDOW=common["WINDOW"], SUNK=common["SUNK"],
            HAS_SINKS=common["HAS_SINKS"], num_warps=1, enable_fp_fusion=False, **early(tokens),
        )  # fmt: skip


def _warps(rows: int) -> int:
    """Sixteen rows each: a warp has whole rows, and sums of theirs are folded in one way."""
    return max(rows // 16, 1)


def _strides(q: Tensor, cache: Tensor, scale: Tensor | None, block_table: Tensor) -> dict[str, int]:
    """The strides that the kernels take, by name."""
    block, head, row = scale.stride() if scale is not None else (0, 0, 0)
    return {
        "q_token": q.stride(0),
        "q_head": q.stride(1),
        "stride_block": cache.stride(0),
        "stride_head": cache.stride(1),
        "stride_row": cache.stride(2),
        "scale_block": block,
        "scale_head": head,
        "scale_row": row,
        "table_row": block_table.stride(0),
    }


def _check(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    block_table: Tensor,
    scale: float,
) -> None:
    """Raise KernelError for what the kernels would read wrongly."""
    keys, values = caches
    if keys.dim() != 4 or keys.shape != values.shape or keys.stride() != values.stride():
        raise KernelError(
            f"Keys and values are [N, Hkv, P, D] and laid out alike, not {list(keys.shape)} and "
            f"{list(values.shape)} with strides {keys.stride()} and {values.stride()}."
        )
    if any(stride % 8 for stride in keys.stride()[:3]):
        raise KernelError(f"Rows of keys begin at multiples of 8 numbers, not {keys.stride()}.")
    last = (q.stride(2), keys.stride(3), block_table.stride(1))
    if last != (1, 1, 1) or q.shape[2] != keys.shape[3] or q.shape[1] % keys.shape[1]:
        raise KernelError(
            f"q {list(q.shape)} doesn't fit keys {list(keys.shape)}, or a last dimension isn't "
            f"contiguous: strides {last} of q, keys and block_table."
        )
    if q.shape[2] % 8 or q.shape[2] > 256:
        raise KernelError(f"A head's size is a multiple of 8 up to 256, not {q.shape[2]}.")
    if not scale > 0:
        raise KernelError(f"The scale of scores must be above 0, not {scale}.")
    if (keys.dtype is torch.int8) != (scales[0] is not None) or (scales[0] is None) != (
        scales[1] is None
    ):
        raise KernelError("int8 keys and values have scales of both, and no others have any.")
