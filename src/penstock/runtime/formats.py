"""Weight formats as data: what an engine folder says of how its matrices are stored.

A format is that of a dtype, by its name, or that of a scheme, by its fields.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_args

import torch

from penstock.errors import ConfigError, EngineFolderError, kind_of
from penstock.quant import Dense, Scheme, WeightFormat, WeightFormats, format_of
from penstock.quant.formats.quantized import Quantized
from penstock.quant.scheme import Activations, Kind

_PLAIN = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_TYPES = {"kind": str, "group": int, "symmetric": bool, "activations": str, "rows": int}
"""Of a scheme's fields."""


def encode(formats: WeightFormats) -> dict[str, Any]:
    """For JSON."""
    return {
        "matrix": _encoded(formats.matrix),
        "head": _encoded(formats.head),
        "special": {module: _encoded(held) for module, held in formats.special.items()},
    }


def decode_formats(data: Any) -> WeightFormats:
    """What `encode` was given. Raises EngineFolderError, naming the field, for other data."""
    if not isinstance(data, dict) or set(data) != {"matrix", "head", "special"}:
        raise EngineFolderError("formats in its manifest aren't those of matrix, head and special")
    special = data["special"]
    if not isinstance(special, dict):
        raise EngineFolderError(f"formats.special in its manifest is {kind_of(special)}")
    return WeightFormats(
        _decoded("matrix", data["matrix"]),
        _decoded("head", data["head"]),
        {module: _decoded(f"special.{module}", one) for module, one in special.items()},
    )


def _encoded(held: WeightFormat) -> Any:
    return asdict(held.scheme) if isinstance(held, Quantized) else held.name


def _decoded(field: str, data: Any) -> WeightFormat:
    if isinstance(data, str) and data in _PLAIN:
        return Dense(_PLAIN[data])
    if isinstance(data, dict) and {key: type(value) for key, value in data.items()} == _TYPES:
        known = data["kind"] in get_args(Kind) and data["activations"] in get_args(Activations)
        try:
            if known:
                return format_of(Scheme(**data))
        except ConfigError as error:
            raise EngineFolderError(f"formats.{field} in its manifest: {error}") from error
    raise EngineFolderError(f"formats.{field} in its manifest is {data!r:.80}, not a format")
