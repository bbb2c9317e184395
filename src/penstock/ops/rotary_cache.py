"""Everything between the QKV projection and attention, in one pass over the rows.

The caches hold panels (`ops.panels`), so that attention reads both as weights. N blocks of P
tokens:
    key_cache   [N, Hkv, P/16, D/v, 16, v]    columns are positions, k runs over D
    value_cache [N, Hkv, D/16, P/v, 16, v]    columns are dimensions, k runs over positions
D is padded to a multiple of 16 in both. They are of qkv's dtype; or, beside bfloat16, of one
byte (with bfloat16's v): float8_e4m3fn, rounded to nearest and never beyond ±448; or int8 in
±127 with key_scale and value_scale [N, Hkv, P] float16, max|x| / 127 of each token and head.
Or uint8, two int4 codes a byte (`ops.kv_int4`), both of one token:
    key_cache   [N, Hkv, P/16, D/2, 16, 1]    low and high half: dimensions 2i and 2i + 1
    value_cache [N, Hkv, D/16, P/2, 2, 8]     positions 2i and 2i + 1; columns c and c + 8
with scales [N, Hkv, G, 2, P] float16: step and minimum of each group of 32 dimensions. Beside
a window of recent tokens, keys are coded by channel instead: `ops.kivi`.

A GPU has both as [N, Hkv, P, D], with the same dtypes and scales but for int4 (`ops.rows`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops import kivi, kv_int4
from penstock.ops.panels import COLUMNS
from penstock.ops.registry import define_op


def block_size(key_cache: Tensor) -> int:
    """P: tokens in a block of keys, in panels or in rows."""
    return key_cache.shape[2] * (1 if key_cache.dim() == 4 else COLUMNS)


def _norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [T, H, D] float32, over each head or, with a weight of H · D, all of them together; by its
    weights where they aren't for rotated heads.
    """
    if weight is None:
        return x
    over = x if weight.numel() == x.shape[-1] else x.flatten(1)
    over = over * torch.rsqrt(over.pow(2).mean(-1, keepdim=True) + eps)
    return (over if weight.dim() == 2 else over * weight).view(x.shape)


def _weighed(x: Tensor, weight: Tensor | None) -> Tensor:
    """Rotated heads x [T, H, D] by the weights [1, D] that are for them."""
    return x if weight is None or weight.dim() == 1 else x * weight


def rotate(x: Tensor, cos_sin: Tensor | None, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first R dimensions of each head; x [T, H, D] float32, cos_sin [P, R]."""
    if cos_sin is None:
        return x
    r = cos_sin.shape[1]
    cos, sin = cos_sin[positions.long()].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R/2]
    if interleaved:
        a, b = x[..., :r:2], x[..., 1:r:2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = x[..., : r // 2], x[..., r // 2 : r]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, x[..., r:]), dim=-1)


def in_basis(x: Tensor, bases: Tensor | None, side: int) -> Tensor:
    """Heads x [T, H, D] float32 in the bases of their groups, [T, H, R]; side: 1 of keys."""
    if bases is None:
        return x
    groups = x.unflatten(1, (bases.shape[1], -1))
    return torch.einsum("tghd,gdr->tghr", groups, bases[side]).flatten(1, 2)


def stored(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, block: Tensor, offset: Tensor
) -> Tensor:
    """x [T, Hkv, D] as the cache holds it; its scales are written to `scale`."""
    if dtype is torch.float8_e4m3fn:
        return x.clamp(-448, 448).to(dtype).view(torch.uint8)
    if scale is None:
        return x.to(dtype)
    xf = x.float()
    half = (xf.abs().amax(-1) / 127.0).clamp(min=2.0**-24).to(torch.float16)
    scale[block, :, offset] = half
    return torch.round(xf / half.float().unsqueeze(-1)).clamp(-127, 127).to(dtype)


def _fake(
    qkv: Tensor,
    heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    interleaved: bool,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    recent_keys: Tensor | None = None,
    recent_values: Tensor | None = None,
    recent_slots: Tensor | None = None,
    recent_window: Tensor | None = None,
    *,
    copies: Tensor | None = None,
    sink_reach: int = 0,
    bases: Tensor | None = None,
    norm_values: bool = False,
    parts: int = 3,
) -> Tensor:
    whole = qkv.shape[1] // (heads + (parts - 1) * key_cache.shape[1])
    dim = whole if bases is None else bases.shape[3]
    return qkv.new_empty((qkv.shape[0], heads * (2 if sink_reach else 1), dim))


@define_op(
    "rotary_cache(Tensor qkv, int heads, Tensor? q_norm, Tensor? k_norm, float eps, "
    "Tensor? cos_sin, bool interleaved, Tensor positions, Tensor slots, "
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!)? key_scale=None, "
    "Tensor(d!)? value_scale=None, Tensor(e!)? recent_keys=None, Tensor(f!)? recent_values=None, "
    "Tensor? recent_slots=None, Tensor? recent_window=None, *, "
    "Tensor? copies=None, int sink_reach=0, Tensor? bases=None, bool norm_values=False, "
    "int parts=3) -> Tensor",
    fake=_fake,
)
def rotary_cache(
    qkv: Tensor,
    heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    interleaved: bool,
    positions: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    recent_keys: Tensor | None = None,
    recent_values: Tensor | None = None,
    recent_slots: Tensor | None = None,
    recent_window: Tensor | None = None,
    *,
    copies: Tensor | None = None,
    sink_reach: int = 0,
    bases: Tensor | None = None,
    norm_values: bool = False,
    parts: int = 3,
) -> Tensor:
    """Normalise the heads of q and k, rotate them, write k and v into their slots; returns q.

    qkv [T, (H + 2·Hkv) · D]: the heads of q, of k, of v, one projection; rows may be strided;
    q_norm, k_norm float32: [D] to normalise each head, [H · D] and [Hkv · D] all of them together,
    [1, D] each head with weights that multiply it once it is rotated, or None; cos_sin [P, R]
    float32, cosines then sines of the R/2 angles of each position, or None for no rotation;
    interleaved: pairs (2i, 2i+1) instead of (i, i+R/2); positions, slots [T] int32; a negative
    slot isn't written; caches and scales as above;
    copies [C, 2] int32: (t, slot), where token t's k and v go too. Returns [T, H, D]; with a
    sink_reach [T, 2·H, D], behind the heads of each token the same, turned as at position
    min(p, sink_reach − 1): what `paged_attention` asks the first tokens of a sequence with.

    bases [2, Hkv, D, R] float32, R a multiple of 16 up to D: queries q and keys k of a group are,
    once rotated, bases[0]ᵀ·q and bases[1]ᵀ·k of R dimensions, in float32, D in order. Heads of v
    have R too, so that qkv is [T, (H + Hkv) · D + Hkv · R], and so have the caches and what is
    returned.

    norm_values: heads of v are normalised, without weights. parts: 3; 2 where qkv has no v, which
    is k before its norm and rotation; 1 where it has q alone: nothing is written.
    Source: Su et al. 2021, arXiv:2104.09864; FP8: Micikevicius et al. 2022, arXiv:2209.05433.
    """
    dtype, kv_heads = qkv.dtype, key_cache.shape[1]
    dim = qkv.shape[1] // (heads + (parts - 1) * kv_heads) if bases is None else bases.shape[2]
    sizes = (heads * dim, *[kv_heads * dim] * (parts - 1))[:2]
    q, *written = qkv.split((*sizes, qkv.shape[1] - sum(sizes)), dim=1)
    q = _norm(q.unflatten(1, (heads, dim)).float(), q_norm, eps)
    turned = _weighed(rotate(q, cos_sin, positions, interleaved), q_norm)
    q_out = in_basis(turned, bases, 0).to(dtype)
    if sink_reach:
        nearer = rotate(q, cos_sin, positions.clamp(max=sink_reach - 1), interleaved)
        nearer = _weighed(nearer, q_norm)
        q_out = torch.cat((q_out, in_basis(nearer, bases, 0).to(dtype)), dim=1)
    if parts == 1:
        return q_out
    k, v = written[0], written[parts - 2]
    v = v.unflatten(1, (kv_heads, -1))
    if norm_values:
        v = _norm(v.float(), v.new_ones(v.shape[-1], dtype=torch.float32), eps).to(dtype)
    k = _norm(k.unflatten(1, (kv_heads, dim)).float(), k_norm, eps)
    turned = _weighed(rotate(k, cos_sin, positions, interleaved), k_norm)
    k_out = in_basis(turned, bases, 1).to(dtype)

    if copies is not None:
        again, more = copies.long().unbind(1)
        k_out, v = torch.cat((k_out, k_out[again])), torch.cat((v, v[again]))
        slots = torch.cat((slots.long(), more))
    keep = slots >= 0
    if key_cache.dtype is torch.uint8:
        assert key_scale is not None and value_scale is not None
        recent = recent_keys, recent_values, recent_slots
        caches, scales = (key_cache, value_cache), (key_scale, value_scale)
        _write_int4(k_out[keep], v[keep].to(dtype), slots[keep], caches, scales, recent)
        return q_out
    _write(k_out[keep], v[keep], slots[keep], key_cache, value_cache, key_scale, value_scale)
    return q_out


def _write(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> None:
    """Keys and values [T, Hkv, D] into their slots, as they are or in a byte each."""
    size = block_size(key_cache)
    block, offset = slots.long() // size, slots.long() % size
    if key_cache.dim() == 4:
        for cache, x, scale in ((key_cache, k, key_scale), (value_cache, v, value_scale)):
            held = cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache
            held[block, :, offset] = stored(x, cache.dtype, scale, block, offset)
        return
    factor = key_cache.shape[-1]
    more = (0, key_cache.shape[3] * factor - k.shape[-1])
    k = functional.pad(stored(k, key_cache.dtype, key_scale, block, offset), more)
    v = functional.pad(stored(v, value_cache.dtype, value_scale, block, offset), more)
    if key_cache.dtype is torch.float8_e4m3fn:  # as bytes: torch can't index it
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    key_cache[block, :, offset // COLUMNS, :, offset % COLUMNS] = k.unflatten(-1, (-1, factor))
    value_cache[block, :, :, offset // factor, :, offset % factor] = v.unflatten(-1, (-1, COLUMNS))


def _write_int4(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    caches: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    recent: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """The same in four bits, and beside a window (`ops.kivi`) in bfloat16 too."""
    (key_cache, value_cache), (key_scale, value_scale) = caches, scales
    recent_keys, recent_values, recent_slots = recent
    size, padded = block_size(key_cache), value_cache.shape[2] * COLUMNS
    block, offset = slots.long() // size, slots.long() % size
    if recent_slots is not None:
        assert recent_keys is not None and recent_values is not None
        place, more = recent_slots[block].long(), (0, padded - k.shape[-1])
        kivi.put_recent(recent_keys, functional.pad(k, more), place, offset, keys=True)
        kivi.put_recent(recent_values, functional.pad(v, more), place, offset, keys=False)
        kivi.round_keys(key_cache, key_scale, recent_keys, recent_slots, slots)
    else:
        codes, steps = kv_int4.token_codes(k.float(), padded)
        key_scale[block, :, :, :, offset] = steps
        kv_int4.put_keys(key_cache, codes, block, offset)
    codes, steps = kv_int4.token_codes(v.float(), padded)
    value_scale[block, :, :, :, offset] = steps
    kv_int4.put_values(value_cache, codes, block, offset)
