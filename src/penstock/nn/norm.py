"""Normalisation layers; weights stay in float32."""

from __future__ import annotations

from torch import Tensor

from penstock import ops
from penstock.nn.parameters import Loadable, as_float32
from penstock.nn.spec import NormSpec
from penstock.quant import Codes


class Norm(Loadable):
    """Root-mean-square or layer normalisation over the last dimension."""

    def __init__(self, dim: int, spec: NormSpec, scale: float = 1.0) -> None:
        """scale: of what it gives, beside the checkpoint's weights."""
        super().__init__()
        self.dim = dim
        self.spec = spec
        self.scale = scale
        self.register_parameter("bias", None)

    def expected(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.dim,)}
        if self.spec.bias:
            shapes["bias"] = (self.dim,)
        return shapes

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        if name == "bias":
            self.own("bias", as_float32(tensor) * self.scale)
        else:
            self.own("weight", (as_float32(tensor) + self.spec.offset) * self.scale)

    def unscaled(self) -> Norm:
        """The same as a checkpoint has it."""
        found = Norm(self.dim, self.spec)
        for name in self.expected():
            found.own(name, self.parameter(name) / self.scale)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [T, D]."""
        weight = self.parameter("weight")
        if self.spec.kind == "layer":
            return ops.layer_norm(x, weight, self._parameters["bias"], self.spec.eps)
        return ops.rms_norm(x, weight, self.spec.eps)


class TurnedNorm(Norm):
    """A head's norm, whose weights are for what is rotated (`ops.rotary_cache`): [1, D]."""

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        self.own(name, as_float32(tensor)[None] + self.spec.offset)


class Scale(Loadable):
    """A weight for each channel of what a block gives.

    Source: Touvron et al. 2021, arXiv:2103.17239 (LayerScale).
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.dim,)}

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        self.own(name, as_float32(tensor))

    def forward(self, x: Tensor) -> Tensor:
        """Scale x [T, D]."""
        return (x.float() * self.parameter("weight")).to(x.dtype)
