"""int8 and int4 weights, with activations in bfloat16 or rounded to int8."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from penstock import ops
from penstock.errors import WeightsError
from penstock.ops.panels import round_up
from penstock.ops.rotate import ROTATED
from penstock.quant.codes import Codes, groups
from penstock.quant.format import Packed
from penstock.quant.formats.quantized import (
    Quantized,
    half_if_exact,
    restored_input,
    spare_groups,
    stored_input,
)
from penstock.quant.formats.storage import PANELS
from penstock.quant.methods.rtn import round_int4, round_int8


@dataclass(frozen=True, slots=True)
class Integer(Quantized):
    """A scale, and where not symmetric a zero point, for each row or for each group of K.

    Activations in int8: products of integers, summed exactly; else weights are widened to bfloat16
    in registers. Rotated: codes are those of the matrix's rotated rows.
    """

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        scheme = self.scheme
        if scheme.rotated:
            weight = ops.rotate(weight)
        if self.storage == PANELS and scheme.rows == 1 and not scheme.static:  # operators' part
            if scheme.kind == "int8" and not scheme.group and scheme.symmetric:
                return round_int8(weight, gated)
            if scheme.kind == "int4" and scheme.group:
                return round_int4(weight, scheme.group, scheme.symmetric, gated)
        return Quantized.pack(self, weight, gated)

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        if gated or not self.scheme.rotated:  # halves come back here
            return Quantized.unpack(self, packed, out_features, in_features, gated)
        stored = Quantized.unpack(self, packed, out_features, self.stored_width(in_features))
        return ops.rotate(stored)[:, :in_features]

    def gather(self, tokens: Tensor, packed: Packed, in_features: int, scale: float) -> Tensor:
        if self.scheme.rotated:
            raise WeightsError(f"Rows of a matrix in {self.name} aren't those of an embedding.")
        return Quantized.gather(self, tokens, packed, in_features, scale)

    def stored_width(self, in_features: int) -> int:
        """K of its codes: whole blocks where they are rotated."""
        return round_up(in_features, ROTATED) if self.scheme.rotated else in_features

    def store(self, codes: Codes) -> Packed:
        eight, padded = self.scheme.bits == 8, self.padded(codes.shape[1])
        spare = spare_groups(codes, padded)
        scale = functional.pad(codes.scale, (0, spare), value=1.0)
        if not eight or self.scheme.group:
            scale = half_if_exact(scale)
        pack = self.storage.pack_bytes if eight else self.storage.pack_nibbles
        packed = {
            "weight": pack(codes.values, padded),
            "scale": self.storage.pack_groups(scale),
        }
        if codes.zero is not None:
            packed["zero"] = self.storage.pack_groups(functional.pad(codes.zero, (0, spare)))
        return packed | stored_input(codes)

    def restore(self, packed: Packed, out_features: int, in_features: int) -> Codes:
        n, k = out_features, self.stored_width(in_features)
        count = groups(k, self.scheme.group)
        zero = packed.get("zero")
        return Codes(
            self.scheme,
            self.storage.unpack_codes(packed["weight"])[:n, :k],
            self.storage.unpack_groups(packed["scale"])[:n, :count].float(),
            None if zero is None else self.storage.unpack_groups(zero)[:n, :count],
            input_scale=restored_input(packed),
        )
