"""Attention over latents among processes that have a part of each sequence: `ops.ring`, `ops.mla`.

A latent is one row for all heads, so that its spans pass by cheaply: they do so for any rows, and
queries stay with the rank that computes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention import SPAN, attend, gather_keys
from penstock.ops.mla import mla_cache
from penstock.ops.registry import define_op
from penstock.ops.ring import all_rows, all_spans


def _fake_cache(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    all_positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    copies: Tensor | None,
    meeting: Tensor,
    rows: Tensor,
    rank: int,
    ranks: int,
) -> None:
    return None


@define_op(
    "ring_mla_cache(Tensor kv, Tensor norm, float eps, Tensor cos_sin, bool interleaved, "
    "Tensor all_positions, Tensor slots, Tensor(a!) cache, Tensor? copies, Tensor(b!) meeting, "
    "Tensor rows, int rank, int ranks) -> ()",
    fake=_fake_cache,
)
def ring_mla_cache(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    all_positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    copies: Tensor | None,
    meeting: Tensor,
    rows: Tensor,
    rank: int,
    ranks: int,
) -> None:
    """`mla_cache` of all ranks' rows: each keeps those of its own spans.

    kv [T_r, rank + R], this rank's rows; all_positions, slots, copies, meeting and rows as in
    `ring_attention`; the others as in `mla_cache`.
    """
    whole = all_rows(kv, meeting, [int(end) for end in rows], rank)
    mla_cache(
        whole, norm, eps, cos_sin, interleaved, all_positions, slots, cache, copies=copies
    )  # fmt: skip


def _fake_attention(
    q: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    latent_rank: int,
    window: int,
    meeting: Tensor,
    rows: Tensor,
    rank: int,
    ranks: int,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * latent_rank))


@define_op(
    "ring_mla_attention(Tensor q, Tensor cache, Tensor query_start, Tensor context_len, "
    "Tensor block_table, float scale, int latent_rank, int window, Tensor(a!) meeting, "
    "Tensor rows, int rank, int ranks) -> Tensor",
    fake=_fake_attention,
)
def ring_mla_attention(
    q: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    latent_rank: int,
    window: int,
    meeting: Tensor,
    rows: Tensor,
    rank: int,
    ranks: int,
) -> Tensor:
    """`mla_attention` of this rank's rows over latents that ranks share.

    q [T_r, H, D], this rank's rows; cache: its part, as `ring_mla_cache` writes it; latent_rank:
    `mla_attention`'s rank; meeting and rows as in `ring_attention`, the others as in
    `mla_attention`, of all T rows. Returns [T_r, H · latent_rank] in q.dtype, each row as one
    process computes it.
    Cost: each rank writes 256·D·itemsize bytes of each of its own spans.
    """
    ends = [int(end) for end in rows]
    out = q.new_empty((q.shape[0], q.shape[1], latent_rank))
    dim = q.shape[2]
    for b in range(len(context_len)):
        start, stop, length = int(query_start[b]), int(query_start[b + 1]), int(context_len[b])
        if start == stop:
            continue
        k = all_spans(
            lambda block: gather_keys(cache, block, SPAN, dim),
            (1, dim), block_table[b], length, meeting, rank, ranks,
        )  # fmt: skip
        first, last = max(start, ends[rank]), min(stop, ends[rank + 1])
        if first >= last:
            continue
        seen = torch.arange(length).unsqueeze(0)
        at = seen[:, length - (stop - first) : length - (stop - last)].t()
        own = slice(first - ends[rank], last - ends[rank])
        versions = [(seen >= 0, k, k[..., :latent_rank])]
        out[own] = attend(q[own], versions, seen, at, scale, window, 0.0, None).to(q.dtype)
    return out.flatten(1)
