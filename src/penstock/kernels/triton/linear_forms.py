"""The kinds of matrix that `linear` multiplies, and the variant of its kernel that each has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.triton.dequantize import BYTES, DENSE, INT4
from penstock.kernels.triton.linear_tiles import BLOCK, STEP, Kind
from penstock.ops.linear import ROW_CODES
from penstock.ops.rows import is_rows
from penstock.ops.stored import width


@dataclass(frozen=True, slots=True)
class Form:
    """What of a matrix's tensors decides which kernel multiplies it."""

    kind: Kind
    codes: int  # DENSE, BYTES, INT4 or above it
    rows: int  # what rows of x are rounded to, of ROW_CODES; rotated ones are int8 by then
    length: int  # values of K that share a scale which multiplies their sum; 0: none do
    fold: int  # or which multiplies W; 0: none do

    @property
    def part(self) -> int:
        """Elements of a row of W that are multiplied at once."""
        if self.codes == DENSE.value:
            return STEP[self.kind]
        return BLOCK if self.codes >= INT4.value else min(self.length or BLOCK, BLOCK)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What of an operator's arguments is the weight, and how rows meet it."""

    weight: Tensor
    scale: Tensor | None
    zero: Tensor | None
    bias: Tensor | None
    row_codes: int
    levels: int
    outer: Tensor | None
    input_scale: Tensor | None
    gated: bool = False

    @property
    def features(self) -> int:
        """N, of a half where gated."""
        return self.weight.shape[0] // (2 if self.gated else 1)

    @property
    def depth(self) -> int:
        """K as it is stored."""
        return width(self.weight)

    @property
    def groups(self) -> int:
        return 1 if self.scale is None else self.scale.shape[1]

    @property
    def rotated(self) -> bool:
        """Whether rows are rotated before they are rounded."""
        return ROW_CODES[self.row_codes] == "int8_rotated"

    def form(self, x: Tensor) -> Form:
        """Of the kernel for rows like x."""
        if self.scale is None:
            return Form("float32" if x.dtype is torch.float32 else "half", DENSE.value, 0, 0, 0)
        nibbles = self.weight.dtype is torch.uint8
        each = self.depth // self.groups
        folded = bool(self.levels) and each in (16, 32) and self.scale.dtype.itemsize == 1
        length = 0 if folded or self.groups == 1 else each
        if length not in (0, 32, 64) and length % BLOCK:
            raise KernelError(
                f"linear: {length} values of K share a scale, which the kernels for GPUs don't "
                f"have: it must be 32, 64 or a multiple of {BLOCK}, or all of a row."
            )
        kinds: tuple[Kind, Kind, Kind, Kind] = ("w8a16", "w8a8", "w4a16", "w4a8")
        kind = kinds[2 * nibbles + bool(self.row_codes)]
        if ROW_CODES[self.row_codes] == "e4m3":
            kind = "e4m3"
        codes = INT4.value + self.levels if nibbles else BYTES.value
        held = ROW_CODES.index("int8") if self.rotated else self.row_codes
        return Form(kind, codes, held, length, each if folded else 0)

    def check(self, x: Tensor, out_features: int) -> None:
        """Raise KernelError for what the kernels would misread."""
        weight, scale = self.weight, self.scale
        if not is_rows(weight):
            raise KernelError(
                f"linear: a weight {list(weight.shape)} isn't in rows [N, K]: kernels for GPUs "
                "read no panels. Store it with `stored_as(ROWS)`."
            )
        if self.features != out_features:
            raise KernelError(
                f"linear: a weight of {weight.shape[0]} rows{' for gate and up' * self.gated} has "
                f"{self.features} features, not {out_features}."
            )
        if scale is None:
            if weight.dtype is not x.dtype or weight.shape[1] != x.shape[1] or self.row_codes:
                raise KernelError(
                    f"linear: rows [{x.shape[1]}] in {x.dtype} can't be multiplied with a weight "
                    f"{list(weight.shape)} in {weight.dtype} without a scale."
                )
            return
        if not x.shape[1] <= self.depth or self.depth % BLOCK or scale.shape[0] != weight.shape[0]:
            raise KernelError(
                f"linear: codes {list(weight.shape)} in {weight.dtype} with scales "
                f"{list(scale.shape)} don't belong to rows of {x.shape[1]} values: K is padded to "
                f"a multiple of {BLOCK}, and each row has its scales."
            )
        rows = ROW_CODES[self.row_codes]
        integers = weight.dtype in (torch.int8, torch.uint8) and not self.levels
        if (rows.startswith("int8") and not integers) or (
            rows == "e4m3" and weight.dtype is not torch.float8_e4m3fn
        ):
            raise KernelError(f"linear: a weight in {weight.dtype} doesn't meet rows in {rows}.")
        if rows == "none" and x.dtype is not torch.bfloat16:
            raise KernelError(
                f"linear: codes are widened to bfloat16, not to {x.dtype}: float16 can't hold all "
                "that they stand for, and tiles in float32 take more shared memory than there is. "
                "Rows must be bfloat16."
            )
