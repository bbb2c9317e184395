"""int8 and int4 weights, with activations in bfloat16 or rounded to int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.panels import pack_groups, pack_int4, pack_int8, unpack_codes, unpack_groups
from penstock.quant.codes import Codes, groups
from penstock.quant.format import Packed
from penstock.quant.formats.quantized import Quantized, half_if_exact, spare_groups
from penstock.quant.methods.rtn import round_int4, round_int8


@dataclass(frozen=True, slots=True)
class Integer(Quantized):
    """A scale, and where not symmetric a zero point, for each row or for each group of K.

    Activations in int8: products of integers, summed exactly; else weights are widened to bfloat16
    in registers.
    """

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        scheme = self.scheme
        if scheme.rows == 1 and scheme.activations != "int8_static":  # the operators' part
            if scheme.kind == "int8" and not scheme.group and scheme.symmetric:
                return round_int8(weight, gated)
            if scheme.kind == "int4" and scheme.group:
                return round_int4(weight, scheme.group, scheme.symmetric, gated)
        return Quantized.pack(self, weight, gated)

    def store(self, codes: Codes) -> Packed:
        k, eight = codes.shape[1], self.scheme.bits == 8
        padded = self.padded(k)
        spare = spare_groups(codes, padded)
        nothing = 0 if eight else 8
        values = functional.pad(codes.values, (0, padded - k), value=nothing)
        scale = functional.pad(codes.scale, (0, spare), value=1.0)
        packed = {
            "scale": pack_groups(scale if eight and not self.scheme.group else half_if_exact(scale))
        }
        if codes.zero is not None:
            zero = functional.pad(codes.zero, (0, spare), value=nothing)
            of_each = zero.repeat_interleave(padded // zero.shape[1], 1)
            values[:, k:] = of_each[:, k:]  # beyond K nothing stands
            packed["zero"] = pack_groups(zero)
        if codes.input_scale is not None:
            packed["input_scale"] = torch.tensor([codes.input_scale], dtype=torch.float32)
        return {"weight": pack_int8(values) if eight else pack_int4(values), **packed}

    def restore(self, packed: Packed, out_features: int, in_features: int) -> Codes:
        n, count = out_features, groups(in_features, self.scheme.group)
        zero, given = packed.get("zero"), packed.get("input_scale")
        return Codes(
            self.scheme,
            unpack_codes(packed["weight"])[:n, :in_features],
            unpack_groups(packed["scale"])[:n, :count].float(),
            None if zero is None else unpack_groups(zero)[:n, :count],
            None,
            None if given is None else float(given),
        )
