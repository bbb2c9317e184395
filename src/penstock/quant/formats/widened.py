"""Schemes without a kernel of their own: their values, widened to bfloat16 as they are loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.hardware import Compute
from penstock.quant.codes import Codes
from penstock.quant.format import Packed
from penstock.quant.formats.dense import Dense
from penstock.quant.formats.panels import PanelFormat
from penstock.quant.scheme import Scheme

_DENSE = Dense(torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Widened(PanelFormat):
    """The values of `scheme` in bfloat16 panels: its drift, but not its size."""

    scheme: Scheme

    @property
    def name(self) -> str:
        return f"{self.scheme.name} in bfloat16"

    @property
    def compute(self) -> Compute:
        return "bfloat16"

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        raise NotImplementedError

    def pack_codes(self, codes: Codes, gated: bool = False) -> Packed:
        return _DENSE.pack(codes.dequantize(), gated)

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        return _DENSE.unpack(packed, out_features, in_features, gated)

    def nbytes(self, out_features: int, in_features: int) -> int:
        return _DENSE.nbytes(out_features, in_features)
