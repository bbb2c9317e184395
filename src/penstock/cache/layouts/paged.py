"""Keys and values in blocks of panels, anywhere in memory.

Shapes, for N blocks of P tokens (`ops.rotary_cache` has the meaning of each dimension):
    key   [N, Hkv, P/16, D/v, 16, v]
    value [N, Hkv, D/16, P/v, 16, v]
and for int8 two more, float16: scales of keys and of values [N, Hkv, P].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.cache.pages import lazy_zeros
from penstock.ops.panels import COLUMNS, round_up, vnni_factor
from penstock.step import KV


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """A paged cache of some layers, each with its (num_kv_heads, head_dim)."""

    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype  # what is stored
    block_size: int

    @property
    def scaled(self) -> bool:
        """Whether each token and head has a scale."""
        return self.dtype is torch.int8

    @property
    def bytes_per_block(self) -> int:
        """Of keys and values, all layers."""
        return self.block_size * sum(map(self.bytes_per_token, range(len(self.heads))))

    def bytes_per_token(self, layer: int) -> int:
        """Of one token's key and value in one layer, read or written."""
        count, dim = self.heads[layer]
        each = round_up(dim, COLUMNS) * self.dtype.itemsize + (2 if self.scaled else 0)
        return 2 * count * each

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` needs."""
        return -(-tokens // self.block_size)

    def allocate(self, num_blocks: int) -> KV:
        """The cache, zeroed; the system commits its memory as it is first used."""
        # one byte is widened to bfloat16 and lies in its order
        v = 2 if self.dtype.itemsize == 1 else vnni_factor(self.dtype)
        p, n = self.block_size, num_blocks
        kv: KV = []
        for count, dim in self.heads:
            d = round_up(dim, COLUMNS)
            shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
                ((n, count, p // COLUMNS, d // v, COLUMNS, v), self.dtype),
                ((n, count, d // COLUMNS, p // v, COLUMNS, v), self.dtype),
            ]
            if self.scaled:
                shapes += 2 * [((n, count, p), torch.float16)]
            kv.append(tuple(lazy_zeros(shape, dtype) for shape, dtype in shapes))
        return kv


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
