"""Activations of float32, for kernels that end in one."""

from __future__ import annotations

import triton
import triton.language as tl

_ROOT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_ROOT_2_OVER_PI: tl.constexpr = tl.constexpr(0.7978845608028654)


@triton.jit
def tanh(x):
    """tanh of float32 within 2^-22 of its size.

    (1 − e) / (1 + e) with e = exp(−2·|x|) cancels near zero: below 1/2 a polynomial takes over,
    Chebyshev's of (tanh(x) / x − 1) / x² in x².
    """
    size = tl.abs(x)
    e = tl.exp(-2.0 * size)
    far = tl.div_rn(1.0 - e, 1.0 + e)
    small = tl.minimum(size, 0.5)
    square = small * small
    near = -0.0068822563625872135
    near = near * square + 0.02144382894039154
    near = near * square - 0.05392984300851822
    near = near * square + 0.13333210349082947
    near = near * square - 0.3333333134651184
    near = near * square * small + small
    value = tl.where(size < 0.5, near, far)
    return tl.where(x < 0, -value, value)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """`ops.linear.activate`: ACTIVATION counts in ops.ACTIVATIONS."""
    if ACTIVATION == 1:
        return tl.div_rn(x, 1.0 + tl.exp(-x))
    if ACTIVATION == 2:
        return 0.5 * x * (1.0 + tl.erf(x * _ROOT_HALF))
    if ACTIVATION == 3:
        return 0.5 * x * (1.0 + tanh(_ROOT_2_OVER_PI * (x + 0.044715 * x * x * x)))
    if ACTIVATION == 4:
        clamped = tl.where(x > 7.0, 7.0, x)  # so that a NaN stays
        return tl.div_rn(clamped, 1.0 + tl.exp(-1.702 * clamped))
    if ACTIVATION == 5:
        return tl.div_rn(x, 1.0 + tl.exp(-1.702 * x))
    if ACTIVATION == 6:
        kept = tl.where(x < 0.0, 0.0, x)  # so that a NaN stays
        return kept * kept
    return x


@triton.jit
def gated_by(gate, up, ACTIVATION: tl.constexpr):
    """`ops.linear.gated_by`."""
    if ACTIVATION == 4:
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return activated(gate, ACTIVATION) * up
