"""What stored codes are multiplied as, made in registers: exact, so that no bit depends on where.

bfloat16 holds each integer up to 256, each value of eight bits, and levels of four as `ops.levels`
has them, times the powers of two or E4M3 that scale 16 or 32 of them.

Codes of four bits lie four in a word of 16 bits (`ops.rows`). One of each of two words is widened
at once, in the register that holds both: where matrices are read at full bandwidth, a
multiprocessor has three instructions to spare for each code. The interpreter knows no PTX and makes
the same values in its own way.
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
"""INT4, and `ops.levels` after it, have four codes in a word of 16 bits."""


def _program(*lines: str) -> str:
    """PTX with registers of its own."""
    return "\n".join(("{", ".reg .b32 w, a, b, c, d, m;", *lines, "}"))


def _low(source: str, part: int) -> list[str]:
    """w: code `part` of both words of a register, in the low bits of each."""
    shift = [f"shr.u32 w, {source}, {4 * part};"] if part else [f"mov.b32 w, {source};"]
    return [*shift, "and.b32 w, w, 0x000f000f;"]


def _four(part: int, first: int) -> list[str]:
    """a: codes of the words of two registers, as bytes."""
    lines = [*_low(f"${first}", part), "mov.b32 a, w;", *_low(f"${first + 1}", part)]
    return [*lines, "prmt.b32 a, a, w, 0x6420;"]


def _integers(part: int, centred: bool) -> str:
    """A code of each of two words as bfloat16: 128 + code, or code − 8."""
    lines = [f"shr.u32 w, $1, {4 * part};", "lop3.b32 a, w, 0x000f000f, 0x43004300, 0xea;"]
    lines += ["mov.b32 c, 0x43084308;"]  # 136, twice
    return _program(*lines, "sub.bf16x2 $0, a, c;" if centred else "mov.b32 $0, a;")


def _bytes(part: int, centred: bool) -> str:
    """A code of each of four words as int8: itself, or less 8. No byte borrows from the next."""
    lines = _four(part, 1)
    if centred:
        lines += ["or.b32 a, a, 0x80808080;", "sub.u32 a, a, 0x08080808;"]
        lines += ["xor.b32 a, a, 0x80808080;"]
    return _program(*lines, "mov.b32 $0, a;")


def _moved(to: str, source: str, left: int, mask: str) -> list[str]:
    """Bits of a register, moved to the left, or to the right."""
    by = f"shl.b32 {to}, {source}, {left};" if left >= 0 else f"shr.u32 {to}, {source}, {-left};"
    return [by, f"and.b32 {to}, {to}, {mask};"]


def _e2m1(part: int) -> str:
    """A code of each of two words, of sign, exponent and mantissa, as bfloat16: their bits where
    bfloat16 has its own, times 2^126 for the difference of biases. Denormals become what they
    should."""
    lines = _moved("a", "$1", 12 - 4 * part, "0x80008000")
    lines += _moved("b", "$1", 6 - 4 * part, "0x01c001c0")
    return _program(*lines, "or.b32 a, a, b;", "mov.b32 c, 0x7e807e80;", "mul.bf16x2 $0, a, c;")


def _looked_up(levels: int, part: int) -> str:
    """A code of each of four words as what a table of bfloat16 has: its low and its high bytes,
    each in two halves that three bits of a code choose from, while the fourth chooses the half."""
    bits = [int(v) & 0xFFFF for v in table(levels).bfloat16().view(torch.int16).tolist()]
    low, high_bytes = ([b >> s & 255 for b in bits] for s in (0, 8))
    lines = _four(part, 2)
    lines += ["shl.b32 m, a, 4;", "prmt.b32 m, m, 0, 0xba98;"]  # the fourth bit, eight times
    lines += ["shr.u32 b, a, 4;", "or.b32 b, b, a;", "prmt.b32 b, b, 0, 0x4420;"]
    lines += ["and.b32 b, b, 0x7777;"]
    for out, held in (("w", low), ("a", high_bytes)):
        words = [f"0x{int.from_bytes(held[i : i + 4], 'little'):08x}" for i in (0, 4, 8, 12)]
        lines += [f"prmt.b32 c, {words[0]}, {words[1]}, b;"]
        lines += [f"prmt.b32 d, {words[2]}, {words[3]}, b;", f"lop3.b32 {out}, m, d, c, 0xca;"]
    return _program(*lines, "prmt.b32 $0, w, a, 0x5140;", "prmt.b32 $1, w, a, 0x7362;")


PARTS = range(4)
BIASED: tl.constexpr = tl.constexpr(tuple(_integers(i, False) for i in PARTS))
CENTRED: tl.constexpr = tl.constexpr(tuple(_integers(i, True) for i in PARTS))
BYTES_OF_CODES: tl.constexpr = tl.constexpr(tuple(_bytes(i, False) for i in PARTS))
BYTES_CENTRED: tl.constexpr = tl.constexpr(tuple(_bytes(i, True) for i in PARTS))
OF_NF4: tl.constexpr = tl.constexpr(tuple(_looked_up(1, i) for i in PARTS))
OF_E2M1: tl.constexpr = tl.constexpr(tuple(_e2m1(i) for i in PARTS))
"""Of a word's four codes, from its low bits on."""

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
def _interpreted(words, zero, HAS_ZERO: tl.constexpr, CODES: tl.constexpr, PART: tl.constexpr):
    """Codes of words as float32."""
    code = ((words >> (4 * PART)) & 15).to(tl.float32)
    if CODES == INT4:
        value = code - zero.to(tl.float32) if HAS_ZERO else code - 8.0
    else:
        value = code * 0.0
        for i in tl.static_range(16):
            value = tl.where(code == i, _TABLES.value[CODES - NF4][i], value)
    return value


@triton.jit
def _as_bytes(words, zero, HAS_ZERO: tl.constexpr, PART: tl.constexpr):
    """int4 as int8."""
    ASM: tl.constexpr = BYTES_OF_CODES[PART] if HAS_ZERO else BYTES_CENTRED[PART]
    value = tl.inline_asm_elementwise(ASM, "=r,r,r", [words], dtype=tl.int8, is_pure=True, pack=4)
    return value - zero.to(tl.int8) if HAS_ZERO else value


@triton.jit
def _as_floats(words, zero, HAS_ZERO: tl.constexpr, CODES: tl.constexpr, PART: tl.constexpr):
    """Codes of words as bfloat16."""
    if CODES == NF4:
        LOOKED_UP: tl.constexpr = OF_NF4[PART]
        value = tl.inline_asm_elementwise(
            LOOKED_UP, "=r,=r,r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        OF_INTEGERS: tl.constexpr = BIASED[PART] if HAS_ZERO else CENTRED[PART]
        ASM: tl.constexpr = OF_INTEGERS if CODES == INT4 else OF_E2M1[PART]
        value = tl.inline_asm_elementwise(
            ASM, "=r,r", [words], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return value - (zero.to(tl.float32) + 128.0).to(tl.bfloat16) if HAS_ZERO else value


@triton.jit
def widen_nibbles(
    words, zero, HAS_ZERO: tl.constexpr, CODES: tl.constexpr, PART: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """One of the four codes of each 16-bit word as what it stands for, in `dtype`.

    zero: of int4; 8 unless HAS_ZERO.
    """
    if INTERPRETED:
        value = _interpreted(words, zero, HAS_ZERO, CODES, PART)
    elif dtype == tl.int8:
        value = _as_bytes(words, zero, HAS_ZERO, PART)
    else:
        value = _as_floats(words, zero, HAS_ZERO, CODES, PART).to(dtype)
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
