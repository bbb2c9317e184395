"""What every format shares: the operators take the stored tensors as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock import ops
from penstock.ops import ACTIVATIONS, Activation
from penstock.quant.format import Packed
from penstock.quant.formats.storage import Storage

_INDEX: dict[Activation, int] = {name: i for i, name in enumerate(ACTIVATIONS)}


class OperatorFormat:
    """Tensors `weight` and, where quantized, `scale` and perhaps `zero`, `outer`, `input_scale`.

    `ops.linear` says what they are.
    """

    __slots__ = ()
    storage: Storage

    @property
    def row_codes(self) -> int:
        """What activations are rounded to, if anything (`ops.linear.ROW_CODES`)."""
        return 0

    @property
    def levels(self) -> int:
        """What codes of four bits stand for, if not integers (`ops.levels`)."""
        return 0

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
        product = ops.linear if self.storage.ordered else ops.linear_unordered
        return product(
            x,
            packed["weight"],
            packed.get("scale"),
            packed.get("zero"),
            bias,
            out_features,
            self.row_codes,
            norm,
            eps,
            _INDEX[activation],
            gated,
            out_dtype,
            self.levels,
            packed.get("outer"),
            packed.get("input_scale"),
        )

    def add_(self, residual: Tensor, x: Tensor, packed: Packed, bias: Tensor | None) -> None:
        product = ops.linear_add_ if self.storage.ordered else ops.linear_unordered_add_
        product(
            residual,
            x,
            packed["weight"],
            packed.get("scale"),
            packed.get("zero"),
            bias,
            self.row_codes,
            self.levels,
            packed.get("outer"),
            packed.get("input_scale"),
        )

    def gather(self, tokens: Tensor, packed: Packed, in_features: int, scale: float) -> Tensor:
        return ops.embedding(
            tokens,
            packed["weight"],
            in_features,
            scale,
            packed.get("scale"),
            packed.get("zero"),
            self.levels,
            packed.get("outer"),
        )
