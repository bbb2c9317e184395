"""From a name such as `w4a8-g64-asym` to the formats of a model's matrices."""

from __future__ import annotations

import torch

from penstock.errors import ConfigError
from penstock.quant.format import WeightFormat, WeightFormats
from penstock.quant.formats.dense import Dense
from penstock.quant.formats.integer import Integer
from penstock.quant.formats.widened import Widened
from penstock.quant.scheme import Scheme, parse_scheme

QUANTIZATIONS = ("w8a16", "w8a8", "w4a16", "w4a8")
"""The base names; those of 4 bits take a group, `-g32` (default), `-g64`, `-g128`, and `-asym`."""


def format_of(scheme: Scheme) -> WeightFormat:
    """The format that stores matrices of `scheme`: one with a kernel where there is one."""
    return Integer(scheme) if Integer.takes(scheme) else Widened(scheme)


def parse_quantization(name: str) -> WeightFormat:
    """The format of the layers' matrices that `name` means; ConfigError for any other name."""
    scheme = parse_scheme(name)
    if not Integer.takes(scheme):
        raise ConfigError(
            f"quantization={name!r} isn't one of {', '.join(QUANTIZATIONS)}; those of 4 bits take "
            "a group and a zero point: w4a8-g32, w4a8-g64, w4a8-g128, w4a8-g128-asym."
        )
    return Integer(scheme)


def head_scheme(scheme: Scheme) -> Scheme:
    """Of the head beside layers in `scheme`: 8 bits at least, as it decides tokens directly."""
    return Scheme("int8", activations="int8" if scheme.activations == "int8" else "float")


def formats_of(quantization: str | None, dtype: torch.dtype) -> WeightFormats:
    """A model's formats."""
    if quantization is None:
        return WeightFormats(Dense(dtype), Dense(dtype))
    matrix = parse_quantization(quantization)
    return WeightFormats(matrix, format_of(head_scheme(parse_scheme(quantization))))
