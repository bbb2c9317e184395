"""Matrices in MXFP4 as gpt-oss stores them: `<weight>_blocks` and `<weight>_scales`.

Blocks are bytes [N, K / 32, 16], the first of two values in the low half; scales are bytes
[N, K / 32], exponents less 127. Experts have one more dimension in front, and the rows of their
`gate_up_proj` are gate's and up's in turns. Source: OCP Microscaling Formats 1.0; openai/gpt-oss,
arXiv:2508.10925.
"""

from __future__ import annotations

from functools import partial

import torch

from penstock.errors import WeightsError
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
        if len(shape) not in (3, 4) or shape[-1] != 16:
            raise WeightsError(
                f"{blocks} has shape {list(shape)}, neither [N, K / 32, 16] nor of experts, "
                "[E, N, K / 32, 16]."
            )
        if scales not in names:
            raise WeightsError(f"{blocks} has no {scales} beside it.")
        check_dtype(tensors, blocks, torch.uint8)
        check_dtype(tensors, scales, torch.uint8, torch.float8_e8m0fnu)
        check_shape(tensors, scales, shape[:-1])
        if len(shape) == 4:
            found.matrices |= _experts(tensors, stem, shape)
            continue
        name = stem if stem.endswith(".weight") else f"{stem}.weight"
        found.matrices[name] = Matrix(
            (shape[0], shape[1] * 32), _SCHEME, partial(_read, tensors, blocks, scales),
            (blocks, scales),
        )  # fmt: skip
    return found


def _experts(tensors: Tensors, stem: str, shape: tuple[int, ...]) -> dict[str, Matrix]:
    """Each expert's matrices by themselves: rows of gate and up lie in turns."""
    found: dict[str, Matrix] = {}
    parts = f"{stem}_blocks", f"{stem}_scales"
    at, _, what = stem.removesuffix(".weight").rpartition(".")
    halves = {f".{what}": (0, 1)}
    if what == "gate_up_proj":
        halves = {".gate_proj": (0, 2), ".up_proj": (1, 2)}
    for e in range(shape[0]):
        for half, (first, step) in halves.items():
            n = len(range(first, shape[1], step))
            read = partial(_read_rows, tensors, *parts, e, slice(first, None, step))
            matrix = Matrix((n, shape[2] * 32), _SCHEME, read, parts)
            found[f"{at}.{e}{half}.weight"] = matrix
    return found


def _read_rows(tensors: Tensors, blocks: str, scales: str, expert: int, rows: slice) -> Codes:
    values = unpack_nibbles(tensors.raw(blocks)[expert, rows].flatten(1))
    return Codes(_SCHEME, values, read_exponents(tensors, scales, (expert, rows)))


def _read(tensors: Tensors, blocks: str, scales: str) -> Codes:
    values = unpack_nibbles(tensors.raw(blocks).flatten(1))
    return Codes(_SCHEME, values, read_exponents(tensors, scales))
