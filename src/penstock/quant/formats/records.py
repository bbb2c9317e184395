"""K-quants as GGUF files have them: codes, scales and minima of 256 values in one record."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import ops
from penstock.errors import WeightsError
from penstock.hardware import Compute
from penstock.ops.panels import COLUMNS
from penstock.ops.records import LINES, VALUES, count_strange, unpack_records
from penstock.quant.codes import Codes
from penstock.quant.format import Packed, WeightFormat
from penstock.quant.formats.dense import Dense
from penstock.quant.formats.quantized import Quantized
from penstock.quant.formats.storage import PANELS, Storage


@dataclass(frozen=True, slots=True)
class Records(Quantized):
    """Panels of records (`ops.records`), beside activations in bfloat16, or int8 in blocks of 256.

    In rows, as GPUs have weights, the values are widened to bfloat16.
    """

    @property
    def compute(self) -> Compute:
        if not self.row_codes:
            return "bfloat16"
        return "int4" if self.scheme.bits == 4 else "int8"

    def padded(self, in_features: int) -> int:
        return in_features

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        raise WeightsError(f"Matrices aren't rounded to {self.name}: files have them so.")

    def pack_codes(self, codes: Codes, gated: bool = False) -> Packed:
        if codes.scheme.is_k and not self.scheme.bits:
            codes = codes.mixed()
        if codes.scheme.stored != self.scheme.stored:
            raise WeightsError(f"Codes in {codes.scheme.name} can't be stored as {self.name}.")
        _check(codes)
        return {"weight": ops.pack_records(codes.values.contiguous(), self.scheme.bits, gated)}

    def codes(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Codes:
        raise WeightsError(f"Blocks in {self.name} aren't made of records again: read the file.")

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        weight = packed["weight"]
        if not gated:
            return unpack_records(weight, out_features, in_features)
        halves = (weight[i::2] for i in (0, 1))
        return torch.cat([unpack_records(half, out_features, in_features) for half in halves])

    def nbytes(self, out_features: int, in_features: int) -> int:
        panels = -(-out_features // COLUMNS)
        return panels * -(-in_features // VALUES) * LINES[self.scheme.bits] * 64

    def stored_as(self, storage: Storage) -> WeightFormat:
        return self if storage == PANELS else Dense(torch.bfloat16, storage)


def _check(codes: Codes) -> None:
    """Raises WeightsError for scales that are NaN or infinite."""
    if bad := count_strange(codes.values, codes.scheme.bits):
        n, k = codes.shape
        raise WeightsError(
            f"{bad} scales of a matrix [{n}, {k}] in {codes.scheme.name} are NaN or infinite. The "
            "file is damaged."
        )
