"""Checkpoints of AutoAWQ in its `gemm` layout: int4 with a zero point for each group.

`qweight` int32 [K, N / 8], `qzeros` int32 [G, N / 8], `scales` [G, N]. A word holds eight columns
in the order 0 2 4 6 1 3 5 7, lowest bits first. Source: AutoAWQ 0.2, `WQLinear_GEMM`; Lin et al.
2023, arXiv:2306.00978.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError, UnsupportedModelError
from penstock.quant.codes import Codes, groups
from penstock.quant.files.layout import (
    Config,
    Found,
    Matrix,
    Tensors,
    check_included,
    integer_scheme,
    matrix_shape,
    modules_with,
    need,
    option,
    pack_bits,
    smallest_exact,
    unpack_bits,
)
from penstock.quant.files.words import PARTS, Coding, check_parts, group_size
from penstock.quant.scheme import Scheme

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACE = tuple(_ORDER.index(column) for column in range(8))


def find(config: Config, tensors: Tensors) -> Found:
    """The quantized matrices of a checkpoint."""
    option(config, "bits", (4,), config.get("w_bit", 4))
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(
            f"quantization_config has AWQ's layout {version!r}; 'gemm' is read. "
            "Convert it, or give the model in another layout."
        )
    symmetric = not option(config, "zero_point", (True, False), True)
    found, names = Found(), set(tensors.names())
    for module in modules_with(tensors, ".qweight"):
        check_included(module, config, "modules_to_not_convert")
        need(tensors, names, module, "qzeros", "scales")
        group = group_size(config, module, 128)
        parts = tuple(f"{module}.{part}" for part in PARTS)
        (k, _), (_, n) = matrix_shape(tensors, parts[0]), matrix_shape(tensors, parts[2])
        count = groups(k, group)
        check_parts(tensors, parts, (k, n // 8), (count, n // 8), (count, n))
        scheme = integer_scheme(4, group, symmetric)
        if scheme is None:
            found.note(f"groups of {group} have no kernel and are widened", f"{module}.weight")
        coding = Coding(4, group, symmetric, "zero_point is false")
        read = partial(_read, tensors, parts, coding, scheme)
        found.matrices[f"{module}.weight"] = Matrix((n, k), scheme, read, parts)
    return found


def _read(
    tensors: Tensors, parts: tuple[str, ...], coding: Coding, scheme: Scheme | None
) -> Tensor | Codes:
    unsigned, zero = (_columns(tensors.raw(part)).t().contiguous() for part in parts[:2])
    return coding.read(tensors, parts, unsigned, zero, scheme)


def _columns(words: Tensor) -> Tensor:
    nibbles = unpack_bits(words, 4, words.shape[1] * 8)
    return nibbles.view(len(words), -1, 8)[:, :, _PLACE].reshape(len(words), -1)


def _words(columns: Tensor) -> Tensor:
    return pack_bits(columns.reshape(len(columns), -1, 8)[:, :, _ORDER].flatten(1), 4)


def expresses(scheme: Scheme) -> bool:
    """Whether the layout can hold matrices in `scheme`."""
    return scheme.kind == "int4" and not scheme.symmetric and (
        scheme.activations == "float" and scheme.rows == 1
    )  # fmt: skip


def store(module: str, codes: Codes) -> dict[str, Tensor]:
    """The tensors that hold `codes`."""
    n, _ = codes.shape
    if n % 8:
        raise ConfigError(
            f"{module}: AWQ packs eight rows of W to a word, and {n} isn't a multiple of 8. "
            "Use layout='compressed-tensors'."
        )
    if module.endswith("lm_head") or "embed" in module:
        raise ConfigError(
            f"AWQ keeps {module} unquantized: leave it so, or use layout='compressed-tensors'."
        )
    assert codes.zero is not None
    return {
        f"{module}.qweight": _words(codes.values.t()),
        f"{module}.qzeros": _words(codes.zero.t()),
        f"{module}.scales": smallest_exact(codes.scale.t().contiguous()),
    }


def quantization_config(schemes: Mapping[str, Scheme], plain: Sequence[str]) -> dict[str, Any]:
    """For `config.json`: the one scheme, and linear modules that aren't quantized."""
    (scheme,) = set(schemes.values())
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": scheme.group or -1,
        "zero_point": True,
        "modules_to_not_convert": sorted(plain),
    }
