"""Attention over a paged cache, for any mixture of chunks and single tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops import kivi, kv_int4
from penstock.ops.registry import define_op
from penstock.ops.rotary_cache import block_size

SPAN = 256
"""Positions per softmax span, counted from position 0; part of the defined order of additions."""


def gather_keys(
    key_cache: Tensor, blocks: Tensor, length: int, dim: int, scale: Tensor | None = None
) -> Tensor:
    """The first `length` keys of a sequence, [length, Hkv, D] float32."""
    if key_cache.dtype is torch.uint8:
        return _by_token(kv_int4.key_codes(key_cache[blocks.long()]), scale, blocks, length, dim)
    k = _bytes(key_cache)[blocks.long()].view(key_cache.dtype)  # [M, Hkv, P/16, D/v, 16, v]
    if k.dim() == 4:  # [M, Hkv, P, D]
        return _of_rows(k, scale, blocks, length)
    k = k.float().permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(0, 2)
    return _scaled(k, scale, blocks)[:length, :, :dim]


def gather_values(
    value_cache: Tensor, blocks: Tensor, length: int, dim: int, scale: Tensor | None = None
) -> Tensor:
    """The first `length` values of a sequence, [length, Hkv, D] float32."""
    if value_cache.dtype is torch.uint8:
        codes = kv_int4.value_codes(value_cache[blocks.long()])
        return _by_token(codes, scale, blocks, length, dim)
    v = _bytes(value_cache)[blocks.long()].view(value_cache.dtype)  # [M, Hkv, D/16, P/v, 16, v]
    if v.dim() == 4:
        return _of_rows(v, scale, blocks, length)
    v = v.float().permute(0, 3, 5, 1, 2, 4).flatten(4).flatten(0, 2)
    return _scaled(v, scale, blocks)[:length, :, :dim]


def _of_rows(x: Tensor, scale: Tensor | None, blocks: Tensor, length: int) -> Tensor:
    """x [M, Hkv, P, D] → [length, Hkv, D] float32."""
    return _scaled(x.float().transpose(1, 2).flatten(0, 1), scale, blocks)[:length]


def _bytes(cache: Tensor) -> Tensor:
    """float8 as bytes: torch can't index it."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


def _by_token(codes: Tensor, scale: Tensor | None, blocks: Tensor, length: int, dim: int) -> Tensor:
    """codes [M, Hkv, P, D] of four bits → [length, Hkv, dim]."""
    assert scale is not None
    x = kv_int4.by_token(codes, scale[blocks.long()])
    return x.transpose(1, 2).flatten(0, 1)[:length, :, :dim]


def _scaled(x: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    """x [M · P, Hkv, D] times the float16 scales [N, Hkv, P] of its blocks."""
    if scale is None:
        return x
    return x * scale[blocks.long()].float().permute(0, 2, 1).flatten(0, 1).unsqueeze(-1)


def attend(
    q: Tensor,
    versions: list[tuple[Tensor, Tensor, Tensor]],
    seen: Tensor,
    at: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    causal: bool = True,
    nearer: Tensor | None = None,
    sink_tokens: int = 0,
) -> Tensor:
    """q [n, H, D] at positions `at` [n, 1] of one sequence → [n, H, Dv] float32.

    versions: keys [length, Hkv, D] and values [length, Hkv, Dv] of the positions `seen`
    [1, length], and which queries see them so, [n, length]; where a version isn't seen it may hold
    anything. nearer [n, H, D]: what meets the first `sink_tokens` where those are further than the
    window.
    """
    count, heads, _ = q.shape
    kept = (seen < sink_tokens) & (at >= sink_tokens + window)
    scores = torch.zeros(heads, count, seen.shape[1], device=q.device)
    for mask, k, _ in versions:
        each = torch.einsum("thd,shd->hts", q.float(), _per_query_head(k, heads)) * scale
        scores = torch.where(mask, each, scores)
        if nearer is not None:
            of_sinks = _per_query_head(k[:sink_tokens], heads)
            each = torch.einsum("thd,shd->hts", nearer.float(), of_sinks) * scale
            here = kept[:, :sink_tokens]
            scores[..., :sink_tokens] = torch.where(here, each, scores[..., :sink_tokens])
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    visible = seen <= (at if causal else torch.full_like(at, seen.shape[1]))
    if window > 0:
        visible &= (seen > at - window) | (at < sink_tokens + window) | kept
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(heads, 1, 1).expand(heads, count, 1)
        weights = torch.softmax(torch.cat((scores, extra), dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    out = torch.zeros((count, heads, versions[0][2].shape[2]), device=q.device)
    for mask, _, v in versions:
        finite = _per_query_head(v, heads).masked_fill(~mask.any(0).view(-1, 1, 1), 0.0)
        out += torch.einsum("hts,shd->thd", weights * mask, finite)
    return out


def _versions(
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    recent: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    used: Tensor,
    seen: Tensor,
    at: Tensor,
    dim: int,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keys and values of the blocks `used`, and which queries see them, as `attend` takes them.

    recent: keys, values, slots and the window of recent tokens; beside one, what a cache holds is
    seen as codes or as it was written (`ops.kivi`).
    """
    (key_cache, value_cache), (key_scale, value_scale) = caches, scales
    length = seen.shape[1]
    v = gather_values(value_cache, used, length, dim, value_scale)
    recent_keys, recent_values, slots, window = recent
    if slots is None:
        return [(seen >= 0, gather_keys(key_cache, used, length, dim, key_scale), v)]
    assert key_scale is not None and window is not None
    assert recent_keys is not None and recent_values is not None
    k = kivi.coded_keys(key_cache, key_scale, used.long())[:length, :, :dim]
    place = slots[used.long()].clamp(min=0)
    recent_k = gather_keys(recent_keys, place, length, dim)
    recent_v = gather_values(recent_values, place, length, dim)
    coded = seen < (at - window).clamp(min=0) // kivi.KEY_GROUP * kivi.KEY_GROUP
    return [(coded, k, v), (~coded, recent_k, recent_v)]


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """[length, Hkv, D] → [length, H, D]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _fake(
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
    return q.new_empty((q.shape[0], q.shape[1] // (2 if sink_tokens else 1) * q.shape[2]))


@define_op(
    "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor query_start, "
    "Tensor context_len, Tensor block_table, float scale, int window=0, float softcap=0.0, "
    "Tensor? sinks=None, Tensor? key_scale=None, Tensor? value_scale=None, "
    "Tensor? recent_keys=None, Tensor? recent_values=None, Tensor? recent_slots=None, "
    "Tensor? recent_window=None, bool causal=True, int sink_tokens=0) -> Tensor",
    fake=_fake,
)
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
    """Grouped-query attention of a ragged batch over paged keys and values, causal or not.

    q [T, H, D]; caches as in `rotary_cache`; query_start [B + 1], context_len [B], block_table
    [B, M] int32 as in `Step`. Sequence b's n queries stand at its last n positions and see what is
    not after them and, with window > 0, less than `window` before. softcap > 0: scores become
    cap · tanh(s / cap). sinks [H] float32: one more score per head that takes part in the softmax
    and has no value. Without causal, queries see all that comes after them in their sequence, too.
    Returns [T, H · D] in q.dtype.

    With sink_tokens n and a window w, queries see the first n tokens of their sequence beside the
    last w. From position n + w on, where some between aren't seen, they ask those n with queries
    of their own, turned as at position n + w − 1 (`rotary_cache`'s sink_reach = n + w): no key is
    then further away than it was at the window's end. So q is [T, 2 · H, D], these behind the
    others of each token.

    The native order of additions doesn't depend on the batch, the chunk or the threads: keys are
    taken in spans of 256 counted from position 0; each span gives its maximum, its sum and its
    weighted values on its own (the weights rounded to q's dtype, dot products in the order of
    `linear`); spans are then joined in order, after what the first tokens give where queries of
    their own ask them. One-byte keys and values are widened to bfloat16,
    exactly; int8's scales multiply the scores and the weights. int4 is widened to bfloat16 as
    `ops.kv_int4` says; with a window of recent tokens, `ops.kivi` says which of them a query sees
    so and which as they were written.
    Cost: 4·H·D FLOPs and 2·Hkv·D·itemsize bytes per visible position; memory-bound in decode.
    Source: Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135;
    paging: Kwon et al. 2023, arXiv:2309.06180; sinks, learned or tokens: Xiao et al. 2023,
    arXiv:2309.17453.
    """
    nearer: Tensor | None = None
    if sink_tokens:
        q, nearer = q.chunk(2, dim=1)
    caches, scales = (key_cache, value_cache), (key_scale, value_scale)
    recent = recent_keys, recent_values, recent_slots, recent_window
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for b in range(context_len.shape[0]):
        start, stop = int(query_start[b]), int(query_start[b + 1])
        length, count = int(context_len[b]), stop - start
        if count == 0:
            continue
        used = block_table[b, : -(-length // block_size(key_cache))]
        seen = torch.arange(length, device=q.device).unsqueeze(0)
        at = seen[:, length - count :].t()
        versions = _versions(caches, scales, recent, used, seen, at, q.shape[2])
        found = attend(
            q[start:stop], versions, seen, at, scale, window, softcap, sinks, causal,
            None if nearer is None else nearer[start:stop], sink_tokens,
        )  # fmt: skip
        out[start:stop] = found.to(q.dtype)
    return out.flatten(1)
