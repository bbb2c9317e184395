"""What stored codes are multiplied as, made in registers: exact, so that no bit depends on where.

bfloat16 holds each integer up to 256, each value of eight bits, and levels of four as `ops.levels`
has them, times the powers of two or E4M3 that scale 16 or 32 of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.triton.launch import INTERPRETED

DENSE: tl.constexpr = tl.constexpr(0)
BYTES: tl.constexpr = tl.constexpr(1)
"""int8 or float8, which a tensor's own dtype tells."""
NIBBLES: tl.constexpr = tl.constexpr(2)
"""Codes of four bits, two of which are in a byte."""


@triton.jit
def exact(values, dtype: tl.constexpr):
    """Values that `dtype` holds; float32 in the interpreter, which multiplies nothing below."""
    if INTERPRETED:
        held = values.to(tl.float32)
    else:
        held = values.to(dtype)
    return held


@triton.jit
def nibbles(codes, HIGH: tl.constexpr):
    """The low or the high halves of bytes, int16."""
    if HIGH:
        half = codes >> 4
    else:
        half = codes & 15
    return half.to(tl.int16)


@triton.jit
def multipliers(scale):
    """Scales as float32; uint8 are exponents of two."""
    if scale.dtype == tl.uint8:
        value = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        value = scale.to(tl.float32)
    return value


@triton.jit
def widen_integers(codes, zero, dtype: tl.constexpr):
    """Nibbles less their zero points."""
    return exact(codes - zero, dtype)


@triton.jit
def widen_bytes(codes, zero, dtype: tl.constexpr):
    """int8 less its zero points."""
    return exact(codes.to(tl.int16) - zero, dtype)


@triton.jit
def widen_levels(codes, table, dtype: tl.constexpr):
    """Nibbles as the values of a table [16]."""
    return exact(tl.load(table + codes.to(tl.int32)), dtype)


@triton.jit
def repeated(each, COUNT: tl.constexpr, TIMES: tl.constexpr):
    """[F, COUNT] → [F, COUNT · TIMES], each value TIMES in turn."""
    return tl.reshape(
        tl.broadcast_to(each[:, :, None], (each.shape[0], COUNT, TIMES)),
        (each.shape[0], COUNT * TIMES),
    )
