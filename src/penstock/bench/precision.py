"""How finely a loaded variant holds its values: whether one can be what another is held against."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch

from penstock.quant import WeightFormat, WeightFormats

TF32_BITS = 19
_PLAIN = {"float32": 32, "float16": 17, "bfloat16": 16}
"""Bits of a value that isn't quantized; float16 has three more than bfloat16 below the point."""
_SIZE = 4096
"""Of a square matrix whose bytes say what a format takes of each value."""


@dataclass(frozen=True, slots=True)
class Bits:
    """Of each value, scales aside."""

    fewest: int  # of the layers' matrices, where formats are mixed
    most: int
    head: int
    activations: int  # that matrices are multiplied with
    cache: int

    def below(self, other: Bits) -> bool:
        """Whether nothing here is finer than there, and something is coarser."""
        pairs = list(zip(astuple(self), astuple(other), strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def bits_of(formats: WeightFormats, activations: torch.dtype, cache: str, by_tf32: bool) -> Bits:
    """Of a model's weights, activations and cache (the name of what it stores).

    by_tf32: what is multiplied is rounded to it.
    """
    own = [formats.matrix, *(f for m, f in formats.special.items() if m != "head")]
    weights = [_of(held) for held in own]
    plain = _PLAIN[str(activations).removeprefix("torch.")]
    rows = min(8 if held.row_codes else plain for held in own)
    kept = _PLAIN.get(cache) or (4 if cache in ("int4", "kivi") else 8)
    most = TF32_BITS if by_tf32 else 32
    found = min(weights), max(weights), _of(formats.head), rows, kept
    return Bits(*(min(value, most) for value in found))


def remark(one: Bits | None, other: Bits | None, names: tuple[str, str]) -> tuple[str, ...]:
    """That the first, which the second is held against, is the coarser of both; or nothing."""
    if one is None or other is None or not one.below(other):
        return ()
    return (
        f"{names[0]} is less precise than {names[1]}, so most of this drift is its own rounding. "
        "Hold the less precise one against the other.",
    )


def _of(held: WeightFormat) -> int:
    return _PLAIN.get(held.name) or 8 * held.nbytes(_SIZE, _SIZE) // _SIZE**2
