"""`WeightFormat`: how one weight matrix is stored and multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.hardware import Compute

Packed = dict[str, Tensor]
"""A stored matrix: named tensors, the same names for every matrix of a format."""


class WeightFormat(Protocol):
    """Storage of an [N, K] matrix. Formats hold no tensors; modules do."""

    @property
    def name(self) -> str:
        """What users call it: `bfloat16`, `w4a8`, …"""
        ...

    @property
    def compute(self) -> Compute:
        """What the products of `matmul` run in."""
        ...

    def pack(self, weight: Tensor) -> Packed:
        """Store `weight` [N, K], any float dtype."""
        ...

    def unpack(self, packed: Packed, out_features: int, in_features: int) -> Tensor:
        """The [N, K] matrix that `packed` stands for: the reference of `matmul`."""
        ...

    def matmul(
        self,
        x: Tensor,
        packed: Packed,
        bias: Tensor | None,
        out_features: int,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [T, K] → x · Wᵀ + bias [T, N] in `out_dtype` (x.dtype if None)."""
        ...

    def gather(self, tokens: Tensor, packed: Packed, in_features: int, scale: float) -> Tensor:
        """Rows `tokens` [T] of W times `scale`, [T, K]: for a tied embedding."""
        ...

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes read when the whole matrix is used once."""
        ...


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of one model: of its layers' matrices and of its output head."""

    matrix: WeightFormat
    head: WeightFormat
