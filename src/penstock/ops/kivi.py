"""KIVI's cache: keys in int4 by channel, values in int4 by token, the latest tokens in bfloat16.

The keys of 32 positions, counted from position 0, share a step and a minimum in each dimension; a
value has them for each 32 of its dimensions. What a query at position p sees is decided by
positions alone: codes before `recent_from(p)`, what was written from there on. So it sees between
`window` + 1 and `window` + 32 tokens as they are, itself included, in any chunks and any batch.

The latest tokens lie in blocks of their own, as many as can be in some window at a time;
`recent_slots` has the place of each of the cache's blocks among them, or −1. Blocks of P tokens:
    recent_keys    [R, Hkv, P/16, D/2, 16, 2] bfloat16, `ops.rotary_cache`'s panels
    recent_values  [R, Hkv, D/16, P/2, 16, 2]
    recent_slots   [N] int32
    recent_window  [1] int32, tokens
and key_scale is [N, Hkv, P/32, 2, D] float16. A value's codes are written with it; those of a group
of keys with its last key, which is before any query may see them.
Source: Liu et al. 2024, arXiv:2402.02750. It quantizes a group when the window has moved by a whole
one too, but counts from the end of the prompt; counting from position 0 makes chunks alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops import kv_int4
from penstock.ops.panels import COLUMNS

KEY_GROUP = 32
"""Positions whose keys share a step and a minimum in each dimension."""


def recent_from(position: int, window: int) -> int:
    """The first token that a query at `position` sees as it was written."""
    return max(position - window, 0) // KEY_GROUP * KEY_GROUP


def put_recent(cache: Tensor, x: Tensor, place: Tensor, offset: Tensor, *, keys: bool) -> None:
    """Write x [T, Hkv, D] bfloat16 into blocks `place` of recent keys or values."""
    if keys:
        cache[place, :, offset // COLUMNS, :, offset % COLUMNS] = x.unflatten(-1, (-1, 2))
    else:
        cache[place, :, :, offset // 2, :, offset % 2] = x.unflatten(-1, (-1, COLUMNS))


def round_keys(
    key_cache: Tensor, key_scale: Tensor, recent_keys: Tensor, recent_slots: Tensor, slots: Tensor
) -> None:
    """Codes of the groups of keys that end with one of `slots` [T], all written."""
    size = key_cache.shape[2] * COLUMNS
    for slot in slots[slots % KEY_GROUP == KEY_GROUP - 1].tolist():
        block, last = divmod(slot, size)
        keys = recent_keys[int(recent_slots[block])].float()  # [Hkv, P/16, D/2, 16, 2]
        keys = keys.transpose(2, 3).flatten(3).flatten(1, 2)  # [Hkv, P, D]
        group = keys[:, last + 1 - KEY_GROUP : last + 1]
        codes, scales = kv_int4.choose_codes(group.transpose(1, 2))  # [Hkv, D, 32], [Hkv, D, 2]
        key_scale[block, :, last // KEY_GROUP] = scales.transpose(1, 2)
        offset = torch.arange(last + 1 - KEY_GROUP, last + 1)
        where = torch.full_like(offset, block)
        kv_int4.put_keys(key_cache, codes.permute(2, 0, 1), where, offset)


def coded_keys(key_cache: Tensor, key_scale: Tensor, blocks: Tensor) -> Tensor:
    """Keys of `blocks` [M] as their codes have them, [M · P, Hkv, D] float32."""
    codes = kv_int4.key_codes(key_cache[blocks])  # [M, Hkv, P, D]
    spread = key_scale[blocks].repeat_interleave(KEY_GROUP, dim=2)  # [M, Hkv, P, 2, D]
    x = kv_int4.widen(codes, spread[..., 0, :], spread[..., 1, :])
    return x.transpose(1, 2).flatten(0, 1)
