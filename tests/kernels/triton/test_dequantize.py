"""The PTX that widens codes of four bits, executed here word by word: what all codes become."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.kernels.triton import dequantize
from penstock.ops.levels import LEVELS, table

Registers = dict[str, int]


def bfloat16(bits: int) -> float:
    return float(np.array([bits << 16], np.uint32).view(np.float32)[0])


def both_halves(a: int, b: int, by: np.ufunc) -> int:
    """One operation on each of two bfloat16, which must need no rounding."""
    word = 0
    for shift in (0, 16):
        operands = (np.float32(bfloat16(each >> shift & 0xFFFF)) for each in (a, b))
        bits = int(np.array([by(*operands)], np.float32).view(np.uint32)[0])
        assert bits & 0xFFFF == 0, "not exact in bfloat16"
        word |= bits >> 16 << shift
    return word


def permuted(a: int, b: int, selector: int) -> int:
    """`prmt.b32`: four bytes of eight, or the sign of one of them in all its bits."""
    all_bytes = (a | b << 32).to_bytes(8, "little")
    chosen = bytearray()
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = all_bytes[nibble & 7]
        chosen.append((255 if byte & 128 else 0) if nibble & 8 else byte)
    return int.from_bytes(chosen, "little")


def looked_up(a: int, b: int, c: int, rule: int) -> int:
    """`lop3.b32`: any function of three bits, by its table."""
    return sum((rule >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i
               for i in range(32))  # fmt: skip


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    "sub.u32": lambda a, b: (a - b) & 0xFFFFFFFF,
    "prmt.b32": permuted,
    "lop3.b32": looked_up,
    "sub.bf16x2": lambda a, b: both_halves(a, b, np.subtract),
    "mul.bf16x2": lambda a, b: both_halves(a, b, np.multiply),
}


def execute(program: str, inputs: Registers) -> Registers:
    held = dict(inputs)
    for line in program.splitlines():
        if line in ("{", "}") or line.startswith(".reg"):
            continue
        name, _, rest = line.rstrip(";").partition(" ")
        out, *operands = (each.strip() for each in rest.split(","))
        values = [held[each] if each in held else int(each, 0) for each in operands]
        held[out] = OPERATIONS[name](*values)
    return held


def words() -> list[tuple[int, list[int]]]:
    """Each byte in each place of two 16-bit words: a register, and its two words."""
    found = [[(i + 37 * place) % 256 for place in range(4)] for i in range(256)]
    registers = [int.from_bytes(bytes(each), "little") for each in found]
    return [(each, [each & 0xFFFF, each >> 16]) for each in registers]


def pairs() -> list[tuple[int, int, list[int]]]:
    """Two registers, and their four words."""
    there = words()
    turned = there[101:] + there[:101]
    return [(a, b, four + more) for (a, four), (b, more) in zip(there, turned, strict=True)]


def halves(register: int) -> list[float]:
    return [bfloat16(register >> shift & 0xFFFF) for shift in (0, 16)]


@pytest.mark.parametrize("part", [0, 1, 2, 3])
def test_integers(part: int) -> None:
    for register, two in words():
        codes = [word >> 4 * part & 15 for word in two]
        for programs, zero in ((dequantize.CENTRED, 8), (dequantize.BIASED, -128)):
            done = execute(programs.value[part], {"$1": register})
            assert halves(done["$0"]) == [code - zero for code in codes]
    for a, b, four in pairs():
        codes = [word >> 4 * part & 15 for word in four]
        for programs, zero in ((dequantize.BYTES_OF_CODES, 0), (dequantize.BYTES_CENTRED, 8)):
            done = execute(programs.value[part], {"$1": a, "$2": b})["$0"].to_bytes(4, "little")
            assert np.frombuffer(done, np.int8).tolist() == [code - zero for code in codes]


@pytest.mark.parametrize("part", [0, 1, 2, 3])
@pytest.mark.parametrize("levels", [1, 2])
def test_levels(levels: int, part: int) -> None:
    values = table(levels)
    assert torch.equal(values, values.bfloat16().float())
    for a, b, four in pairs():
        wanted = [float(values[word >> 4 * part & 15]) for word in four]
        if LEVELS[levels] == "nf4":
            done = execute(dequantize.OF_NF4.value[part], {"$2": a, "$3": b})
            assert halves(done["$0"]) + halves(done["$1"]) == wanted
        else:
            done = execute(dequantize.OF_E2M1.value[part], {"$1": a})
            assert halves(done["$0"]) == wanted[:2]
