"""Weights in eight bits of floating point, E4M3 or E5M2, beside activations in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from penstock.ops.panels import pack_groups, pack_int8, unpack_codes, unpack_groups
from penstock.quant.codes import Codes, groups
from penstock.quant.format import Packed
from penstock.quant.formats.quantized import Quantized, spare_groups


@dataclass(frozen=True, slots=True)
class Float8(Quantized):
    """A float32 scale for each row, or for each 128 values of K; codes widen exactly to bfloat16.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; blocks: DeepSeek-V3, arXiv:2412.19437.
    """

    def store(self, codes: Codes) -> Packed:
        padded = self.padded(codes.shape[1])
        spare = spare_groups(codes, padded)
        stored = codes.values.dtype
        values = functional.pad(codes.values.view(torch.int8), (0, padded - codes.shape[1]))
        scale = functional.pad(codes.scale, (0, spare), value=1.0)
        return {"weight": pack_int8(values).view(stored), "scale": pack_groups(scale)}

    def restore(self, packed: Packed, out_features: int, in_features: int) -> Codes:
        count = groups(in_features, self.scheme.group)
        return Codes(
            self.scheme,
            unpack_codes(packed["weight"])[:out_features, :in_features],
            unpack_groups(packed["scale"])[:out_features, :count],
        )
