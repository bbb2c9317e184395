"""What every quantized format shares: rounding, gates, codes in and out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.hardware import Compute
from penstock.ops.linear import ROW_CODES
from penstock.ops.stored import unpack_quantized
from penstock.quant.codes import Codes, groups
from penstock.quant.format import Packed, WeightFormat
from penstock.quant.formats.operators import OperatorFormat
from penstock.quant.formats.storage import PANELS, Storage
from penstock.quant.methods.rtn import quantize
from penstock.quant.scheme import Activations, Scheme

_COMPUTE: dict[str, Compute] = {
    "none": "bfloat16",
    "int8": "int8",
    "int8_rotated": "int8",
    "int8_blocks": "int8",
    "e4m3": "float8",
}
"""What products run in, by what rows are rounded to."""

_ROW_CODES: dict[Activations, int] = {
    "float": ROW_CODES.index("none"),
    "int8": ROW_CODES.index("int8"),
    "int8_rotated": ROW_CODES.index("int8_rotated"),
    "int8_blocks": ROW_CODES.index("int8_blocks"),
    "int8_static": ROW_CODES.index("int8"),
    "fp8": ROW_CODES.index("e4m3"),
    "fp8_static": ROW_CODES.index("e4m3"),
}

_WHOLE = ("input_scale",)
"""Tensors of the whole matrix: the halves of a gate share them."""


@dataclass(frozen=True, slots=True)
class Quantized(OperatorFormat):
    """Codes in bytes beside their scales. Subclasses store and restore one matrix.

    K is padded to whole groups and lines; what lies there is multiplied by zeros.
    """

    scheme: Scheme
    storage: Storage = PANELS

    @property
    def name(self) -> str:
        return self.scheme.name

    @property
    def compute(self) -> Compute:
        compute = _COMPUTE[ROW_CODES[self.row_codes]]
        return "int4" if compute == "int8" and self.scheme.kind == "int4" else compute

    @property
    def row_codes(self) -> int:
        return _ROW_CODES[self.scheme.activations]

    def padded(self, in_features: int) -> int:
        """K as it is stored."""
        return self.storage.padded(in_features, self.scheme.group)

    def store(self, codes: Codes) -> Packed:
        """The tensors of a matrix without a gate."""
        raise NotImplementedError

    def restore(self, packed: Packed, out_features: int, in_features: int) -> Codes:
        """What `store` was given."""
        raise NotImplementedError

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        parts = weight.chunk(2) if gated else (weight,)  # gate's values tell nothing of up's
        return self.pack_codes(Codes.stack([quantize(part, self.scheme) for part in parts]), gated)

    def pack_codes(self, codes: Codes, gated: bool = False) -> Packed:
        if codes.scheme.stored != self.scheme.stored:
            raise WeightsError(f"Codes in {codes.scheme.name} can't be stored as {self.name}.")
        _check(codes)
        if not gated:
            return self.store(codes)
        half = codes.shape[0] // 2
        gate, up = (self.store(codes.rows(s)) for s in (slice(half), slice(half, None)))
        return {n: t if n in _WHOLE else self.storage.join(t, up[n]) for n, t in gate.items()}

    def codes(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Codes:
        if not gated:
            return self.restore(packed, out_features, in_features)
        parts = [self.restore(part, out_features, in_features) for part in self._halves(packed)]
        return Codes.stack(parts)

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        if gated:
            parts = [self.unpack(part, out_features, in_features) for part in self._halves(packed)]
            return torch.cat(parts)
        scale, zero, outer = packed["scale"], packed.get("zero"), packed.get("outer")
        return unpack_quantized(
            packed["weight"], scale, zero, self.levels, outer, out_features, in_features
        )

    def nbytes(self, out_features: int, in_features: int) -> int:
        rows, k = self.storage.stored_rows(out_features), self.padded(in_features)
        bits = k * self.scheme.bits + groups(k, self.scheme.group) * self.scheme.group_bits
        return rows * (bits + self.scheme.row_bits) // 8

    def stored_as(self, storage: Storage) -> WeightFormat:
        scheme = self.scheme
        if storage != PANELS and scheme.activations == "int8_blocks":  # no GPU's kernel has it
            scheme = scheme.stored
        return replace(self, scheme=scheme, storage=storage)

    def _halves(self, packed: Packed) -> list[Packed]:
        half = self.storage.half
        return [{n: t if n in _WHOLE else half(t, i) for n, t in packed.items()} for i in (0, 1)]


def spare_groups(codes: Codes, padded: int) -> int:
    """How many groups of padding follow those of K."""
    return groups(padded, codes.scheme.group) - codes.scale.shape[1]


def stored_input(codes: Codes) -> Packed:
    """The scale of static activations, as operators take it."""
    if codes.input_scale is None:
        return {}
    return {"input_scale": torch.tensor([codes.input_scale], dtype=torch.float32)}


def restored_input(packed: Packed) -> float | None:
    """What `stored_input` was given."""
    return float(packed["input_scale"]) if "input_scale" in packed else None


def half_if_exact(scale: Tensor) -> Tensor:
    """Scales in float16 where that changes none of them, else in float32."""
    half = scale.to(torch.float16)
    return half if torch.equal(half.float(), scale) else scale


def _check(codes: Codes) -> None:
    n, k = codes.shape
    bad = int((~codes.scale.isfinite()).sum())
    if codes.outer is not None:
        bad += int((~codes.outer.isfinite()).sum())
    if codes.values.is_floating_point():
        bad += int((~codes.values.float().isfinite()).sum())
    if bad:
        raise WeightsError(
            f"{bad} scales or values of a matrix [{n}, {k}] in {codes.scheme.name} are NaN or "
            "infinite. The checkpoint is damaged."
        )
    given = codes.input_scale
    if given is not None and not (math.isfinite(given) and given > 2.0**-126):
        raise WeightsError(
            f"A matrix [{n}, {k}] in {codes.scheme.name} has activations with the scale {given}, "
            "which isn't a positive number of float32. Calibrate it again."
        )
