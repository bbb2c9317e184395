"""Keys and values in blocks of panels, anywhere in memory.

Shapes, for N blocks of P tokens (`ops.rotary_cache` has the meaning of each dimension):
    key   [N, Hkv, P/16, D/v, 16, v]
    value [N, Hkv, D/16, P/v, 16, v]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.ops.panels import COLUMNS, round_up, vnni_factor
from penstock.step import KV


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """A paged cache of some layers, each with its (num_kv_heads, head_dim)."""

    heads: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    block_size: int

    @property
    def bytes_per_block(self) -> int:
        """Of keys and values, all layers."""
        return self.block_size * sum(map(self.bytes_per_token, range(len(self.heads))))

    def bytes_per_token(self, layer: int) -> int:
        """Of one token's key and value in one layer, read or written."""
        count, dim = self.heads[layer]
        return 2 * count * round_up(dim, COLUMNS) * self.dtype.itemsize

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of `tokens` needs."""
        return -(-tokens // self.block_size)

    def allocate(self, num_blocks: int) -> KV:
        """The cache, zeroed; the system commits its memory as it is first used."""
        v, p = vnni_factor(self.dtype), self.block_size
        kv: KV = []
        for count, dim in self.heads:
            d = round_up(dim, COLUMNS)
            keys = torch.zeros(
                (num_blocks, count, p // COLUMNS, d // v, COLUMNS, v), dtype=self.dtype
            )
            values = torch.zeros(
                (num_blocks, count, d // COLUMNS, p // v, COLUMNS, v), dtype=self.dtype
            )
            kv.append((keys, values))
        return kv


def copy_blocks(kv: KV, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy each block's keys and values, (from, to), in every layer."""
    if not pairs:
        return
    source = torch.tensor([a for a, _ in pairs])
    target = torch.tensor([b for _, b in pairs])
    for keys, values in kv:
        keys[target] = keys[source]
        values[target] = values[source]
