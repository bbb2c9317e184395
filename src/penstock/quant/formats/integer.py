"""int8 and int4 weights, with activations in bfloat16 or rounded to int8 row by row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.hardware import Compute
from penstock.ops.panels import (
    BYTE_BLOCK,
    COLUMNS,
    alternate,
    pack_groups,
    pack_int4,
    pack_int8,
    round_up,
    unpack_codes,
    unpack_groups,
)
from penstock.quant.codes import Codes
from penstock.quant.format import Packed
from penstock.quant.formats.panels import PanelFormat
from penstock.quant.methods.rtn import round_int4, round_int8
from penstock.quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Integer(PanelFormat):
    """int8: one scale for each row of the matrix. int4: a float16 scale for each group of K.

    Activations in int8: products of integers, summed exactly; else weights are widened to bfloat16
    in registers.
    """

    scheme: Scheme

    @staticmethod
    def takes(scheme: Scheme) -> bool:
        """Whether there are kernels for `scheme`."""
        if scheme.activations == "int8_static" or scheme.rows != 1:
            return False
        if scheme.kind == "int8":
            return scheme.group == 0 and scheme.symmetric
        return scheme.kind == "int4" and scheme.group > 0

    @property
    def name(self) -> str:
        return self.scheme.name

    @property
    def compute(self) -> Compute:
        return "int8" if self.int8_rows else "bfloat16"

    @property
    def int8_rows(self) -> bool:
        return self.scheme.activations == "int8"

    def padded(self, in_features: int) -> int:
        """K as it is stored."""
        return round_up(in_features, max(BYTE_BLOCK, self.scheme.group))

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        if self.scheme.bits == 8:
            return round_int8(weight, gated)
        return round_int4(weight, self.scheme.group, self.scheme.symmetric, gated)

    def pack_codes(self, codes: Codes, gated: bool = False) -> Packed:
        if gated:
            half = codes.shape[0] // 2
            gate, up = (self.pack_codes(codes.rows(s)) for s in (slice(half), slice(half, None)))
            return {name: alternate(gate[name], up[name]) for name in gate}
        more = self.padded(codes.shape[1]) - codes.shape[1]
        if self.scheme.bits == 8:
            values = pack_int8(functional.pad(codes.values, (0, more)))
            return {"weight": values, "scale": pack_groups(codes.scale)}
        spare = self.padded(codes.shape[1]) // self.scheme.group - codes.scale.shape[1]
        scale = functional.pad(codes.scale, (0, spare), value=1.0)
        values = functional.pad(codes.values, (0, more), value=8)
        packed = {"scale": pack_groups(half_if_exact(scale))}
        if codes.zero is not None:
            zero = functional.pad(codes.zero, (0, spare), value=8)
            of_each = zero.repeat_interleave(self.scheme.group, 1)
            values[:, codes.shape[1] :] = of_each[:, codes.shape[1] :]  # beyond K nothing stands
            packed["zero"] = pack_groups(zero)
        return {"weight": pack_int4(values), **packed}

    def codes(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Codes:
        """What `pack` or `pack_codes` stored."""
        if gated:
            halves = ({name: t[i::2] for name, t in packed.items()} for i in (0, 1))
            return Codes.stack([self.codes(half, out_features, in_features) for half in halves])
        n, k, count = (
            out_features,
            in_features,
            -(-in_features // (self.scheme.group or in_features)),
        )
        zero = packed.get("zero")
        return Codes(
            self.scheme,
            unpack_codes(packed["weight"])[:n, :k],
            unpack_groups(packed["scale"])[:n, :count].float(),
            None if zero is None else unpack_groups(zero)[:n, :count],
        )

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        return self.codes(packed, out_features, in_features, gated).dequantize()

    def nbytes(self, out_features: int, in_features: int) -> int:
        rows, k = round_up(out_features, COLUMNS), self.padded(in_features)
        if self.scheme.bits == 8:
            return rows * (k + 4)
        return rows * (k // 2 + k // self.scheme.group * (2 if self.scheme.symmetric else 3))


def half_if_exact(scale: Tensor) -> Tensor:
    """Scales in float16 where that changes none of them, else in float32."""
    half = scale.to(torch.float16)
    return half if torch.equal(half.float(), scale) else scale
