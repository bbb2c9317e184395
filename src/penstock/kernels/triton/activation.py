"""Activations, as `ops.linear.ACTIVATIONS` counts them."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_SQRT_2_BY_PI: tl.constexpr = tl.constexpr(0.7978845608028654)
_CUBE: tl.constexpr = tl.constexpr(0.044715)


@triton.jit
def _tanh(x):
    """From the exponential of what is below zero, which never overflows."""
    less = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - less) / (1.0 + less)
    return tl.where(x < 0, -size, size)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """ACTIVATIONS[ACTIVATION] of float32 x."""
    if ACTIVATION == 1:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 2:
        x = 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    elif ACTIVATION == 3:
        x = 0.5 * x * (1.0 + _tanh(_SQRT_2_BY_PI * (x + _CUBE * x * x * x)))
    return x
