"""Weights in four bits that stand for sixteen levels, beside activations in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import WeightsError
from penstock.ops.levels import LEVELS
from penstock.ops.stored import powers
from penstock.quant.codes import Codes, groups
from penstock.quant.format import Packed
from penstock.quant.formats.quantized import Quantized, half_if_exact, spare_groups


@dataclass(frozen=True, slots=True)
class Levels(Quantized):
    """NF4 with float16 scales; MXFP4 with powers of two; NVFP4 with E4M3 and a float32 beyond.

    Products are computed with the levels as bfloat16 holds them: E2M1's (of MXFP4 and NVFP4) are
    exact, NF4's change by 2⁻⁹ of each at most, and `unpack` has what they have become.
    """

    @property
    def levels(self) -> int:
        return LEVELS.index("nf4" if self.scheme.kind == "nf4" else "e2m1")

    def store(self, codes: Codes) -> Packed:
        padded = self.padded(codes.shape[1])
        nothing = 7 if self.scheme.kind == "nf4" else 0
        scale = functional.pad(codes.scale, (0, spare_groups(codes, padded)), value=1.0)
        packed = {
            "weight": self.storage.pack_nibbles(codes.values, padded, nothing),
            "scale": self.storage.pack_groups(self._stored(scale)),
        }
        if codes.outer is not None:
            packed["outer"] = self.storage.pack_groups(codes.outer[:, None])
        return packed

    def _stored(self, scale: Tensor) -> Tensor:
        match self.scheme.kind:
            case "nf4":
                return half_if_exact(scale)
            case "mxfp4":
                stored = (scale.view(torch.int32) >> 23).clamp(0, 254).to(torch.uint8)
                same = (powers(stored) == scale) | ((scale >= 0) & (scale <= 2.0**-127))
                what = "a power of two from 2^-127 to 2^127"
            case _:
                stored = scale.clamp(-448, 448).to(torch.float8_e4m3fn)
                same, what = stored.float() == scale, "a value of E4M3"
        if not bool(same.all()):
            raise WeightsError(
                f"{int((~same).sum())} of {scale.numel()} scales in {self.name} aren't {what}, for "
                f"example {float(scale[~same][0]):.6g}: this isn't a matrix in {self.name}."
            )
        return stored

    def restore(self, packed: Packed, out_features: int, in_features: int) -> Codes:
        n, count = out_features, groups(in_features, self.scheme.group)
        scale, outer = self.storage.unpack_groups(packed["scale"])[:n, :count], packed.get("outer")
        return Codes(
            self.scheme,
            self.storage.unpack_codes(packed["weight"])[:n, :in_features],
            powers(scale) if scale.dtype is torch.uint8 else scale.float(),
            None,
            None if outer is None else self.storage.unpack_groups(outer)[:n, 0],
        )
