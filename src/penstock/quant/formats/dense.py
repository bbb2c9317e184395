"""Unquantized weights, float32 or bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.hardware import Compute
from penstock.quant.codes import Codes
from penstock.quant.format import Packed
from penstock.quant.formats.operators import OperatorFormat
from penstock.quant.formats.storage import PANELS, Storage


@dataclass(frozen=True, slots=True)
class Dense(OperatorFormat):
    """A float matrix, rounded to a dtype."""

    dtype: torch.dtype
    storage: Storage = PANELS

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def compute(self) -> Compute:
        return "float32" if self.dtype is torch.float32 else "bfloat16"

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        return {"weight": self.storage.pack_dense(weight, self.dtype, gated)}

    def pack_codes(self, codes: Codes, gated: bool = False) -> Packed:
        return self.pack(codes.dequantize(), gated)

    def codes(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Codes:
        raise WeightsError(f"A matrix in {self.name} isn't quantized: it has no codes.")

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        stored, storage = packed["weight"], self.storage
        if not gated:
            return storage.unpack_dense(stored, out_features, in_features)
        halves = (storage.half(stored, i) for i in (0, 1))
        return torch.cat([storage.unpack_dense(h, out_features, in_features) for h in halves])

    def nbytes(self, out_features: int, in_features: int) -> int:
        return self.storage.dense_nbytes(out_features, in_features, self.dtype)

    def stored_as(self, storage: Storage) -> Dense:
        return replace(self, storage=storage)
