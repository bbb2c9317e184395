"""Rounding to nearest, ties to even: as torch rounds, on a GPU and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2**23)


@triton.jit
def is_number(x):
    """Whether x is one: only a NaN differs from itself."""
    return x == x  # noqa: PLR0124


@triton.jit
def magnitude(x):
    """|x| of float32 as an integer in the same order, a NaN's above all others'."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def round_even(x):
    """The nearest integer to x, still float32; |x| ≤ 2^22.

    Above 2^23 float32 has no fractions: adding that much rounds, by the format's own rule.
    """
    return (x + _TO_INTEGER) - _TO_INTEGER
