"""Latents in blocks of panels: one row of a token for all heads, read as key and as value.

Shape, for N blocks of P tokens (`ops.mla`): [N, 1, P/16, D/v, 16, v].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.cache.layouts.paged import PagedLayout
from penstock.ops.panels import COLUMNS, round_up, vnni_factor


@dataclass(frozen=True, slots=True)
class PagedLatents(PagedLayout):
    """A paged cache of layers with one head each, whose values are part of its keys."""

    def bytes_per_token(self, layer: int) -> int:
        count, dim = self.heads[layer]
        return count * round_up(dim, COLUMNS) * self.dtype.itemsize

    def _parts(self, n: int, count: int, dim: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        p, v = self.own_tokens, vnni_factor(self.dtype)
        padded = round_up(dim, COLUMNS)
        return [((n, count, p // COLUMNS, padded // v, COLUMNS, v), self.dtype)]
