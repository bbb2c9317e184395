"""Keys and values in blocks of panels, anywhere in memory.

Shapes, for N blocks of P tokens (`ops.rotary_cache` has the meaning of each dimension):
    key   [N, Hkv, P/16, D/v, 16, v]
    value [N, Hkv, D/16, P/v, 16, v]
for int8 two more, float16: scales of keys and of values [N, Hkv, P]; and for int4 (uint8)
    key   [N, Hkv, P/16, D/2, 16, 1]
    value [N, Hkv, D/16, P/2, 2, 8]
with scales of each [N, Hkv, G, 2, P] float16, for groups of 32 dimensions. With a window (kivi) the
scales of keys are [N, Hkv, P/32, 2, D], and four more tensors hold recent tokens: `ops.kivi`.

What all layers have of a block lies in one piece, each tensor a view into it: memory is taken by
the block as blocks come into use, not in a page for each layer, and one copy moves a block.

`PagedRows` has the same blocks for a GPU, [N, Hkv, P, D] (`ops.rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.cache.layouts.states import StateCache, StateLayout
from penstock.cache.pages import lazy_zeros
from penstock.ops.kivi import KEY_GROUP
from penstock.ops.kv_int4 import GROUP
from penstock.ops.panels import COLUMNS, round_up, vnni_factor
from penstock.step import KV

CPU = torch.device("cpu")

_Part = tuple[tuple[int, ...], torch.dtype]
_Zeros = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """A paged cache of some layers, each with its (num_kv_heads, head_dim); (0, 0): it has none."""

    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype  # what is stored
    block_size: int
    recent_window: int = 0  # tokens; 0: none are kept otherwise than all
    max_recent_blocks: int = 0  # of recent tokens; never more than the cache has blocks
    ranks: int = 1  # that keep an equal part each of every block (`ops.ring`)
    states: StateLayout | None = None  # of layers that have those instead, beside the blocks

    @property
    def stored(self) -> str:
        """The name of what is stored."""
        if self.recent_window:
            return "kivi"
        return "int4" if self.dtype is torch.uint8 else str(self.dtype).removeprefix("torch.")

    @property
    def bytes_per_block(self) -> int:
        """Of keys and values, all layers; of codes where there is a window."""
        return self.own_tokens * sum(map(self.bytes_per_token, range(len(self.heads))))

    @property
    def own_tokens(self) -> int:
        """Of a block, that this cache keeps."""
        return self.block_size // self.ranks

    def bytes_per_token(self, layer: int) -> int:
        """Of one token's key and value in one layer, read or written; of codes likewise."""
        count, dim = self.heads[layer]
        padded = round_up(dim, COLUMNS)
        if self.dtype is not torch.uint8:
            scale = 2 if self.dtype is torch.int8 else 0
            return 2 * count * (padded * self.dtype.itemsize + scale)
        scales = 4 * -(-padded // GROUP)
        key_scales = 4 * padded // KEY_GROUP if self.recent_window else scales
        return count * (padded + key_scales + scales)

    def recent_bytes_per_token(self, layer: int) -> int:
        """Of one token's key and value as they were written, beside their codes."""
        count, dim = self.heads[layer]
        return 4 * count * round_up(dim, COLUMNS) if self.recent_window else 0

    def state_bytes(self, layer: int) -> int:
        """Of a sequence's state in one layer that has one, read or written."""
        return 0 if self.states is None else self.states.bytes_of(layer)

    def nbytes(self, num_blocks: int) -> int:
        """Of all that `allocate` gives."""
        total = num_blocks * self.bytes_per_block
        if self.states is not None:
            total += self.states.nbytes
        if self.recent_window:
            recent = min(num_blocks, self.max_recent_blocks)
            total += recent * self._recent_bytes_per_block + 4 * num_blocks + 4
        return total

    def blocks_in(self, nbytes: int) -> int:
        """The most blocks that `nbytes` hold."""
        each, most = self.bytes_per_block, self.max_recent_blocks
        if self.states is not None:
            return max(nbytes - self.states.nbytes, 0) // each
        if not self.recent_window:
            return nbytes // each
        recent = self._recent_bytes_per_block
        few = max(nbytes - 4, 0) // (each + 4 + recent)
        return few if few < most else (nbytes - 4 - most * recent) // (each + 4)

    @property
    def _recent_bytes_per_block(self) -> int:
        return self.block_size * sum(map(self.recent_bytes_per_token, range(len(self.heads))))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` needs."""
        return -(-tokens // self.block_size)

    def allocate(self, num_blocks: int, device: torch.device = CPU) -> KV:
        """The cache, zeroed; a CPU's is committed as it is first used."""
        if self.states is not None or not all(count for count, _ in self.heads):
            return self._of_some(num_blocks, device)
        layers = [self._parts(num_blocks, *head) for head in self.heads]
        kv = _in_one_piece([parts[:4] for parts in layers], _zeros_on(device))
        if not self.recent_window:
            return kv
        recent = [[_zeros_on(device)(*part) for part in parts[4:]] for parts in layers]
        slots = torch.full((num_blocks,), -1, dtype=torch.int32)
        window = torch.tensor([self.recent_window], dtype=torch.int32)
        return [(*views, *beside, slots, window) for views, beside in zip(kv, recent, strict=True)]

    def _of_some(self, num_blocks: int, device: torch.device) -> KV:
        """The cache of the layers that have one, the states of others, and nothing of the rest."""
        own = tuple(head for head in self.heads if head[0])
        kv = iter(replace(self, heads=own, states=None).allocate(num_blocks, device))
        states = [None] * len(self.heads) if self.states is None else self.states.allocate()
        return [
            (next(kv) if head[0] else ()) if held is None else held
            for head, held in zip(self.heads, states, strict=True)
        ]

    def _parts(self, n: int, count: int, dim: int) -> list[_Part]:
        """Shape and dtype of one layer's tensors."""
        p, d = self.own_tokens, round_up(dim, COLUMNS)
        if self.dtype is torch.uint8:
            scale = (n, count, -(-d // GROUP), 2, p)
            by_channel = (n, count, p // KEY_GROUP, 2, d)
            codes = [
                ((n, count, p // COLUMNS, d // 2, COLUMNS, 1), torch.uint8),
                ((n, count, d // COLUMNS, p // 2, 2, COLUMNS // 2), torch.uint8),
                (by_channel if self.recent_window else scale, torch.float16),
                (scale, torch.float16),
            ]
            if not self.recent_window:
                return codes
            r = min(n, self.max_recent_blocks)
            return [
                *codes,
                ((r, count, p // COLUMNS, d // 2, COLUMNS, 2), torch.bfloat16),
                ((r, count, d // COLUMNS, p // 2, COLUMNS, 2), torch.bfloat16),
            ]
        # one byte is widened to bfloat16 and lies in its order
        v = 2 if self.dtype.itemsize == 1 else vnni_factor(self.dtype)
        by_token = ((n, count, p), torch.float16)
        return [
            ((n, count, p // COLUMNS, d // v, COLUMNS, v), self.dtype),
            ((n, count, d // COLUMNS, p // v, COLUMNS, v), self.dtype),
            *([by_token, by_token] if self.dtype is torch.int8 else []),
        ]


@dataclass(frozen=True, slots=True)
class PagedRows(PagedLayout):
    """The same cache in rows: key and value [N, Hkv, P, D]; of int8, scales [N, Hkv, P]."""

    def bytes_per_token(self, layer: int) -> int:
        count, dim = self.heads[layer]
        return 2 * count * (dim * self.dtype.itemsize + (2 if self.dtype is torch.int8 else 0))

    def allocate(self, num_blocks: int, device: torch.device = CPU) -> KV:
        """The cache, zeroed; a CPU's is committed as it is first used."""
        zeros = _zeros_on(device)
        layers = [self._parts(num_blocks, *head) if head[0] else [] for head in self.heads]
        return [tuple(zeros(*part) for part in parts) for parts in layers]

    def _parts(self, n: int, count: int, dim: int) -> list[_Part]:
        whole = ((n, count, self.block_size, dim), self.dtype)
        by_token = ((n, count, self.block_size), torch.float16)
        return [whole, whole, *([by_token, by_token] if self.dtype is torch.int8 else [])]


def _zeros_on(device: torch.device) -> _Zeros:
    if device.type == "cpu":
        return lazy_zeros
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)


def _in_one_piece(layers: Sequence[Sequence[_Part]], zeros: _Zeros) -> KV:
    """Zeros of these shapes, which begin with one number of blocks; a block's lie side by side."""
    if not layers:
        return []
    sizes = [[math.prod(shape[1:]) * dtype.itemsize for shape, dtype in parts] for parts in layers]
    num_blocks, pitch = layers[0][0][0][0], sum(map(sum, sizes))
    whole, at = zeros((num_blocks, pitch), torch.uint8), 0
    kv: KV = []
    for parts, held in zip(layers, sizes, strict=True):
        views = []
        for (shape, dtype), size in zip(parts, held, strict=True):
            views.append(whole[:, at : at + size].view(dtype).unflatten(1, shape[1:]))
            at += size
        kv.append(tuple(views))
    return kv


def any_part(kv: KV) -> torch.Tensor:
    """A tensor of a cache, the first: a layer that mixes no tokens has none."""
    return next(part for layer in kv for part in layer)


def block_rows(kv: KV) -> list[torch.Tensor]:
    """What blocks hold, in as few pieces as they lie in: [N, words] each, in that memory.

    A word is an int64, or a byte where blocks have no whole number of those. Not what lies in
    recent blocks.
    """
    found: list[torch.Tensor] = []
    held = (layer for layer in kv if not isinstance(layer, StateCache))
    for part in (part for layer in held for part in layer[:4] if part.numel()):
        row = part.view(part.shape[0], part[0].numel()).view(torch.int8)
        last = found[-1] if found else row[:, :0]
        begins, pitch = last.storage_offset(), last.stride(0)
        width = last.shape[1] + row.shape[1]
        beside = (
            row.stride(0) == pitch >= width
            and row.data_ptr() == last.data_ptr() + last.nbytes // max(len(last), 1)
            and row.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        )
        if found and beside:
            found[-1] = last.as_strided((len(row), width), (pitch, 1), begins)
        else:
            found.append(row)
    return [_in_words(row) for row in found]


def _in_words(row: torch.Tensor) -> torch.Tensor:
    whole = row.shape[1] % 8 == row.stride(0) % 8 == row.data_ptr() % 8 == 0
    return row.view(torch.int64) if whole and row.storage_offset() % 8 == 0 else row


_FEW = 16
"""Blocks that are copied one by one."""


def copy_blocks(rows: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copy what each block holds, (from, to), in every layer. rows: the cache's `block_rows`.

    Not what lies in recent blocks: those are copied by whoever gives their places out.
    """
    if not pairs or not rows:
        return
    # A block is sooner copied than threads are woken. But all are read before any is written.
    one_by_one = len(pairs) <= _FEW and not {a for a, _ in pairs} & {b for _, b in pairs}
    device = rows[0].device
    one_by_one &= device.type == "cpu"  # elsewhere each is a launch
    source = torch.tensor([a for a, _ in pairs], device=device)
    target = torch.tensor([b for _, b in pairs], device=device)
    for held in rows:
        if not one_by_one:
            held[target] = held[source]
            continue
        for a, b in pairs:
            held[b].copy_(held[a])
