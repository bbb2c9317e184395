"""From a name such as `w4a8-g64-asym` to the formats of a model's matrices."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.errors import ConfigError
from penstock.quant.format import WeightFormat, WeightFormats
from penstock.quant.formats.dense import Dense
from penstock.quant.formats.float8 import Float8
from penstock.quant.formats.integer import Integer
from penstock.quant.formats.levels import Levels
from penstock.quant.formats.records import Records
from penstock.quant.methods.rtn import FLOAT8
from penstock.quant.scheme import SCHEMES, Scheme, parse_scheme

WIDE = "mlp.down"
"""The matrix whose rows of activations differ most in size. Beside int8 they are rotated: rounding
them lost as much as all the rest together (docs/formats/int8.md)."""

QUANTIZATIONS = SCHEMES
"""The base names; `quant.scheme` says what they take: `w4a8-g64-asym`, `fp8-block`, …"""


def format_of(scheme: Scheme) -> WeightFormat:
    """The format that stores matrices of `scheme`; each has a kernel (`ops.linear`)."""
    if scheme.is_integer:
        return Integer(scheme)
    if scheme.is_k:
        return Records(scheme)
    return Float8(scheme) if scheme.kind in FLOAT8 else Levels(scheme)


def parse_quantization(name: str) -> WeightFormat:
    """The format of the layers' matrices that `name` means; ConfigError for any other name."""
    scheme = parse_scheme(name)
    if scheme.static:
        raise ConfigError(
            f"quantization={name!r} needs a scale of each matrix's activations, which calibration "
            f"finds: penstock export MODEL --quant {name} --calib TEXT -o DIR, then load DIR. Or "
            f"let each token find its own: quantization={name.removesuffix('-static')!r}."
        )
    return format_of(scheme)


def head_scheme(scheme: Scheme) -> Scheme:
    """Of the head beside layers in `scheme`: 8 bits at least, as it decides tokens directly."""
    whole = scheme.activations.startswith("int8")
    return Scheme("int8", activations="int8" if whole else "float")


def formats_of(quantization: str | None, dtype: torch.dtype) -> WeightFormats:
    """A model's formats."""
    if quantization is None:
        return WeightFormats(Dense(dtype), Dense(dtype))
    matrix, scheme = parse_quantization(quantization), parse_scheme(quantization)
    special = {}
    if scheme.activations == "int8":
        special[WIDE] = format_of(replace(scheme, activations="int8_rotated"))
    return WeightFormats(matrix, format_of(head_scheme(scheme)), special)
