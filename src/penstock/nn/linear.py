"""Linear layers over any weight format, and the embedding that may share one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import ops
from penstock.nn.norm import Norm
from penstock.nn.parameters import Loadable, Packing, as_float32
from penstock.ops import ACTIVATIONS, Activation
from penstock.ops.panels import COLUMNS, round_up
from penstock.parallel import Gather, Part, Share
from penstock.quant import Codes, Packed, WeightFormat

_ROWS = 1 << 12
"""Of a quantized table that are made values of at once."""


@dataclass(frozen=True, slots=True)
class Change:
    """What adapters add to a matrix's products, before an activation (`ops.lora_add_`)."""

    down: Tensor  # of each slot, panels [A, …]
    up: Tensor
    scaling: Tensor  # [A] float32
    bias: Tensor | None  # the matrix's own, in the order of its panels


class Linear(Packing):
    """y = act(norm(x) · Wᵀ + b) with W [N, K] stored in `weight_format`.

    gated: W is gate above up, [2·N, K], and y = act(gate) · up. part: which rows of W this rank
    has, where several processes compute a step together; None: all.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        weight_format: WeightFormat,
        *,
        activation: Activation = "none",
        gated: bool = False,
        out_dtype: torch.dtype | None = None,
        part: Part | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features if part is None else part.size
        self.part = part
        self.has_bias = bias
        self.weight_format = weight_format
        self.activation: Activation = activation
        self.gated = gated
        self.out_dtype = out_dtype
        self.change: Change | None = None

    def expected(self) -> dict[str, tuple[int, ...]]:
        return self.whole()

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        tensor = self.own_rows(name, tensor)
        if isinstance(tensor, Codes):
            self.hold(self.weight_format.pack_codes(tensor, self.gated))
        elif name == "bias":
            self.own("bias", as_float32(tensor))
        else:
            self.hold(self.weight_format.pack(tensor, self.gated))

    def hold(self, packed: Packed) -> None:
        """Take the matrix as it is stored."""
        for part, stored in packed.items():
            self.own(part, stored)
            self.packed[part] = self.parameter(part)

    @property
    def columns(self) -> int:
        """Of a product that takes no gate along: panels of gate and up, in turns."""
        return 2 * round_up(self.out_features, COLUMNS) if self.gated else self.out_features

    def forward(
        self, x: Tensor, norm: Norm | None = None, adapters: Tensor | None = None
    ) -> Tensor:
        """x [T, K] → [T, N], through `norm` first; adapters: of a step, `Step.adapters`."""
        if adapters is not None and self.change is not None:
            return self._changed(x if norm is None else norm(x), self.change, adapters)
        weight = None
        if norm is not None:
            if norm.spec.kind == "rms":
                weight = norm.parameter("weight")
            else:
                x = norm(x)
        y = self.weight_format.matmul(
            x,
            self.packed,
            self._parameters["bias"],
            self.out_features,
            norm=weight,
            eps=0.0 if norm is None else norm.spec.eps,
            activation=self.activation,
            gated=self.gated,
            out_dtype=self.out_dtype,
        )
        gather = None if self.part is None else self.part.gather
        return y if gather is None else gather(y)

    def _changed(self, x: Tensor, change: Change, adapters: Tensor) -> Tensor:
        """The same with what adapters add: step by step, to the bits of one operator for all."""
        acts = self.activation != "none"
        out_dtype = None if acts else self.out_dtype
        packed, columns = self.packed, self.columns
        y = self.weight_format.matmul(x, packed, change.bias, columns, out_dtype=out_dtype)
        ops.lora_add_(y, x, change.down, change.up, adapters, change.scaling)
        if not acts:
            return y
        activation = ACTIVATIONS.index(self.activation)
        return ops.gate(y, activation, self.gated, self.out_features, self.out_dtype)

    def add_(self, residual: Tensor, x: Tensor, adapters: Tensor | None = None) -> None:
        """residual [T, N] += x · Wᵀ + b in place; for one without an activation."""
        if adapters is not None and self.change is not None:
            ops.add_(residual, self._changed(x, self.change, adapters))
            return
        if self.part is not None:
            ops.add_(residual, self(x))
            return
        self.weight_format.add_(residual, x, self.packed, self._parameters["bias"])


class Embedding(Loadable):
    """Token embedding with a plain [V, D] table; share: of its columns, among ranks."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        dtype: torch.dtype,
        scale: float = 1.0,
        share: Share | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.dim = dim
        self.columns = range(dim) if share is None else share.own
        self.gather = None if share is None else Gather(share)
        self.dtype = dtype
        self.scale = scale

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.vocab_size, self.dim)}

    @property
    def nbytes(self) -> int:
        return self.vocab_size * len(self.columns) * self.dtype.itemsize

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        own = slice(self.columns.start, self.columns.stop)
        if not isinstance(tensor, Codes):
            self.own(name, tensor[:, own].to(self.dtype, copy=True).contiguous())
            return
        where = tensor.values.device
        table = torch.empty(self.vocab_size, len(self.columns), dtype=self.dtype, device=where)
        for at in range(0, self.vocab_size, _ROWS):  # all in float32 would be several times that
            some = slice(at, at + _ROWS)
            table[some] = tensor.rows(some).dequantize()[:, own]
        self.own(name, table)

    def forward(self, tokens: Tensor) -> Tensor:
        y = ops.embedding(tokens, self.parameter("weight"), len(self.columns), self.scale)
        return y if self.gather is None else self.gather(y)


class TiedEmbedding(torch.nn.Module):
    """Token embedding that reads the rows of the output head: stored once, packed."""

    def __init__(self, head: Linear, scale: float = 1.0) -> None:
        super().__init__()
        self.head = [head]  # in a list: the head is a child of the decoder, not of this module
        self.scale = scale

    def forward(self, tokens: Tensor) -> Tensor:
        head = self.head[0]
        held, packed, dim = head.weight_format, head.packed, head.in_features
        gather = None if head.part is None else head.part.gather
        if gather is None:
            return held.gather(tokens, packed, dim, self.scale)
        return gather.rows(tokens, packed, dim, self.scale, held.levels)
