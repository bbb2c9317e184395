"""Modules whose tensors are filled from a checkpoint, one by one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from penstock.cache.pages import lazy_zeros
from penstock.errors import WeightsError
from penstock.parallel import Part
from penstock.quant import Codes, WeightFormat
from penstock.quant.formats.quantized import Quantized


class Loadable(nn.Module):
    """A leaf module that names the tensors it needs and takes them one at a time.

    Nothing is allocated before a tensor arrives: memory is what the packed weights need.
    """

    elsewhere = False
    """Whether another process has what this module would: nothing is loaded here."""

    @abstractmethod
    def expected(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors this module needs, as a checkpoint stores them."""

    @abstractmethod
    def load(self, name: str, tensor: Tensor | Codes) -> None:
        """Take the tensor called `name`, already checked to have the expected shape."""

    def own(self, name: str, tensor: Tensor) -> None:
        """Keep `tensor` as the frozen parameter `name`."""
        if name in self._parameters:
            del self._parameters[name]
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def restore(self, name: str, stored: Tensor) -> None:
        """Keep `stored` as the parameter `name`: in the form that `load` has given it before."""
        self.own(name, stored)

    @property
    def nbytes(self) -> int:
        """What it keeps once everything has come: values in float32, unless it says otherwise."""
        return 4 * sum(math.prod(shape) for shape in self.expected().values())

    @property
    def keeper(self) -> Loadable:
        """Who has the tensors that this module was given."""
        return self

    @property
    def is_complete(self) -> bool:
        """Whether what it has been given can be taken away: nothing that comes goes into it."""
        return True

    def parameter(self, name: str) -> Tensor:
        """The parameter `name`; an error if it was never loaded."""
        found = self._parameters.get(name)
        if found is None:
            raise WeightsError(f"{type(self).__name__}.{name} was used before it was loaded.")
        return found


class Vector(Loadable):
    """Some learned numbers, float32; own: those that are kept."""

    def __init__(self, size: int, own: range | None = None) -> None:
        super().__init__()
        self.size = size
        self.kept = range(size) if own is None else own

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.size,)}

    @property
    def nbytes(self) -> int:
        return 4 * len(self.kept)

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        self.own(name, as_float32(plain(tensor)[self.kept.start : self.kept.stop]))


class Packing(Loadable):
    """One that has a matrix as its format stores it, `packed`, and perhaps a bias."""

    in_features: int
    out_features: int  # of one half, where gated
    has_bias: bool
    gated: bool
    weight_format: WeightFormat
    part: Part | None  # which rows it has, where ranks share the matrix

    def __init__(self) -> None:
        super().__init__()
        self.packed: dict[str, Tensor] = {}
        self.register_parameter("bias", None)

    @property
    def nbytes(self) -> int:
        matrix = self.weight_format.nbytes(self.out_features, self.in_features)
        return (2 if self.gated else 1) * (matrix + 4 * self.out_features * self.has_bias)

    def whole(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the matrix and its bias, as a checkpoint stores them."""
        rows = self.out_features if self.part is None else self.part.whole
        rows *= 2 if self.gated else 1
        shapes: dict[str, tuple[int, ...]] = {"weight": (rows, self.in_features)}
        if self.has_bias:
            shapes["bias"] = (rows,)
        return shapes

    def own_rows(self, name: str, tensor: Tensor | Codes) -> Tensor | Codes:
        """What it has of a whole matrix or its bias; rounded as all of it is."""
        if self.part is None:
            return tensor
        index, held = self.part.index(self.gated), self.weight_format
        if isinstance(tensor, Codes):
            return tensor.rows(index)
        if name == "weight" and isinstance(held, Quantized) and not held.scheme.rows_apart:
            packed = held.pack(tensor, self.gated)
            return held.codes(packed, self.part.whole, self.in_features, self.gated).rows(index)
        return tensor[index]

    def restore(self, name: str, stored: Tensor) -> None:
        self.own(name, stored)
        if name != "bias":
            self.packed[name] = self.parameter(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        found = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.packed = {part: self.parameter(part) for part in self.packed}  # moved, perhaps
        return found  # type: ignore[no-any-return]


def plain(tensor: Tensor | Codes) -> Tensor:
    """The values of a tensor that is kept as they are."""
    return tensor.dequantize() if isinstance(tensor, Codes) else tensor


def as_float32(tensor: Tensor | Codes) -> Tensor:
    """A float32 copy that doesn't keep a mapped file open."""
    return plain(tensor).to(torch.float32, copy=True).contiguous()


def room_for(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A bank, beside what lies in it; on a CPU in pages of 2 MB, as other weights are."""
    return lazy_zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_empty(shape)
