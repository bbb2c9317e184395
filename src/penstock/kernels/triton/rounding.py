"""Rounding to nearest, ties to even: as torch rounds, on a GPU and in Triton's interpreter.

The interpreter cuts float32 off where it should round to bfloat16, and loses the carry where it
rounds to E4M3: there both are made from integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.launch import INTERPRETED

_TO_INTEGER: tl.constexpr = tl.constexpr(1.5 * 2**23)
_TO_LEAST_E4M3: tl.constexpr = tl.constexpr(1.5 * 2**14)


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


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 x as the nearest value of a float type of 16 bits or more."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            bits = x.to(tl.uint32, bitcast=True)
            upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            upper = tl.where(is_number(x), upper, 0x7FC0)
            return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def narrow_e4m3(x):
    """float32 x, NaN or within ±448, as the nearest value of E4M3."""
    if INTERPRETED:
        sign = x.to(tl.uint32, bitcast=True) >> 31 << 7
        size = tl.abs(x)
        bits = size.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = ((size + _TO_LEAST_E4M3) - _TO_LEAST_E4M3) * 512.0  # below the least normal
        code = tl.where(size < 0.015625, small.to(tl.uint32), normal) | sign
        code = tl.where(is_number(x), code, 0x7F)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)
