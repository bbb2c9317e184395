"""From a name such as `w4a8-g64-asym` to the formats of a model's matrices."""

from __future__ import annotations

import re
from typing import Literal

import torch

from penstock.errors import ConfigError
from penstock.quant.format import WeightFormats
from penstock.quant.formats.dense import Dense
from penstock.quant.formats.integer import Integer

QUANTIZATIONS = ("w8a16", "w8a8", "w4a16", "w4a8")
"""The base names; those of 4 bits take a group, `-g32` (default), `-g64`, `-g128`, and `-asym`."""

_NAME = re.compile(r"w(4|8)a(8|16)(?:-g(32|64|128))?(-asym)?")


def parse_quantization(name: str) -> Integer:
    """The format of the layers' matrices that `name` means; ConfigError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None or (match[1] == "8" and (match[3] or match[4])):
        raise ConfigError(
            f"quantization={name!r} isn't one of {', '.join(QUANTIZATIONS)}; those of 4 bits take "
            "a group and a zero point: w4a8-g32, w4a8-g64, w4a8-g128, w4a8-g128-asym."
        )
    activation_bits: Literal[8, 16] = 8 if match[2] == "8" else 16
    if match[1] == "8":
        return Integer(8, activation_bits)
    return Integer(4, activation_bits, int(match[3] or 32), match[4] is None)


def formats_of(quantization: str | None, dtype: torch.dtype) -> WeightFormats:
    """A model's formats. With 4 bits the head has 8: it decides each token directly."""
    if quantization is None:
        return WeightFormats(Dense(dtype), Dense(dtype))
    matrix = parse_quantization(quantization)
    return WeightFormats(matrix, Integer(8, matrix.activation_bits))
