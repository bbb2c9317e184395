"""What stored codes are multiplied as, made in registers: exact, so that no bit depends on where.

bfloat16 holds each integer up to 256, each value of eight bits, and levels of four as `ops.levels`
has them, times the powers of two or E4M3 that scale 16 or 32 of them.

Codes of four bits are widened four at a time by a few instructions of PTX: where matrices are read
at full bandwidth, a multiprocessor has three to spare for each code. The interpreter knows no PTX
and makes the same values in its own way.
Source: bits placed under an exponent of 2^7 and less that are integers: Kim et al. 2022,
arXiv:2211.10017; bytes looked up by `prmt`: PTX ISA 9.7.9.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.kernels.triton.launch import INTERPRETED
from penstock.ops.levels import LEVELS, table

DENSE: tl.constexpr = tl.constexpr(0)
BYTES: tl.constexpr = tl.constexpr(1)
"""int8 or float8, which a tensor's own dtype tells."""
INT4: tl.constexpr = tl.constexpr(2)
NF4: tl.constexpr = tl.constexpr(2 + LEVELS.index("nf4"))
E2M1: tl.constexpr = tl.constexpr(2 + LEVELS.index("e2m1"))
"""INT4, and `ops.levels` after it, have two codes in a byte."""


def _program(*lines: str) -> str:
    """PTX with registers of its own."""
    return "\n".join(("{", ".reg .b32 w, a, b, c, d, m;", *lines, "}"))


def _integers(high: bool, centred: bool) -> str:
    """Four nibbles as bfloat16: 128 + code, or code − 8."""
    lines = [f"shr.u32 w, $2, {4 * high};", "mov.b32 c, 0x43084308;"]  # 136, twice
    for out, bytes_ in (("$0", "0x4140"), ("$1", "0x4342")):
        lines += [f"prmt.b32 a, w, 0x43434343, {bytes_};", "and.b32 a, a, 0xff0fff0f;"]
        lines += [f"sub.bf16x2 {out}, a, c;" if centred else f"mov.b32 {out}, a;"]
    return _program(*lines)


def _bytes(high: bool, centred: bool) -> str:
    """Four nibbles as int8: the code, or code − 8. No byte borrows from the next."""
    lines = [f"shr.u32 w, $1, {4 * high};", "and.b32 a, w, 0x0f0f0f0f;"]
    if centred:
        lines += ["or.b32 a, a, 0x80808080;", "sub.u32 a, a, 0x08080808;"]
        lines += ["xor.b32 a, a, 0x80808080;"]
    return _program(*lines, "mov.b32 $0, a;")


def _e2m1(high: bool) -> str:
    """Four nibbles of sign, exponent and mantissa as bfloat16: their bits where bfloat16 has its
    own, times 2^126 for the difference of biases. Denormals become what they should."""
    lines = [f"shl.b32 w, $2, {4 - 4 * high};", "mov.b32 c, 0x7e807e80;"]
    for out, bytes_ in (("$0", "0x1404"), ("$1", "0x3424")):
        lines += [f"prmt.b32 a, w, 0, {bytes_};", "shr.u32 b, a, 6;", "and.b32 b, b, 0x01c001c0;"]
        lines += ["and.b32 a, a, 0x80008000;", "or.b32 a, a, b;", f"mul.bf16x2 {out}, a, c;"]
    return _program(*lines)


def _looked_up(levels: int, high: bool) -> str:
    """Four nibbles as what a table of bfloat16 has: its low and its high bytes, each in two halves
    that three bits of a code choose from, while the fourth chooses the half."""
    bits = [int(v) & 0xFFFF for v in table(levels).bfloat16().view(torch.int16).tolist()]
    low, high_bytes = ([b >> s & 255 for b in bits] for s in (0, 8))
    lines = [f"shr.u32 w, $2, {4 * high};", "and.b32 a, w, 0x0f0f0f0f;"]
    lines += ["shl.b32 m, a, 4;", "prmt.b32 m, m, 0, 0xba98;"]  # the fourth bit, eight times
    lines += ["shr.u32 b, a, 4;", "or.b32 b, b, a;", "prmt.b32 b, b, 0, 0x4420;"]
    lines += ["and.b32 b, b, 0x7777;"]
    for out, held in (("w", low), ("a", high_bytes)):
        words = [f"0x{int.from_bytes(held[i : i + 4], 'little'):08x}" for i in (0, 4, 8, 12)]
        lines += [f"prmt.b32 c, {words[0]}, {words[1]}, b;"]
        lines += [f"prmt.b32 d, {words[2]}, {words[3]}, b;", f"lop3.b32 {out}, m, d, c, 0xca;"]
    return _program(*lines, "prmt.b32 $0, w, a, 0x5140;", "prmt.b32 $1, w, a, 0x7362;")


BIASED: tl.constexpr = tl.constexpr((_integers(False, False), _integers(True, False)))
CENTRED: tl.constexpr = tl.constexpr((_integers(False, True), _integers(True, True)))
BYTES_OF_CODES: tl.constexpr = tl.constexpr((_bytes(False, False), _bytes(True, False)))
BYTES_CENTRED: tl.constexpr = tl.constexpr((_bytes(False, True), _bytes(True, True)))
OF_NF4: tl.constexpr = tl.constexpr((_looked_up(1, False), _looked_up(1, True)))
OF_E2M1: tl.constexpr = tl.constexpr((_e2m1(False), _e2m1(True)))
"""Of low and of high nibbles."""

_TABLES: tl.constexpr = tl.constexpr((tuple(table(1).tolist()), tuple(table(2).tolist())))


@triton.jit
def exact(values, dtype: tl.constexpr):
    """Values that `dtype` holds; float32 in the interpreter, which multiplies nothing below."""
    return values.to(tl.float32) if INTERPRETED else values.to(dtype)


@triton.jit
def multipliers(scale):
    """Scales as float32; uint8 are exponents of two."""
    if scale.dtype == tl.uint8:
        value = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        value = scale.to(tl.float32)
    return value


@triton.jit
def _interpreted(codes, zero, HAS_ZERO: tl.constexpr, CODES: tl.constexpr, HIGH: tl.constexpr):
    """Nibbles of bytes as float32."""
    code = ((codes >> 4) if HIGH else (codes & 15)).to(tl.float32)
    if CODES == INT4:
        value = code - zero.to(tl.float32) if HAS_ZERO else code - 8.0
    else:
        value = code * 0.0
        for i in tl.static_range(16):
            value = tl.where(code == i, _TABLES.value[CODES - NF4][i], value)
    return value


@triton.jit
def _as_bytes(codes, zero, HAS_ZERO: tl.constexpr, HIGH: tl.constexpr):
    """int4 as int8."""
    ASM: tl.constexpr = BYTES_OF_CODES[HIGH] if HAS_ZERO else BYTES_CENTRED[HIGH]
    value = tl.inline_asm_elementwise(ASM, "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4)
    return value - zero.to(tl.int8) if HAS_ZERO else value


@triton.jit
def _as_floats(codes, zero, HAS_ZERO: tl.constexpr, CODES: tl.constexpr, HIGH: tl.constexpr):
    """Nibbles as bfloat16."""
    OF_INTEGERS: tl.constexpr = BIASED[HIGH] if HAS_ZERO else CENTRED[HIGH]
    OF_LEVELS: tl.constexpr = OF_NF4[HIGH] if CODES == NF4 else OF_E2M1[HIGH]
    ASM: tl.constexpr = OF_INTEGERS if CODES == INT4 else OF_LEVELS
    value = tl.inline_asm_elementwise(
        ASM, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
    )
    return value - (zero.to(tl.float32) + 128.0).to(tl.bfloat16) if HAS_ZERO else value


@triton.jit
def widen_nibbles(
    codes, zero, HAS_ZERO: tl.constexpr, CODES: tl.constexpr, HIGH: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """The low or the high halves of bytes as what they stand for, in `dtype`.

    zero: of int4; 8 unless HAS_ZERO.
    """
    if INTERPRETED:
        value = _interpreted(codes, zero, HAS_ZERO, CODES, HIGH)
    elif dtype == tl.int8:
        value = _as_bytes(codes, zero, HAS_ZERO, HIGH)
    else:
        value = _as_floats(codes, zero, HAS_ZERO, CODES, HIGH).to(dtype)
    return value


@triton.jit
def widen_bytes(codes, zero, HAS_ZERO: tl.constexpr, dtype: tl.constexpr):
    """int8 less its zero points, or what float8 and int8 without them hold."""
    return exact(codes.to(tl.int16) - zero, dtype) if HAS_ZERO else exact(codes, dtype)


@triton.jit
def repeated(each, COUNT: tl.constexpr, TIMES: tl.constexpr):
    """[F, COUNT] → [F, COUNT · TIMES], each value TIMES in turn."""
    return tl.reshape(
        tl.broadcast_to(each[:, :, None], (each.shape[0], COUNT, TIMES)),
        (each.shape[0], COUNT * TIMES),
    )
