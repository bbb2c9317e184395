"""Attention over latents (MLA): a token's key and value are one compressed row for all heads.

Of each token the cache keeps a latent c of `rank` values and a key part k of R values that is
rotated by its position, both the same for all heads. Head h would have the key (U[h]·c, k) and the
value V[h]·c. A query (q, r) of that head has with the key the product q·U[h]·c + r·k, so that q is
multiplied by U[h] once instead of every key; and V[h] multiplies the weighted sum of latents
instead of every value. Attention then is that of H query heads over one key of rank + R values
whose first `rank` are its value.

The cache [N, 1, P/16, D/v, 16, v] has the layout of keys in `ops.rotary_cache`, D = rank + R padded
to a multiple of 16, in the dtype of the rows. Matrices of heads are dense panels, the heads first:
[H, N/16, K/v, 16, v]. On a GPU nothing of this is built.

Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.attention import attend, gather_keys
from penstock.ops.linear import linear
from penstock.ops.panels import round_up, vnni_factor
from penstock.ops.registry import define_op
from penstock.ops.rotary_cache import block_size, rotate


def _fake_head_linear(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] * out_features))


def _by_head(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """x [T, H, K] → [T, H, N]."""
    heads = [
        linear(x[:, h].contiguous(), weight[h], None, None, None, out_features)
        for h in range(weight.shape[0])
    ]
    return torch.stack(heads, 1)


@define_op(
    "head_linear(Tensor x, Tensor weight, SymInt out_features) -> Tensor", fake=_fake_head_linear
)
def head_linear(x: Tensor, weight: Tensor, out_features: int) -> Tensor:
    """y[t, h] = W[h] · x[t, h]: each head's values through a matrix of its own.

    x [T, H · K], rows may be strided; weight: of x.dtype, panels of H matrices [N, K]. Returns
    [T, H · N] in x.dtype, each product as `linear` gives it.
    Cost: 2·T·H·N·K operations; the bytes of the weight; memory-bound for few tokens.
    """
    rows = x.unflatten(1, (weight.shape[0], -1))
    return _by_head(rows, weight, out_features).flatten(1)


def _fake_query(
    q: Tensor,
    key_up: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    rank: int,
    sink_reach: int = 0,
) -> Tensor:
    heads = key_up.shape[0] * (2 if sink_reach else 1)
    return q.new_empty((q.shape[0], heads, rank + cos_sin.shape[1]))


@define_op(
    "mla_query(Tensor q, Tensor key_up, Tensor cos_sin, bool interleaved, Tensor positions, "
    "SymInt rank, int sink_reach=0) -> Tensor",
    fake=_fake_query,
)
def mla_query(
    q: Tensor,
    key_up: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    rank: int,
    sink_reach: int = 0,
) -> Tensor:
    """Queries for latents: (q, r) of each head become (q · U, r rotated).

    q [T, H · (K + R)], rows may be strided; key_up: panels of Uᵀ [rank, K] of each head; cos_sin
    [P, R] and interleaved as in `rotary_cache`; positions [T] int32. Returns [T, H, rank + R] in
    q.dtype; with a sink_reach [T, 2·H, rank + R], as `rotary_cache` does.
    Cost: as `head_linear`.
    """
    turning = cos_sin.shape[1]
    heads = q.unflatten(1, (key_up.shape[0], -1))
    plain = _by_head(heads[..., :-turning], key_up, rank)
    tails = heads[..., -turning:].float()
    turned = rotate(tails, cos_sin, positions, interleaved)
    found = torch.cat((plain, turned.to(q.dtype)), -1)
    if not sink_reach:
        return found
    turned = rotate(tails, cos_sin, positions.clamp(max=sink_reach - 1), interleaved)
    return torch.cat((found, torch.cat((plain, turned.to(q.dtype)), -1)), 1)


def _fake_cache(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    copies: Tensor | None = None,
) -> None:
    return None


@define_op(
    "mla_cache(Tensor kv, Tensor norm, float eps, Tensor cos_sin, bool interleaved, "
    "Tensor positions, Tensor slots, Tensor(a!) cache, *, Tensor? copies=None) -> ()",
    fake=_fake_cache,
)
def mla_cache(
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    *,
    copies: Tensor | None = None,
) -> None:
    """Normalise latents, rotate the key part behind them, write both into their slots.

    kv [T, rank + R], rows may be strided; norm [rank] float32, of the root-mean-square norm;
    cos_sin [P, R], interleaved, positions, slots and copies as in `rotary_cache`.
    """
    turning = cos_sin.shape[1]
    x = kv.float()
    latent, key = x[:, :-turning], x[:, -turning:]
    latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + eps) * norm
    turned = rotate(key.unsqueeze(1), cos_sin, positions, interleaved).squeeze(1)
    rows = torch.cat((latent, turned), -1).to(cache.dtype)
    _write(rows, slots, cache)
    if copies is not None:
        _write(rows[copies[:, 0].long()], copies[:, 1], cache)


def _write(rows: Tensor, slots: Tensor, cache: Tensor) -> None:
    kept = slots >= 0
    at, v = slots[kept].long(), vnni_factor(cache.dtype)
    padded = round_up(rows.shape[1], 16)
    whole = torch.nn.functional.pad(rows[kept], (0, padded - rows.shape[1])).unflatten(1, (-1, v))
    block, offset = at // block_size(cache), at % block_size(cache)
    cache[block, 0, offset // 16, :, offset % 16] = whole


def _fake_attention(
    q: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    rank: int,
    window: int = 0,
    sink_tokens: int = 0,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] // (2 if sink_tokens else 1) * rank))


@define_op(
    "mla_attention(Tensor q, Tensor cache, Tensor query_start, Tensor context_len, "
    "Tensor block_table, float scale, int rank, int window=0, int sink_tokens=0) -> Tensor",
    fake=_fake_attention,
)
def mla_attention(
    q: Tensor,
    cache: Tensor,
    query_start: Tensor,
    context_len: Tensor,
    block_table: Tensor,
    scale: float,
    rank: int,
    window: int = 0,
    sink_tokens: int = 0,
) -> Tensor:
    """Causal attention of a ragged batch over latents: `paged_attention` of one key head.

    q [T, H, D] of D = rank + R as `mla_query` gives it; query_start, context_len and block_table as
    in `Step`; window and sink_tokens, beside which q is [T, 2·H, D], as in `paged_attention`.
    Returns the weighted sums of latents, [T, H · rank] in q.dtype. The order of additions is
    `paged_attention`'s.
    Cost: 2·H·(D + rank) FLOPs and D·itemsize bytes per visible position.
    """
    nearer: Tensor | None = None
    if sink_tokens:
        q, nearer = q.chunk(2, dim=1)
    out = q.new_empty((q.shape[0], q.shape[1], rank))
    for b in range(context_len.shape[0]):
        start, stop = int(query_start[b]), int(query_start[b + 1])
        length, count = int(context_len[b]), stop - start
        if count == 0:
            continue
        used = block_table[b, : -(-length // block_size(cache))]
        k = gather_keys(cache, used, length, q.shape[2])
        seen = torch.arange(length, device=q.device).unsqueeze(0)
        at = seen[:, length - count :].t()
        versions = [(seen >= 0, k, k[..., :rank])]
        own = None if nearer is None else nearer[start:stop]
        found = attend(
            q[start:stop], versions, seen, at, scale, window, 0.0, None, True, own, sink_tokens
        )
        out[start:stop] = found.to(q.dtype)
    return out.flatten(1)
