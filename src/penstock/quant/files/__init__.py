"""Quantized checkpoints in the layouts of others: one file for each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from penstock.errors import PenstockError, UnsupportedModelError, WeightsError, nearest
from penstock.quant.files import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4
from penstock.quant.files.layout import Config, Found, Matrix, Tensors
from penstock.quant.files.writer import LAYOUTS, Layout, layouts_for, write_checkpoint

METHODS: dict[str, Callable[[Config, Tensors], Found]] = {
    "compressed-tensors": compressed_tensors.find,
    "awq": awq.find,
    "gptq": gptq.find,
    "fp8": fp8.find,
    "bitsandbytes": bitsandbytes.find,
    "mxfp4": mxfp4.find,
}
"""What reads each `quant_method`."""

_WRONG = (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError, re.error,
)  # fmt: skip
"""What values of another kind than a layout has, and tensors of other shapes, lead to."""

_T = TypeVar("_T")


def find_matrices(config: Config, tensors: Tensors) -> Found:
    """The quantized matrices of a checkpoint whose `quantization_config` is `config`.

    Raises UnsupportedModelError for what isn't read, WeightsError where tensors are missing,
    misshapen or contradict the config. Nothing but small tensors is read; reading a matrix raises
    WeightsError, too.
    """
    method = str(config.get("quant_method"))
    if method not in METHODS:
        raise UnsupportedModelError(
            f"quantization_config has quant_method={method!r}.{nearest(method, METHODS)} "
            f"Read are {', '.join(METHODS)}."
        )
    find = partial(METHODS[method], config, tensors)
    found = _checked("quantization_config or a tensor", method, find)
    names = set(tensors.names())
    if not found.matrices:
        raise WeightsError(
            f"config.json says that the weights are quantized by {method}, but none of the "
            f"{len(names)} tensors is in its layout. Remove quantization_config, or give the "
            "checkpoint that it belongs to."
        )
    for name, matrix in found.matrices.items():
        if name in names and name not in matrix.parts:
            raise WeightsError(f"{name} and {matrix.parts[0]} give the same matrix. Remove one.")
        found.matrices[name] = replace(matrix, read=partial(_checked, name, method, matrix.read))
    return found


def _checked(what: str, method: str, made: Callable[[], _T]) -> _T:
    """What `made` returns; its errors of another kind than Penstock's as WeightsErrors."""
    try:
        return made()
    except PenstockError:
        raise
    except _WRONG as error:
        raise WeightsError(
            f"{what} isn't as {method} writes it: {type(error).__name__}: {error}. It was damaged, "
            "or edited: download or convert the checkpoint again."
        ) from error


__all__ = [
    "LAYOUTS",
    "METHODS",
    "Config",
    "Found",
    "Layout",
    "Matrix",
    "Tensors",
    "find_matrices",
    "layouts_for",
    "write_checkpoint",
]
