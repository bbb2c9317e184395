"""int8 and int4 weights, with activations in bfloat16 or rounded to int8 row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.hardware import Compute
from penstock.ops.panels import BYTE_BLOCK, COLUMNS, round_up, unpack_int4, unpack_int8
from penstock.quant.format import Packed
from penstock.quant.formats.panels import PanelFormat
from penstock.quant.methods.rtn import round_int4, round_int8


@dataclass(frozen=True, slots=True)
class Integer(PanelFormat):
    """`bits` 8: one scale for each row of the matrix. 4: a float16 scale for each `group` of K.

    activation_bits 8: products of integers, summed exactly; 16: weights are widened to bfloat16 in
    registers.
    """

    bits: Literal[4, 8]
    activation_bits: Literal[8, 16]
    group: int = 0  # values of K that share a scale; 0: all
    symmetric: bool = True

    @property
    def name(self) -> str:
        base = f"w{self.bits}a{self.activation_bits}"
        if self.bits == 8:
            return base
        return f"{base}-g{self.group}" + ("" if self.symmetric else "-asym")

    @property
    def compute(self) -> Compute:
        return "int8" if self.int8_rows else "bfloat16"

    @property
    def int8_rows(self) -> bool:
        return self.activation_bits == 8

    def padded(self, in_features: int) -> int:
        """K as it is stored."""
        return round_up(in_features, max(BYTE_BLOCK, self.group))

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        if self.bits == 8:
            return round_int8(weight, gated)
        return round_int4(weight, self.group, self.symmetric, gated)

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        if gated:
            halves = ({name: t[i::2] for name, t in packed.items()} for i in (0, 1))
            return torch.cat([self.unpack(half, out_features, in_features) for half in halves])
        weight, scale = packed["weight"], packed["scale"]
        if self.bits == 8:
            return unpack_int8(weight, scale, out_features, in_features)
        return unpack_int4(weight, scale, packed.get("zero"), out_features, in_features)

    def nbytes(self, out_features: int, in_features: int) -> int:
        rows, k = round_up(out_features, COLUMNS), self.padded(in_features)
        if self.bits == 8:
            return rows * (k + 4)
        return rows * (k // 2 + k // self.group * (2 if self.symmetric else 3))
