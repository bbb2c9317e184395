"""What AWQ's and GPTQ's layouts share: integers in words of 32 bits, zero points that are stored.

A module has `qweight` and `qzeros` int32 and `scales` [G, N]; even where its codes are symmetric,
its zero points are written out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.quant.codes import Codes
from penstock.quant.files.layout import (
    Config,
    Integers,
    Tensors,
    check_dtype,
    check_shape,
    finite,
)
from penstock.quant.scheme import Scheme

PARTS = ("qweight", "qzeros", "scales")


def group_size(config: Config, module: str, default: int) -> int:
    """The values of K that share a scale, 0 for all of a row (-1 in files)."""
    size = config.get("group_size", config.get("q_group_size", default))
    if type(size) is not int or size == 0 or size < -1:
        raise UnsupportedModelError(f"quantization_config has group_size={size!r} for {module}.")
    return max(size, 0)


def check_parts(tensors: Tensors, parts: tuple[str, ...], *shapes: tuple[int, int]) -> None:
    """Raise where a module's PARTS haven't these shapes, or aren't words."""
    for part in parts[:2]:
        check_dtype(tensors, part, torch.int32)
    for part, shape in zip(parts, shapes, strict=False):
        check_shape(tensors, part, shape)


@dataclass(frozen=True, slots=True)
class Coding:
    """What config.json says of a module's integers."""

    bits: int
    group: int  # 0: all of a row
    symmetric: bool
    says: str  # where symmetric: what in config.json says so

    def read(
        self,
        tensors: Tensors,
        parts: tuple[str, ...],
        unsigned: Tensor,
        zero: Tensor,
        scheme: Scheme | None,
        column_group: Tensor | None = None,
    ) -> Tensor | Codes:
        """Unsigned integers [N, K] with zero points [N, G] as codes in `scheme`, or as values."""
        middle = 2 ** (self.bits - 1)
        wrong = zero[zero != middle]
        if self.symmetric and wrong.numel():
            raise WeightsError(
                f"{parts[1]}: {self.says}, but {wrong.numel()} zero points aren't {middle}, for "
                f"example {int(wrong[0])}. config.json describes another checkpoint."
            )
        scale = finite(tensors, parts[2]).t().contiguous()
        zeros = None if self.symmetric else zero
        matrix = Integers(self.bits, self.group, unsigned, scale, zeros, column_group)
        return matrix.values() if scheme is None else matrix.codes(scheme)
