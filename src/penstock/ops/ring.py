"""Attention among processes that have a part of each sequence: some rows, some keys and values.

Each rank computes some consecutive rows of a step, with all weights. Keys and values are kept by
position: span s of a sequence, positions 256·s to 256·s + 255, is that of rank s % R of R ranks. A
block of the cache is 256·R tokens, of which each rank has its own 256, so that one table of blocks
is everybody's: span s lies in the block that entry s // R names. What is kept in a slot b·256·R + o
lies in slot b·256 + o % 256 of rank o // 256.

Attention takes spans on their own and joins them in order (`ops.attention`), so a span may be seen
where it lies. A rank that has one gives to whoever has rows what those see of it, or hands on its
keys and values: whichever is fewer bytes. Neither changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.ops.attention import SPAN, attend, gather_keys, gather_values
from penstock.ops.ranks import in_rounds, meet, place_of
from penstock.ops.registry import define_op
from penstock.ops.rotary_cache import rotary_cache


def all_rows(x: Tensor, meeting: Tensor, ends: list[int], rank: int) -> Tensor:
    """Every rank's rows, in order."""
    y = x.new_empty((ends[-1], x.shape[1]))
    row_bytes = x.shape[1] * x.element_size()
    for first, last in in_rounds(ends[-1], row_bytes, meeting):
        place = place_of(meeting, rank)[: (last - first) * row_bytes].view(x.dtype)
        some = place.view(last - first, x.shape[1])
        a, b = max(ends[rank], first), min(ends[rank + 1], last)
        if a < b:
            some[a - first : b - first] = x[a - ends[rank] : b - ends[rank]]
        meet(meeting, rank, len(ends) - 1)
        y[first:last] = some
    return y


def _fake(
    qkv: Tensor,
    heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    interleaved: bool,
    all_positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    copies: Tensor | None,
    meeting: Tensor,
    rows: Tensor,
    rank: int,
    ranks: int,
    bases: Tensor | None = None,
) -> Tensor:
    whole = qkv.shape[1] // (heads + 2 * key_cache.shape[1])
    return qkv.new_empty((qkv.shape[0], heads * (whole if bases is None else bases.shape[3])))


@define_op(
    "ring_attention(Tensor qkv, int heads, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor? cos_sin, bool interleaved, Tensor all_positions, Tensor slots, "
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!)? key_scale, "
    "Tensor(d!)? value_scale, Tensor query_start, Tensor context_len, Tensor block_table, "
    "float scale, int window, float softcap, Tensor? sinks, Tensor? copies, "
    "Tensor(e!) meeting, Tensor rows, int rank, int ranks, Tensor? bases=None) -> Tensor",
    fake=_fake,
)
def ring_attention(
    qkv: Tensor,
    heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    interleaved: bool,
    all_positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    copies: Tensor | None,
    meeting: Tensor,
    rows: Tensor,
    rank: int,
    ranks: int,
    bases: Tensor | None = None,
) -> Tensor:
    """`rotary_cache` and `paged_attention` of rows, keys and values that ranks share.

    qkv [T_r, (H + 2·Hkv) · D], or as `bases` have it: this rank's rows, rows[rank]:rows[rank + 1]
    of all T; rows [R + 1] int32; caches of blocks of 256 tokens, this rank's part of them.
    `all_positions` and `slots` are of all T rows, slots in this cache and negative where another
    rank keeps the token; so are query_start, context_len, block_table and copies. The other
    arguments are those of the two operators; meeting as in `gather_columns`. All ranks call it
    together. Returns [T_r, H · D] in qkv.dtype, each row as one process computes it.
    Cost: each rank turns all T rows; beside what attention costs, it writes T_r rows, and of each
    sequence of n rows and s spans the less of n·H·(D + 2)·4 bytes and 256·Hkv·2·D·itemsize for each
    of its own spans.
    Source: Liu et al. 2023, arXiv:2310.01889 (spans that pass by); Yang et al. 2024,
    arXiv:2411.01783 (queries that do); Brandon et al. 2023, arXiv:2311.09431 (striped spans).
    Raises RuntimeError where another rank has gone, or a span has no room in the meeting.
    """
    ends = [int(end) for end in rows]
    whole = all_rows(qkv, meeting, ends, rank)
    q = rotary_cache(
        whole, heads, q_norm, k_norm, eps, cos_sin, interleaved, all_positions, slots, key_cache,
        value_cache, key_scale, value_scale, copies=copies, bases=bases,
    )  # fmt: skip
    out = q.new_empty(q.shape)
    dim, like = q.shape[2], (2, key_cache.shape[1], q.shape[2])

    def read(block: Tensor) -> Tensor:
        keys = gather_keys(key_cache, block, SPAN, dim, key_scale)
        return torch.stack((keys, gather_values(value_cache, block, SPAN, dim, value_scale)), 1)

    for b in range(len(context_len)):
        start, stop, length = int(query_start[b]), int(query_start[b + 1]), int(context_len[b])
        if start == stop:
            continue
        both = all_spans(read, like, block_table[b], length, meeting, rank, ranks)
        seen = torch.arange(length).unsqueeze(0)
        at = seen[:, length - (stop - start) :].t()
        versions = [(seen >= 0, both[:, 0], both[:, 1])]
        found = attend(q[start:stop], versions, seen, at, scale, window, softcap, sinks)
        out[start:stop] = found.to(q.dtype)
    return out[ends[rank] : ends[rank + 1]].flatten(1)


def all_spans(
    read: Callable[[Tensor], Tensor],
    like: tuple[int, ...],
    table: Tensor,
    length: int,
    meeting: Tensor,
    rank: int,
    ranks: int,
) -> Tensor:
    """[length, *like] float32 of one sequence, span after span from who has it.

    read: of a block [1] of this rank's cache, what it has [256, *like].
    """
    found = []
    size = SPAN * torch.Size(like).numel() * 4
    for span in range(-(-length // SPAN)):
        place = place_of(meeting, rank)
        if size > len(place):
            raise RuntimeError(f"a span of {size} bytes has no room in a meeting's place")
        if span % ranks == rank:
            own = read(table[span // ranks : span // ranks + 1])
            place[:size].view(torch.float32).copy_(own.flatten())
        meet(meeting, rank, ranks)
        found.append(place[:size].view(torch.float32).clone().view(SPAN, *like))
    return torch.cat(found)[:length]


def _fake_rows(
    x: Tensor, sample_at: Tensor, meeting: Tensor, rows: Tensor, rank: int, ranks: int
) -> Tensor:
    if rank == 0:
        return x.new_empty((sample_at.shape[0], x.shape[1]))
    return x.new_empty((sample_at.shape[0], 0), dtype=torch.float32)


@define_op(
    "gather_rows(Tensor x, Tensor sample_at, Tensor(a!) meeting, Tensor rows, int rank, int ranks) "
    "-> Tensor",
    fake=_fake_rows,
)
def gather_rows(
    x: Tensor, sample_at: Tensor, meeting: Tensor, rows: Tensor, rank: int, ranks: int
) -> Tensor:
    """The rows `sample_at` of all ranks' x, in the first rank; others have nothing more to do.

    x [T_r, D] float32 or bfloat16, this rank's; sample_at [S] int32, among all T; rows and meeting
    as in `ring_attention`. Returns [S, D] in rank 0, [S, 0] float32 in others.
    """
    ends = [int(end) for end in rows]
    y = _fake_rows(x, sample_at, meeting, rows, rank, ranks)
    row_bytes = x.shape[1] * x.element_size()
    for first, last in in_rounds(len(sample_at), row_bytes, meeting):
        place = place_of(meeting, rank)[: (last - first) * row_bytes].view(x.dtype)
        some, wanted = place.view(last - first, x.shape[1]), sample_at[first:last].long()
        own = ((wanted >= ends[rank]) & (wanted < ends[rank + 1])).nonzero().squeeze(1)
        some[own] = x[wanted[own] - ends[rank]]
        meet(meeting, rank, ranks)
        if rank == 0:
            y[first:last] = some
    return y
