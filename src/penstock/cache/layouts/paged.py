"""Keys and values in blocks of panels, anywhere in memory.

Shapes, for N blocks of P tokens (`ops.rotary_cache` has the meaning of each dimension):
    key   [N, Hkv, P/16, D/v, 16, v]
    value [N, Hkv, D/16, P/v, 16, v]
for int8 two more, float16: scales of keys and of values [N, Hkv, P]; and for int4 (uint8)
    key   [N, Hkv, P/16, D/2, 16, 1]
    value [N, Hkv, D/16, P/2, 2, 8]
with scales of each [N, Hkv, G, 2, P] float16, for groups of 32 dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.cache.pages import lazy_zeros
from penstock.ops.kv_int4 import GROUP
from penstock.ops.panels import COLUMNS, round_up, vnni_factor
from penstock.step import KV


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """A paged cache of some layers, each with its (num_kv_heads, head_dim)."""

    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype  # what is stored
    block_size: int

    @property
    def stored(self) -> str:
        """The name of what is stored."""
        return "int4" if self.dtype is torch.uint8 else str(self.dtype).removeprefix("torch.")

    @property
    def bytes_per_block(self) -> int:
        """Of keys and values, all layers."""
        return self.block_size * sum(map(self.bytes_per_token, range(len(self.heads))))

    def bytes_per_token(self, layer: int) -> int:
        """Of one token's key and value in one layer, read or written."""
        count, dim = self.heads[layer]
        padded = round_up(dim, COLUMNS)
        if self.dtype is torch.uint8:
            each = padded // 2 + 4 * -(-padded // GROUP)
        else:
            each = padded * self.dtype.itemsize + (2 if self.dtype is torch.int8 else 0)
        return 2 * count * each

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` needs."""
        return -(-tokens // self.block_size)

    def allocate(self, num_blocks: int) -> KV:
        """The cache, zeroed; the system commits its memory as it is first used."""
        return [
            tuple(lazy_zeros(shape, dtype) for shape, dtype in self._parts(num_blocks, *head))
            for head in self.heads
        ]

    def _parts(self, n: int, count: int, dim: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of one layer's tensors."""
        p, d = self.block_size, round_up(dim, COLUMNS)
        if self.dtype is torch.uint8:
            return [
                ((n, count, p // COLUMNS, d // 2, COLUMNS, 1), torch.uint8),
                ((n, count, d // COLUMNS, p // 2, 2, COLUMNS // 2), torch.uint8),
                *2 * [((n, count, -(-d // GROUP), 2, p), torch.float16)],
            ]
        # one byte is widened to bfloat16 and lies in its order
        v = 2 if self.dtype.itemsize == 1 else vnni_factor(self.dtype)
        scale = ((n, count, p), torch.float16)
        return [
            ((n, count, p // COLUMNS, d // v, COLUMNS, v), self.dtype),
            ((n, count, d // COLUMNS, p // v, COLUMNS, v), self.dtype),
            *([scale, scale] if self.dtype is torch.int8 else []),
        ]


def copy_blocks(kv: KV, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy each block's keys and values, (from, to), in every layer."""
    if not pairs:
        return
    source = torch.tensor([a for a, _ in pairs])
    target = torch.tensor([b for _, b in pairs])
    for layer in kv:
        for part in layer:
            held = part.view(torch.uint8) if part.dtype is torch.float8_e4m3fn else part
            held[target] = held[source]
