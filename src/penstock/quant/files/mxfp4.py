"""Matrices in MXFP4 as gpt-oss stores them: `<weight>_blocks` and `<weight>_scales`.

Blocks are bytes [N, K / 32, 16], the first of two values in the low half; scales are bytes
[N, K / 32], exponents less 127. gpt-oss itself holds experts, one more dimension in front, and
those aren't built. Source: OCP Microscaling Formats 1.0; openai/gpt-oss, arXiv:2508.10925.
"""

from __future__ import annotations

from functools import partial

import torch

from penstock.errors import UnsupportedModelError, WeightsError
from penstock.quant.codes import Codes
from penstock.quant.files.floats import read_exponents
from penstock.quant.files.layout import (
    Config,
    Found,
    Matrix,
    Tensors,
    check_dtype,
    check_included,
    check_shape,
    modules_with,
    unpack_nibbles,
)
from penstock.quant.scheme import Scheme

_SCHEME = Scheme("mxfp4", 32)


def find(config: Config, tensors: Tensors) -> Found:
    """The quantized matrices of a checkpoint."""
    found, names = Found(), set(tensors.names())
    for stem in modules_with(tensors, "_blocks"):
        blocks, scales = f"{stem}_blocks", f"{stem}_scales"
        check_included(stem.removesuffix(".weight"), config, "modules_to_not_convert")
        shape = tensors.shape(blocks)
        if len(shape) == 4:
            raise UnsupportedModelError(
                f"{blocks} {list(shape)} holds {shape[0]} experts, and mixtures of experts aren't "
                "built. Blocks of dense matrices, [N, K / 32, 16], are read."
            )
        if len(shape) != 3 or shape[2] != 16:
            raise WeightsError(f"{blocks} has shape {list(shape)}, not [N, K / 32, 16].")
        if scales not in names:
            raise WeightsError(f"{blocks} has no {scales} beside it.")
        check_dtype(tensors, blocks, torch.uint8)
        check_dtype(tensors, scales, torch.uint8, torch.float8_e8m0fnu)
        check_shape(tensors, scales, shape[:2])
        name = stem if stem.endswith(".weight") else f"{stem}.weight"
        found.matrices[name] = Matrix(
            (shape[0], shape[1] * 32), _SCHEME, partial(_read, tensors, blocks, scales),
            (blocks, scales),
        )  # fmt: skip
    return found


def _read(tensors: Tensors, blocks: str, scales: str) -> Codes:
    values = unpack_nibbles(tensors.raw(blocks).flatten(1))
    return Codes(_SCHEME, values, read_exponents(tensors, scales))
