"""Weight formats as data: what an engine folder says of how its matrices are stored.

A format is a frozen dataclass of `penstock.quant`; its fields are literals, dtypes, other such
dataclasses, and mappings and tuples of these.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.errors import EngineFolderError
from penstock.quant import WeightFormats

_PACKAGE = "penstock.quant."


def encode(value: Any) -> Any:
    """For JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        held = {f.name: encode(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": held}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"map": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        return {"tuple": [encode(v) for v in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"A weight format holds a {type(value).__name__}, which can't be written down.")


def decode(data: Any) -> Any:
    """What `encode` was given."""
    if not isinstance(data, dict):
        return data
    if "dtype" in data:
        return getattr(torch, data["dtype"])
    if "map" in data:
        return {decode(k): decode(v) for k, v in data["map"]}
    if "tuple" in data:
        return tuple(decode(v) for v in data["tuple"])
    module, _, name = str(data["class"]).partition(":")
    if not module.startswith(_PACKAGE):
        raise ValueError(f"{module} isn't part of {_PACKAGE[:-1]}")
    kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"{name} isn't a weight format")
    return kind(**{k: decode(v) for k, v in data["fields"].items()})


def decode_formats(data: Any) -> WeightFormats:
    """The formats of a model. Raises EngineFolderError for data of another kind."""
    try:
        found = decode(data)
    except (KeyError, TypeError, ValueError, AttributeError, ImportError) as error:
        raise EngineFolderError(f"its weight formats can't be read: {error!r}") from error
    if not isinstance(found, WeightFormats):
        raise EngineFolderError(f"its weight formats are a {type(found).__name__}")
    return found
