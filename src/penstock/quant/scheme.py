"""`Scheme`: what the values of a quantized matrix are, and what multiplies them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from penstock.errors import ConfigError
from penstock.ops.records import VALUES

Kind = Literal[
    "int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4", "mxfp4", "nvfp4",
    "q4_k", "q5_k", "q6_k", "mixed_k",
]  # fmt: skip
Activations = Literal[
    "float", "int8", "int8_blocks", "int8_rotated", "int8_static", "fp8", "fp8_static"
]

GROUPS = (32, 64, 128)
BLOCK = 128
"""Rows and columns of the blocks of FP8 that share a scale: DeepSeek-V3, arXiv:2412.19437."""

_BITS: dict[Kind, int] = {
    "int8": 8, "int4": 4, "fp8_e4m3": 8, "fp8_e5m2": 8, "nf4": 4, "mxfp4": 4, "nvfp4": 4,
    "q4_k": 4, "q5_k": 5, "q6_k": 6, "mixed_k": 0,
}  # fmt: skip
_FIXED_GROUP: dict[Kind, int] = {
    "mxfp4": 32, "nvfp4": 16, "q4_k": VALUES, "q5_k": VALUES, "q6_k": VALUES, "mixed_k": VALUES,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one matrix [N, K] is quantized.

    Codes stand for integers, for floating point of 8 bits, or for sixteen levels (`quant.levels`).
    """

    kind: Kind
    group: int = 0  # values of K that share a scale; 0: all of a row
    symmetric: bool = True  # of integers; False: each scale has a zero point
    activations: Activations = "float"
    """float: as they are. int8, fp8 (E4M3): each token has a scale, or each group of a token beside
    FP8 weights in groups. …_static: one scale for all, from a calibration. …_rotated: blocks of 64
    values are rotated before (`ops.rotate`), and the matrix's rows before it is rounded. …_blocks:
    each group of the matrix has a scale of each token's, as llama.cpp has it; of K-quants 256."""
    rows: int = 1  # that share a scale when values are chosen: 1, a block's, or 0 for all

    def __post_init__(self) -> None:
        fixed = _FIXED_GROUP.get(self.kind)
        if fixed is not None and self.group != fixed:
            raise ConfigError(f"{self.kind} has groups of {fixed}, not of {self.group}.")
        if fixed is None and self.group not in (0, *GROUPS):
            raise ConfigError(
                f"A group has 32, 64 or 128 values, or a whole row, not {self.group}."
            )
        if not self.symmetric and not self.is_integer:
            raise ConfigError(f"{self.kind} has no zero points: it is symmetric.")
        in_groups = self.is_k or (self.is_integer and self.group > 0 and self.symmetric)
        wanted = {
            "int8": self.is_integer,
            "int8_blocks": in_groups,
            "fp8": self.kind == "fp8_e4m3",
        }
        inputs = self.activations.removesuffix("_static").removesuffix("_rotated")
        if inputs == "int8_blocks" and self.is_integer and not in_groups:
            raise ConfigError(
                "Activations in blocks have the weights' groups: symmetric, of 32, 64 or 128."
            )
        if not wanted.get(inputs, True):
            raise ConfigError(f"{self.kind} isn't multiplied with activations in {inputs}.")
        if self.rows not in (0, 1, BLOCK) or (self.rows == 0 and self.group):
            raise ConfigError(
                f"rows={self.rows} with group={self.group} isn't a way to share scales."
            )

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers."""
        return self.kind in ("int8", "int4")

    @property
    def is_k(self) -> bool:
        """Whether it is a K-quant of ggml: rows of blocks, which have scales of their own."""
        return self.kind.endswith("_k")

    @property
    def stored(self) -> Scheme:
        """What decides how it is stored: activations don't, but for rotated and static ones."""
        kept = self.static or self.rotated
        return self if kept else replace(self, activations="float")

    @property
    def static(self) -> bool:
        """Whether all activations share one scale, which a calibration finds."""
        return self.activations.endswith("_static")

    @property
    def rotated(self) -> bool:
        """Whether it is the matrix's rotated rows that are stored."""
        return self.activations.endswith("_rotated")

    @property
    def bits(self) -> int:
        """Of a code; 0 where each sixteen rows have their own."""
        return _BITS[self.kind]

    @property
    def group_bits(self) -> int:
        """Of the scale and the zero point that a group has, or a row without groups."""
        if self.kind in ("mxfp4", "nvfp4"):
            return 8
        half = self.kind in ("int4", "nf4") or (self.kind == "int8" and self.group > 0)
        return (16 if half else 32) + (0 if self.symmetric else 8)

    @property
    def rows_apart(self) -> bool:
        """Whether a row's codes and scales depend on no other row."""
        return self.rows == 1 and self.kind != "nvfp4"

    @property
    def row_bits(self) -> int:
        """Of what a row has beside its groups."""
        return 32 if self.kind == "nvfp4" else 0

    @property
    def name(self) -> str:
        """What users call it; `parse_scheme` reads it, but for K-quants, which only files have."""
        if self.is_k:
            return f"{self.kind}-a{16 if self.activations == 'float' else 8}"
        if not self.is_integer:
            return self._float_name()
        name = f"w{self.bits}a{16 if self.activations == 'float' else 8}"
        if self.rows == 0:
            name += "-tensor"
        elif self.group:
            name += f"-g{self.group}"
        elif self.bits == 4:
            name += "-channel"
        name += "" if self.symmetric else "-asym"
        how = self.activations.removeprefix("int8_")
        return name + ("" if how in ("float", "int8") else f"-{how}")

    def _float_name(self) -> str:
        match self.kind:
            case "nf4":
                return f"nf4-g{self.group}"
            case "mxfp4" | "nvfp4":
                return self.kind
        name = "fp8" if self.kind == "fp8_e4m3" else "fp8-e5m2"
        name += "" if self.activations == "float" else "-w8a8"
        name += {0: "-tensor", 1: "", BLOCK: "-block"}[self.rows]
        return name + ("-static" if self.static else "")


SCHEMES = ("w8a16", "w8a8", "w4a16", "w4a8", "fp8", "fp8-w8a8", "fp8-e5m2", "nf4", "mxfp4", "nvfp4")
"""The base names. `fp8-w8a8` is what vLLM and LLM Compressor call FP8 W8A8: FP8_DYNAMIC; -block,
FP8_BLOCK; -tensor-static, FP8. `fp8` alone leaves activations in bfloat16."""

_INTEGER = re.compile(
    r"w(4|8)a(8|16)(-tensor|-channel|-g32|-g64|-g128)?(-asym)?(-static|-rotated|-blocks)?"
)
_ROUNDED: dict[str, Activations] = {
    "": "int8", "-static": "int8_static", "-rotated": "int8_rotated", "-blocks": "int8_blocks",
}  # fmt: skip
_FP8 = re.compile(r"fp8(-e4m3|-e5m2)?(-w8a8)?(-tensor|-channel|-block)?(-static)?")
_NF4 = re.compile(r"nf4(?:-g(32|64|128))?")


def parse_scheme(name: str) -> Scheme:
    """The scheme called `name`; ConfigError for any other name."""
    if match := _INTEGER.fullmatch(name):
        kind: Kind = "int8" if match[1] == "8" else "int4"
        shared = match[3] or ("-channel" if kind == "int8" else "-g32")
        if match[5] and match[2] == "16":
            raise ConfigError(
                f"{name!r}: activations of 16 bits have no static scale and no blocks, and aren't "
                "rotated."
            )
        activations: Activations = "float" if match[2] == "16" else _ROUNDED[match[5] or ""]
        return Scheme(
            kind,
            int(shared[2:]) if shared.startswith("-g") else 0,
            match[4] is None,
            activations,
            0 if shared == "-tensor" else 1,
        )
    if match := _FP8.fullmatch(name):
        rows = {"-tensor": 0, "-block": BLOCK}.get(match[3] or "", 1)
        kind = "fp8_e5m2" if match[1] == "-e5m2" else "fp8_e4m3"
        if match[4] and not match[2]:
            raise ConfigError(f"{name!r}: activations in bfloat16 have no static scale.")
        inputs: Activations = "float" if not match[2] else "fp8_static" if match[4] else "fp8"
        return Scheme(kind, BLOCK if rows == BLOCK else 0, activations=inputs, rows=rows)
    if match := _NF4.fullmatch(name):
        return Scheme("nf4", int(match[1] or 64))
    if name == "mxfp4":
        return Scheme("mxfp4", 32)
    if name == "nvfp4":
        return Scheme("nvfp4", 16)
    raise ConfigError(
        f"quantization={name!r} isn't one of {', '.join(SCHEMES)}. Integers take what shares a "
        "scale and a zero point: w8a8-tensor, w4a8-g64, w4a16-g128-asym, w4a8-g32-blocks; fp8 and "
        "fp8-w8a8 take -tensor or -block, nf4 a group. Quantized weights take a8 or a16."
    )
