"""Unquantized weights, float32 or bfloat16, in panels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import ops
from penstock.errors import WeightsError
from penstock.hardware import Compute
from penstock.ops.panels import panel_shape, unpack_panels
from penstock.quant.codes import Codes
from penstock.quant.format import Packed
from penstock.quant.formats.panels import PanelFormat


@dataclass(frozen=True, slots=True)
class Dense(PanelFormat):
    """A float matrix as panels [N/16, K/v, 16, v] (see `ops.panels`)."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def compute(self) -> Compute:
        return "float32" if self.dtype is torch.float32 else "bfloat16"

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        return {"weight": ops.pack(weight, self.dtype, gated)}

    def pack_codes(self, codes: Codes, gated: bool = False) -> Packed:
        return self.pack(codes.dequantize(), gated)

    def codes(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Codes:
        raise WeightsError(f"A matrix in {self.name} isn't quantized: it has no codes.")

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        panels = packed["weight"]
        if not gated:
            return unpack_panels(panels, out_features, in_features)
        return torch.cat([unpack_panels(panels[i::2], out_features, in_features) for i in (0, 1)])

    def nbytes(self, out_features: int, in_features: int) -> int:
        return math.prod(panel_shape(out_features, in_features, self.dtype)) * self.dtype.itemsize
