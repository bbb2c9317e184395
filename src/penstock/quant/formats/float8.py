"""Weights in eight bits of floating point, E4M3 or E5M2; beside E4M3 activations in it too."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from penstock.quant.codes import Codes, groups
from penstock.quant.format import Packed
from penstock.quant.formats.quantized import (
    Quantized,
    restored_input,
    spare_groups,
    stored_input,
)


@dataclass(frozen=True, slots=True)
class Float8(Quantized):
    """A float32 scale for each row, or for each 128 values of K; codes widen exactly to bfloat16.

    Activations in E4M3 are exact in bfloat16 too: both are multiplied as weights alone are, and the
    activations' scale multiplies the sums (`ops.linear`).
    Source: Micikevicius et al. 2022, arXiv:2209.05433; blocks: DeepSeek-V3, arXiv:2412.19437.
    """

    def store(self, codes: Codes) -> Packed:
        padded = self.padded(codes.shape[1])
        scale = functional.pad(codes.scale, (0, spare_groups(codes, padded)), value=1.0)
        values = self.storage.pack_bytes(codes.values.view(torch.int8), padded)
        packed = {"weight": values.view(codes.values.dtype)}
        return packed | {"scale": self.storage.pack_groups(scale), **stored_input(codes)}

    def restore(self, packed: Packed, out_features: int, in_features: int) -> Codes:
        count = groups(in_features, self.scheme.group)
        return Codes(
            self.scheme,
            self.storage.unpack_codes(packed["weight"])[:out_features, :in_features],
            self.storage.unpack_groups(packed["scale"])[:out_features, :count],
            input_scale=restored_input(packed),
        )
