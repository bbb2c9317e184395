"""`WeightFormat`: how one weight matrix is stored and multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from penstock.hardware import Compute
from penstock.ops import Activation
from penstock.quant.codes import Codes
from penstock.quant.formats.storage import Storage

Packed = dict[str, Tensor]
"""A stored matrix: named tensors, the same names for every matrix of a format."""


class WeightFormat(Protocol):
    """Storage of an [N, K] matrix. Formats hold no tensors; modules do.

    gated: the matrix is gate above up, [2·N, K], and its product is act(gate) · up [T, N].
    """

    @property
    def name(self) -> str:
        """What users call it: `bfloat16`, `w4a8`, …"""
        ...

    @property
    def storage(self) -> Storage:
        """How its tensors lie in memory."""
        ...

    @property
    def compute(self) -> Compute:
        """What its products run in: which peak bounds them."""
        ...

    @property
    def row_codes(self) -> int:
        """What activations are rounded to (`ops.linear.ROW_CODES`); 0: nothing."""
        ...

    @property
    def levels(self) -> int:
        """What codes of four bits stand for (`ops.levels`); 0: integers, or there are none."""
        ...

    def pack(self, weight: Tensor, gated: bool = False) -> Packed:
        """Store `weight` [N, K] (or [2·N, K]), any float dtype."""
        ...

    def pack_codes(self, codes: Codes, gated: bool = False) -> Packed:
        """Store a matrix that is quantized already."""
        ...

    def codes(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Codes:
        """What `pack` or `pack_codes` stored; WeightsError where that isn't quantized."""
        ...

    def unpack(
        self, packed: Packed, out_features: int, in_features: int, gated: bool = False
    ) -> Tensor:
        """The matrix that `packed` stands for: the reference of `matmul`."""
        ...

    def matmul(
        self,
        x: Tensor,
        packed: Packed,
        bias: Tensor | None,
        out_features: int,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        activation: Activation = "none",
        gated: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [T, K] → act(norm(x) · Wᵀ + bias) [T, N] in `out_dtype` (x.dtype if None)."""
        ...

    def add_(self, residual: Tensor, x: Tensor, packed: Packed, bias: Tensor | None) -> None:
        """residual [T, N] += x · Wᵀ + bias, in place."""
        ...

    def gather(self, tokens: Tensor, packed: Packed, in_features: int, scale: float) -> Tensor:
        """Rows `tokens` [T] of W times `scale`, [T, K]: for a tied embedding."""
        ...

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes read when the whole matrix is used once."""
        ...

    def stored_as(self, storage: Storage) -> WeightFormat:
        """The same values, lying in memory as `storage` has it."""
        ...


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """The formats of one model's matrices."""

    matrix: WeightFormat  # of the layers
    head: WeightFormat  # of the output head, and of the embedding that is tied to it
    special: Mapping[str, WeightFormat] = field(default_factory=dict)
    """Of matrices that differ, by their module's name in the decoder: `layers.3.mlp.down`, or
    `mlp.down` of every layer's."""

    def of(self, module: str) -> WeightFormat:
        """The format of the matrix in `module`: `head`, `layers.0.attention.qkv`, …"""
        for name in (module, ".".join(module.split(".")[-2:])):
            if name in self.special:
                return self.special[name]
        return self.head if module == "head" else self.matrix

    def stored_as(self, storage: Storage) -> WeightFormats:
        """The same, all of them lying in memory as `storage` has it."""
        special = {module: held.stored_as(storage) for module, held in self.special.items()}
        return WeightFormats(self.matrix.stored_as(storage), self.head.stored_as(storage), special)

    @property
    def name(self) -> str:
        """Of the layers' format, and of others where there are any; rotated, it isn't another."""
        head, own = self.of("head").name, self.matrix.name
        others = dict.fromkeys(f.name for m, f in self.special.items() if m != "head")
        layers = [own, *(name for name in others if name not in (own, f"{own}-rotated"))]
        return " + ".join(layers) + ("" if layers == [head] else f", {head} head")

    @property
    def described(self) -> str:
        """The name, and of which matrices rows are rotated although most aren't."""
        named = self.matrix.name + "-rotated"
        rotated = [module for module, held in self.special.items() if held.name == named]
        return ", ".join([self.name, *(f"{module} rotated" for module in rotated)])
