"""Unquantized weights, float32 or bfloat16, in panels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import ops
from penstock.hardware import Compute
from penstock.ops.panels import pack_panels, panel_shape, unpack_panels
from penstock.quant.format import Packed


@dataclass(frozen=True, slots=True)
class Dense:
    """A float matrix as panels [N/16, K/v, 16, v] (see `ops.panels`)."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def compute(self) -> Compute:
        return "float32" if self.dtype is torch.float32 else "bfloat16"

    def pack(self, weight: Tensor) -> Packed:
        return {"weight": pack_panels(weight.to(self.dtype))}

    def unpack(self, packed: Packed, out_features: int, in_features: int) -> Tensor:
        return unpack_panels(packed["weight"], out_features, in_features)

    def matmul(
        self,
        x: Tensor,
        packed: Packed,
        bias: Tensor | None,
        out_features: int,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return ops.linear(x, packed["weight"], bias, out_features, out_dtype)

    def gather(self, tokens: Tensor, packed: Packed, in_features: int, scale: float) -> Tensor:
        return ops.embedding(tokens, packed["weight"], in_features, scale)

    def nbytes(self, out_features: int, in_features: int) -> int:
        return math.prod(panel_shape(out_features, in_features, self.dtype)) * self.dtype.itemsize
