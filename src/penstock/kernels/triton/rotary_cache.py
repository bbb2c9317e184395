"""Norm and rotation of queries and keys, and the writing of keys and values, in one launch.

A program takes a token and some heads of its queries, keys or values: as many as fill a tile, or
all of them where one norm is over all. A head is held as pairs that are turned together, two tiles
of R/2, and the dimensions beyond R, which aren't. Products aren't fused with sums, so that what is
rounded to codes has the reference's bits whenever the sum of a norm has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.triton.launch import cdiv, early, implement, power_of_2, take_turn
from penstock.kernels.triton.norm import whole_vectors
from penstock.kernels.triton.rounding import is_number, magnitude, round_even

_TILE = 1024
"""Elements of a tile, but where a norm is over all heads."""
_LEAST_HALF: tl.constexpr = tl.constexpr(2.0**-24)
"""The smallest float16 above zero."""


@triton.jit
def _load(
    at,
    here,
    dim: tl.constexpr,
    turned: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Of heads that begin `at` [HEADS, 1]: both values of each pair, and the rest; in float32."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.load(at + i, mask=here & (i < turned), other=0.0)
        first, second = tl.split(tl.reshape(pairs, (at.shape[0], HALF, 2)))
    else:
        i = tl.arange(0, HALF)[None, :]
        inside = here & (i < turned // 2)
        first = tl.load(at + i, mask=inside, other=0.0)
        second = tl.load(at + turned // 2 + i, mask=inside, other=0.0)
    if turned < dim:
        j = turned + tl.arange(0, REST)[None, :]
        rest = tl.load(at + j, mask=here & (j < dim), other=0.0).to(tl.float32)
    else:
        rest = tl.zeros((at.shape[0], REST), tl.float32)
    return first.to(tl.float32), second.to(tl.float32), rest


@triton.jit
def _store(
    at,
    here,
    first,
    second,
    rest,
    dim: tl.constexpr,
    turned: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Put together what `_load` takes apart."""
    if INTERLEAVED:
        i = tl.arange(0, 2 * HALF)[None, :]
        pairs = tl.reshape(tl.join(first, second), (at.shape[0], 2 * HALF))
        tl.store(at + i, pairs, mask=here & (i < turned))
    else:
        i = tl.arange(0, HALF)[None, :]
        inside = here & (i < turned // 2)
        tl.store(at + i, first, mask=inside)
        tl.store(at + turned // 2 + i, second, mask=inside)
    if turned < dim:
        j = turned + tl.arange(0, REST)[None, :]
        tl.store(at + j, rest, mask=here & (j < dim))


@triton.jit
def _normed(
    parts,
    norm,
    here,
    eps,
    count,
    dim: tl.constexpr,
    turned: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    OVER_ALL: tl.constexpr,
    WEIGHS: tl.constexpr,
):
    """Each head, or `count` of them together, by their root mean square and, where it WEIGHS, their
    norms' weights.

    Where it isn't `here`, those are zero.
    """
    first, second, rest = parts
    if OVER_ALL:
        square = tl.sum(first * first) + tl.sum(second * second) + tl.sum(rest * rest)
        by = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, count * dim * 1.0) + eps))
    else:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        by = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, dim * 1.0) + eps))[:, None]
    if not WEIGHS:
        return first * by, second * by, rest * by
    w_first, w_second, w_rest = _load(norm, here, dim, turned, INTERLEAVED, HALF, REST)
    return first * by * w_first, second * by * w_second, rest * by * w_rest


@triton.jit
def _weighed(
    parts,
    q_norm,
    k_norm,
    is_query,
    is_value,
    head,
    here,
    dim: tl.constexpr,
    turned: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    WEIGHS_TURNED: tl.constexpr,
):
    """Rotated heads of queries and keys by their norms' weights, where those are for them."""
    first, second, rest = parts
    if WEIGHS_TURNED:
        norm, weighs = tl.where(is_query, q_norm, k_norm) + head * 0, here & (is_value == 0)
        a, b, c = _load(norm, weighs, dim, turned, INTERLEAVED, HALF, REST)
        first, second = tl.where(weighs, first * a, first), tl.where(weighs, second * b, second)
        rest = tl.where(weighs, rest * c, rest)
    return first, second, rest


@triton.jit
def _stored(x, scale, dtype: tl.constexpr):
    """x as a cache of `dtype` holds it."""
    if dtype == tl.int8:
        q = tl.div_rn(x, scale)
        q = tl.where(is_number(q), tl.minimum(tl.maximum(q, -127.0), 127.0), 0.0)
        return round_even(q).to(tl.int8)
    if dtype == tl.float8e4nv:
        return tl.where(is_number(x), tl.minimum(tl.maximum(x, -448.0), 448.0), x).to(tl.float8e4nv)
    return x.to(dtype)


@triton.jit
def _scale(first, second, rest):
    """max|x| / 127 of each head, in float16; NaN where one of x is."""
    top = tl.maximum(tl.max(magnitude(first), 1), tl.max(magnitude(second), 1))
    top = tl.maximum(top, tl.max(magnitude(rest), 1)).to(tl.float32, bitcast=True)
    step = tl.div_rn(top, 127.0)
    step = tl.where(is_number(step), tl.maximum(step, _LEAST_HALF), step)
    return step[:, None].to(tl.float16)


@triton.jit
def _write(
    cache,
    scales,
    place,
    here,
    parts,
    dim: tl.constexpr,
    turned: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    """Heads, in float32, to their places [HEADS, 1] in a cache, with their scales where int8."""
    held: tl.constexpr = cache.dtype.element_ty
    first, second, rest = parts
    step = tl.zeros(place.shape, tl.float32)
    if held == tl.int8:
        half = _scale(first, second, rest)
        tl.store(scales + place, half, mask=here)
        step = half.to(tl.float32)
    first, second = _stored(first, step, held), _stored(second, step, held)
    rest = _stored(rest, step, held)
    at = cache + place * dim
    _store(at, here, first, second, rest, dim, turned, INTERLEAVED, HALF, REST)


@triton.jit
def _turned_as(position, nearer, reach: tl.constexpr):
    """The position by which a program's heads turn."""
    if reach > 0:
        position = tl.where(nearer, tl.minimum(position, reach - 1), position)
    return position


@triton.jit
def _part(tile, q_tiles: tl.constexpr, kv_tiles: tl.constexpr):
    """Of a program's tile: which of its kind, and whether it is of queries, of values, of queries
    again, turned as at a position that isn't beyond reach."""
    nearer = tile >= q_tiles + 2 * kv_tiles
    tile = tl.where(nearer, tile - (q_tiles + 2 * kv_tiles), tile)
    is_query = nearer | (tile < q_tiles)
    is_value = (is_query == 0) & (tile >= q_tiles + kv_tiles)
    return tl.where(is_query, tile, (tile - q_tiles) % kv_tiles), is_query, is_value, nearer


@triton.jit(do_not_specialize=["stride", "tokens"])
def _rotary_cache(
    qkv,
    q_norm,
    k_norm,
    cos_sin,
    positions,
    slots,
    copies,
    key_cache,
    value_cache,
    key_scale,
    value_scale,
    y,
    stride,
    cos_stride,
    tokens,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    turned: tl.constexpr,
    page: tl.constexpr,
    reach: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    OVER_ALL: tl.constexpr,
    WEIGHS_TURNED: tl.constexpr,
    ROTATES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_COPIES: tl.constexpr,
    VECTOR: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    take_turn()
    token, tile = tl.program_id(0), tl.program_id(1)
    again = token >= tokens  # behind the tokens come the copies
    if HAS_COPIES:
        pair = copies + 2 * tl.where(again, token - tokens, 0)
        slot = tl.load(tl.where(again, pair + 1, slots + tl.where(again, 0, token)))
        token = tl.where(again, tl.load(pair), token)
    else:
        slot = tl.load(slots + token)

    q_tiles: tl.constexpr = (heads + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (kv_heads + HEADS - 1) // HEADS
    tile, is_query, is_value, nearer = _part(tile, q_tiles, kv_tiles)
    is_key = (is_query | is_value) == 0
    count = tl.where(is_query, heads, kv_heads)
    before = tl.where(is_query, 0, tl.where(is_value, heads + kv_heads, heads))
    head = tile * HEADS + tl.arange(0, HEADS)[:, None]
    here = (head < count) & tl.where(is_query, again == 0, slot >= 0)
    start = tl.multiple_of(token.to(tl.int64) * stride, VECTOR)
    x = qkv + start + (before + head) * dim
    first, second, rest = _load(x, here, dim, turned, INTERLEAVED, HALF, REST)

    if Q_NORM or K_NORM:
        normed = (is_query & Q_NORM) | (is_key & K_NORM)
        norm = tl.where(is_query, q_norm, k_norm) + (head if OVER_ALL else head * 0) * dim
        a, b, c = _normed(
            (first, second, rest),
            norm,
            here & normed,
            eps,
            count,
            dim,
            turned,
            INTERLEAVED,
            HALF,
            REST,
            OVER_ALL,
            not WEIGHS_TURNED,
        )
        first, second = tl.where(normed, a, first), tl.where(normed, b, second)
        rest = tl.where(normed, c, rest)
    if ROTATES:
        i = head * 0 + tl.arange(0, HALF)[None, :]  # a thread loads those of its own pairs
        position = _turned_as(tl.load(positions + token), nearer, reach)
        angles = cos_sin + position.to(tl.int64) * cos_stride + i
        cos = tl.load(angles, mask=i < turned // 2, other=0.0).to(tl.float32)
        sin = tl.load(angles + turned // 2, mask=i < turned // 2, other=0.0).to(tl.float32)
        left, right = first * cos - second * sin, second * cos + first * sin
        first, second = tl.where(is_value, first, left), tl.where(is_value, second, right)
    first, second, rest = _weighed(
        (first, second, rest),
        q_norm,
        k_norm,
        is_query,
        is_value,
        head,
        here,
        dim,
        turned,
        INTERLEAVED,
        HALF,
        REST,
        WEIGHS_TURNED,
    )

    own: tl.constexpr = qkv.dtype.element_ty
    first, second, rest = first.to(own), second.to(own), rest.to(own)
    if is_query:
        times: tl.constexpr = 2 if reach > 0 else 1
        row = token.to(tl.int64) * heads * times + tl.where(nearer, heads, 0)
        out = y + (row + head) * dim
        _store(out, here, first, second, rest, dim, turned, INTERLEAVED, HALF, REST)
    else:
        cache = tl.where(is_value, value_cache, key_cache)
        scales = cache
        if key_cache.dtype.element_ty == tl.int8:
            scales = tl.where(is_value, value_scale, key_scale)
        place = ((slot // page).to(tl.int64) * kv_heads + head) * page + slot % page
        parts = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
        _write(cache, scales, place, here, parts, dim, turned, INTERLEAVED, HALF, REST)


def _check(caches: tuple[Tensor | None, ...]) -> None:
    for each in caches:
        if each is not None and (each.dtype is torch.uint8 or not each.is_contiguous()):
            raise KernelError(
                f"rotary_cache writes rows [blocks, heads, tokens, dim] of floats, float8 or int8, "
                f"contiguous; this cache is {each.dtype} {list(each.shape)} with strides "
                f"{list(each.stride())}. Allocate it with PagedRows, not in int4."
            )


def _over_all(
    q_norm: Tensor | None, k_norm: Tensor | None, heads: int, kv_heads: int, dim: int
) -> bool:
    """Whether norms are over all heads together."""
    both = (q_norm, heads), (k_norm, kv_heads)
    found = [(norm.numel(), count * dim) for norm, count in both if norm is not None]
    if all(size == dim for size, _ in found):
        return False
    if all(size == whole for size, whole in found):
        return True
    raise KernelError(
        f"Norms of queries and keys are over each head, {dim} values, or over all of them, "
        f"{heads * dim} and {kv_heads * dim}; these have {[size for size, _ in found]}."
    )


@implement("rotary_cache")
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
) -> Tensor:
    """`ops.rotary_cache` of caches in rows: queries, keys, values and copies in one launch.

    Moves the bytes of qkv once; what is copied is computed again, to the same bits.
    """
    _check((key_cache, value_cache, key_scale, value_scale))
    kv_heads, page = key_cache.shape[1:3]
    tokens, dim = qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads)
    times = 2 if sink_reach else 1
    y = torch.empty((tokens, heads * times, dim), dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return y
    qkv, vector = whole_vectors(qkv)
    turned = dim // 2 * 2 if cos_sin is None else cos_sin.shape[1]
    over_all = _over_all(q_norm, k_norm, heads, kv_heads, dim)
    half, wide = power_of_2(turned // 2, 1), power_of_2(dim)
    count = power_of_2(max(heads, kv_heads), 1)  # heads of a tile
    if not over_all:
        count = min(count, max(_TILE // wide, 1))
    tiles = times * cdiv(heads, count) + 2 * cdiv(kv_heads, count)
    more = 0 if copies is None else copies.shape[0]
    _rotary_cache[(tokens + more, tiles)](
        qkv,
        k_norm if q_norm is None else q_norm,
        q_norm if k_norm is None else k_norm,
        cos_sin,
        positions.contiguous(),
        slots.contiguous(),
        copies.contiguous() if copies is not None and more else None,
        key_cache,
        value_cache,
        key_scale,
        value_scale,
        y,
        qkv.stride(0),
        0 if cos_sin is None else cos_sin.stride(0),
        tokens,
        eps,
        heads,
        kv_heads,
        dim,
        turned,
        page,
        sink_reach,
        Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        OVER_ALL=over_all,
        WEIGHS_TURNED=q_norm is not None and q_norm.dim() == 2,
        ROTATES=cos_sin is not None,
        INTERLEAVED=interleaved,
        HAS_COPIES=more > 0,
        VECTOR=vector,
        HEADS=count,
        HALF=half,
        REST=power_of_2(dim - turned, 1),
        num_warps=min(max(count * wide // 512, 1), 16),
        enable_fp_fusion=False,
        **early(tokens),
    )
    return y
