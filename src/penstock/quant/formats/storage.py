"""How a format's tensors lie in memory: in panels for CPUs, in rows for GPUs.

A format says what is stored and a storage where; operators tell by a tensor's dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock import ops
from penstock.ops import panels, rows
from penstock.ops.panels import BYTE_BLOCK, COLUMNS, round_up


class Storage(Protocol):
    """Where the values of a matrix [N, K] go."""

    @property
    def name(self) -> str:
        """For readers, and for the folders of built engines."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether products add in one order, whatever the number of rows."""
        ...

    def padded(self, in_features: int, group: int) -> int:
        """K of codes as it is stored, with whole groups."""
        ...

    def stored_rows(self, out_features: int) -> int:
        """N as it is stored."""
        ...

    def dense_nbytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """Bytes of an unquantized matrix."""
        ...

    def pack_dense(self, weight: Tensor, dtype: torch.dtype, gated: bool) -> Tensor:
        """An unquantized matrix, [2·N, K] where gated, rounded to `dtype`."""
        ...

    def unpack_dense(self, stored: Tensor, n: int, k: int) -> Tensor:
        """What `pack_dense` was given, of a matrix without a gate."""
        ...

    def pack_bytes(self, q: Tensor, padded: int) -> Tensor:
        """Codes [N, K] of eight bits."""
        ...

    def pack_nibbles(self, q: Tensor, padded: int, fill: int = 8) -> Tensor:
        """Codes [N, K] of four bits; `fill` stands for nothing."""
        ...

    def unpack_codes(self, stored: Tensor) -> Tensor:
        """What either was given, with padding."""
        ...

    def pack_groups(self, values: Tensor) -> Tensor:
        """Scales or zero points [N, G]."""
        ...

    def unpack_groups(self, stored: Tensor) -> Tensor:
        """What `pack_groups` was given, with padding."""
        ...

    def join(self, gate: Tensor, up: Tensor) -> Tensor:
        """Both halves of a gated matrix as one tensor."""
        ...

    def half(self, stored: Tensor, i: int) -> Tensor:
        """One of the two that `join` was given."""
        ...


@dataclass(frozen=True, slots=True)
class Panels:
    """Panels of 16 rows (`ops.panels`)."""

    name: str = "panels"
    ordered: bool = True

    def padded(self, in_features: int, group: int) -> int:
        return round_up(in_features, max(BYTE_BLOCK, group))

    def stored_rows(self, out_features: int) -> int:
        return round_up(out_features, COLUMNS)

    def dense_nbytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return math.prod(panels.panel_shape(out_features, in_features, dtype)) * dtype.itemsize

    def pack_dense(self, weight: Tensor, dtype: torch.dtype, gated: bool) -> Tensor:
        return ops.pack(weight, dtype, gated)

    def unpack_dense(self, stored: Tensor, n: int, k: int) -> Tensor:
        return panels.unpack_panels(stored, n, k)

    def pack_bytes(self, q: Tensor, padded: int) -> Tensor:
        return panels.pack_int8(q, padded)

    def pack_nibbles(self, q: Tensor, padded: int, fill: int = 8) -> Tensor:
        return panels.pack_int4(q, padded, fill)

    def unpack_codes(self, stored: Tensor) -> Tensor:
        return panels.unpack_codes(stored)

    def pack_groups(self, values: Tensor) -> Tensor:
        return panels.pack_groups(values)

    def unpack_groups(self, stored: Tensor) -> Tensor:
        return panels.unpack_groups(stored)

    def join(self, gate: Tensor, up: Tensor) -> Tensor:
        return panels.alternate(gate, up)

    def half(self, stored: Tensor, i: int) -> Tensor:
        return stored[i::2]


@dataclass(frozen=True, slots=True)
class Rows:
    """Whole rows (`ops.rows`)."""

    name: str = "rows"
    ordered: bool = True

    def padded(self, in_features: int, group: int) -> int:
        return round_up(in_features, rows.BLOCK)

    def stored_rows(self, out_features: int) -> int:
        return out_features

    def dense_nbytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * in_features * dtype.itemsize

    def pack_dense(self, weight: Tensor, dtype: torch.dtype, gated: bool) -> Tensor:
        return weight.to(dtype, copy=True).contiguous()

    def unpack_dense(self, stored: Tensor, n: int, k: int) -> Tensor:
        return stored

    def pack_bytes(self, q: Tensor, padded: int) -> Tensor:
        return rows.pack_bytes(q, padded)

    def pack_nibbles(self, q: Tensor, padded: int, fill: int = 8) -> Tensor:
        return rows.pack_nibbles(q, padded, fill)

    def unpack_codes(self, stored: Tensor) -> Tensor:
        return rows.unpack_codes(stored)

    def pack_groups(self, values: Tensor) -> Tensor:
        return values.contiguous()

    def unpack_groups(self, stored: Tensor) -> Tensor:
        return stored

    def join(self, gate: Tensor, up: Tensor) -> Tensor:
        if gate.dtype.itemsize == 1:
            return torch.cat((gate.view(torch.int8), up.view(torch.int8))).view(gate.dtype)
        return torch.cat((gate, up))

    def half(self, stored: Tensor, i: int) -> Tensor:
        return stored.chunk(2)[i]


PANELS: Storage = Panels()
ROWS: Storage = Rows()
UNORDERED_ROWS: Storage = Rows(ordered=False)
