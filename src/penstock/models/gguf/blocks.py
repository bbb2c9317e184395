"""Block types: how a GGUF file writes the values of a tensor, and what they stand for.

A row of K values is K / `values` blocks. Their layout is that of ggml's `ggml-common.h`
(github.com/ggml-org/ggml); d, m and the like are float16, bits are counted from the lowest.
Dequantizing computes in float32, in the order of ggml's reference: the result is equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import WeightsError
from penstock.ops.records import VALUES, values_of
from penstock.quant import Codes, Scheme
from penstock.quant.levels import E2M1
from penstock.quant.scheme import Kind

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Unpack = Callable[[Bytes], Floats]
ToCodes = Callable[[Bytes], tuple[NDArray[np.uint8] | NDArray[np.int8], Floats]]

_CHUNK = 1 << 20
"""Values that are dequantized at once: what they need on the way stays in the cache."""
_IQ4_LEVELS = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), dtype=np.float32
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block type."""

    name: str
    values: int  # in a block
    nbytes: int  # of a block
    plain: torch.dtype | None = None  # of a type that isn't quantized
    unpack: Unpack | None = None  # [blocks, nbytes] → [blocks, values]
    scheme: Scheme | None = None  # that holds it exactly
    codes: ToCodes | None = None  # [blocks, nbytes] → codes [blocks, values], scales [blocks]

    def tensor(self, raw: Bytes, shape: tuple[int, ...]) -> Tensor:
        """The values of `raw`: a view of it where the type is plain, else in float32."""
        if self.plain is not None:
            return torch.from_numpy(raw.reshape(-1)).view(self.plain).view(shape)
        assert self.unpack is not None  # one of the two is there
        blocks = raw.reshape(-1, self.nbytes)
        out = np.empty((len(blocks), self.values), dtype=np.float32)
        step = _CHUNK // self.values
        for at in range(0, len(blocks), step):
            out[at : at + step] = self.unpack(blocks[at : at + step])
        return torch.from_numpy(out).view(shape)

    def to_codes(self, raw: Bytes, shape: tuple[int, ...]) -> Codes:
        """The same matrix [N, K] as codes; for a type with a scheme."""
        assert self.scheme is not None
        if self.scheme.is_k:
            rows = torch.from_numpy(np.ascontiguousarray(raw)).view(shape[0], -1)
            return Codes(self.scheme, rows, torch.empty(shape[0], 0))
        assert self.codes is not None
        values, scale = self.codes(raw.reshape(-1, self.nbytes))
        return Codes(
            self.scheme,
            torch.from_numpy(np.ascontiguousarray(values)).view(shape),
            torch.from_numpy(np.ascontiguousarray(scale)).view(shape[0], -1),
        )


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of each block, [blocks, 1] float32."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """Runs of `width` bytes → their low halves, then their high ones; [blocks, 2 · bytes]."""
    runs = packed.reshape(len(packed), -1, width)
    halves = np.empty((*runs.shape[:2], 2, width), dtype=np.uint8)
    np.bitwise_and(runs, 15, out=halves[:, :, 0])
    np.right_shift(runs, 4, out=halves[:, :, 1])
    return halves.reshape(len(packed), -1)


def _fields(packed: Bytes, width: int, bits: int) -> Bytes:
    """Runs of `width` bytes → their lowest bits, the next, …; [blocks, 8 / bits · bytes]."""
    runs = packed.reshape(len(packed), -1, 1, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    parts = (runs >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(len(packed), -1)


def _bit(packed: Bytes) -> Bytes:
    """32 bits of each block, lowest first, [blocks, 32] of 0 or 1."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")


def _spread(scaled: Floats, values: Floats) -> Floats:
    """scaled [blocks, groups] · values [blocks, groups · n]."""
    groups = values.reshape(*scaled.shape, -1)
    product: Floats = scaled[:, :, None] * groups
    return product


def _q8_0_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Floats]:
    """d, 32 int8: w = d · q."""
    return blocks[:, 2:].view(np.int8), _half(blocks, 0)


def _q8_0(blocks: Bytes) -> Floats:
    values, scale = _q8_0_codes(blocks)
    return values.astype(np.float32) * scale


def _q4_0_codes(blocks: Bytes) -> tuple[Bytes, Floats]:
    """d, 16 bytes: w = d · (q − 8); value i in the low half of byte i, i + 16 in its high one."""
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0)


def _q4_0(blocks: Bytes) -> Floats:
    values, scale = _q4_0_codes(blocks)
    return scale * (values.astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    """d, m, 16 bytes: w = d · q + m."""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16) + _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    return _nibbles(low, 16) | (_bit(high) << np.uint8(4))


def _q5_0_codes(blocks: Bytes) -> tuple[NDArray[np.int8], Floats]:
    """d, 4 bytes of fifth bits, 16 bytes: w = d · (q − 16)."""
    values = _five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)
    return values, _half(blocks, 0)


def _q5_0(blocks: Bytes) -> Floats:
    values, scale = _q5_0_codes(blocks)
    return scale * values.astype(np.float32)


def _q5_1(blocks: Bytes) -> Floats:
    """d, m, 4 bytes of fifth bits, 16 bytes: w = d · q + m."""
    return _half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]) + _half(blocks, 2)


def _q2_k(blocks: Bytes) -> Floats:
    """16 bytes (scale, minimum of 4 bits each), 64 bytes of 2 bits, d, dmin; 16 groups of 16."""
    scale, minimum = blocks[:, :16] & 15, blocks[:, :16] >> 4
    values = _fields(blocks[:, 16:80], 32, 2).astype(np.float32)
    product = _spread(_half(blocks, 80) * scale, values)
    return (product - (_half(blocks, 82) * minimum)[:, :, None]).reshape(len(blocks), -1)


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of third bits, 64 bytes of 2 bits, 12 bytes of 6-bit scales, d; 16 groups of 16."""
    packed = blocks[:, 96:108]
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high = _fields(packed[:, 8:], 4, 2)
    scale = (low | (high << 4)).astype(np.float32) - 32
    third = _fields(blocks[:, :32], 32, 1)
    values = _fields(blocks[:, 32:96], 32, 2).astype(np.float32) - 4.0 * (third ^ 1)
    return _spread(_half(blocks, 108) * scale, values.astype(np.float32)).reshape(len(blocks), -1)


def _of_records(bits: int) -> Unpack:
    """Blocks that are kept (`ops.records`)."""

    def unpack(blocks: Bytes) -> Floats:
        found: Floats = values_of(torch.from_numpy(np.ascontiguousarray(blocks)), bits).numpy()
        return found

    return unpack


def _kept(bits: int) -> Scheme:
    kinds: dict[int, Kind] = {4: "q4_k", 5: "q5_k", 6: "q6_k"}
    return Scheme(kinds[bits], VALUES, activations="int8_blocks")


def _iq4_nl(blocks: Bytes) -> Floats:
    """d, 16 bytes: w = d · level(q)."""
    return _half(blocks, 0) * _IQ4_LEVELS[_nibbles(blocks[:, 2:], 16)]


def _iq4_xs(blocks: Bytes) -> Floats:
    """d, 2 bytes of the scales' top bits, 4 of the others, 128 bytes of levels; 8 groups of 32."""
    top = np.ascontiguousarray(blocks[:, 2:4]).view("<u2")
    high = ((top >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8)
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), axis=2).reshape(len(blocks), -1)
    scale = (low | (high << 4)).astype(np.float32) - 32
    values = _IQ4_LEVELS[_nibbles(blocks[:, 8:], 16)]
    return _spread(_half(blocks, 0) * scale, values).reshape(len(blocks), -1)


def _mxfp4_codes(blocks: Bytes) -> tuple[Bytes, Floats]:
    """An exponent e, 16 bytes of E2M1: w = 2^(e − 127) · value."""
    if (blocks[:, 0] == 255).any():
        raise WeightsError("A block in MXFP4 has the scale NaN (exponent 255).")
    scale = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127).astype(np.float32)
    return _nibbles(blocks[:, 1:], 16), scale


def _mxfp4(blocks: Bytes) -> Floats:
    values, scale = _mxfp4_codes(blocks)
    return scale * np.array(E2M1, dtype=np.float32)[values]


_BLOCKS_OF_4 = Scheme("int4", 32, activations="int8_blocks")
_BLOCKS_OF_8 = Scheme("int8", 32, activations="int8_blocks")

BLOCKS: dict[int, Block] = {
    0: Block("F32", 1, 4, plain=torch.float32),
    1: Block("F16", 1, 2, plain=torch.float16),
    30: Block("BF16", 1, 2, plain=torch.bfloat16),
    2: Block("Q4_0", 32, 18, None, _q4_0, _BLOCKS_OF_4, _q4_0_codes),
    3: Block("Q4_1", 32, 20, None, _q4_1),
    6: Block("Q5_0", 32, 22, None, _q5_0, _BLOCKS_OF_8, _q5_0_codes),
    7: Block("Q5_1", 32, 24, None, _q5_1),
    8: Block("Q8_0", 32, 34, None, _q8_0, _BLOCKS_OF_8, _q8_0_codes),
    10: Block("Q2_K", 256, 84, None, _q2_k),
    11: Block("Q3_K", 256, 110, None, _q3_k),
    12: Block("Q4_K", 256, 144, None, _of_records(4), _kept(4)),
    13: Block("Q5_K", 256, 176, None, _of_records(5), _kept(5)),
    14: Block("Q6_K", 256, 210, None, _of_records(6), _kept(6)),
    20: Block("IQ4_NL", 32, 18, None, _iq4_nl),
    23: Block("IQ4_XS", 256, 136, None, _iq4_xs),
    39: Block("MXFP4", 32, 17, None, _mxfp4, Scheme("mxfp4", 32), _mxfp4_codes),
}
"""Built block types by ggml's number."""

TYPE_NAMES: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
    35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Names of the others, for messages."""
