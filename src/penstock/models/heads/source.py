"""The tensors of heads: safetensors, or what `torch.save` has written; and what they must be."""

from __future__ import annotations

import math
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelNotFoundError, WeightsError, kind_of

Ids = NDArray[np.int64]

STORED = (torch.float32, torch.bfloat16, torch.float16)
"""What weights of heads may be."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def read_tensors(folder: Path, names: Sequence[str]) -> tuple[Path, dict[str, Tensor]]:
    """The first file of these `names` that `folder` has, and its tensors, mapped where that goes.

    Raises ModelNotFoundError for a folder without any, WeightsError for a file that is broken or
    holds other things than tensors: those aren't loaded, as loading them could run anything.
    """
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        held = sorted(path.name for path in folder.iterdir())
        raise ModelNotFoundError(
            f"{folder} has none of {', '.join(names)}, one of which holds the weights of heads. "
            f"It has {', '.join(held[:8]) or 'nothing'}."
        )
    file = found[0]
    try:
        tensors = _safetensors(file) if file.suffix == ".safetensors" else _saved(file)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError) as error:
        raise WeightsError(
            f"{file} ({file.stat().st_size} bytes) can't be read: {_first_line(error)}. It is "
            "corrupt or was cut off: download or convert it again."
        ) from error
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{file} isn't a file of tensors only: {_first_line(error)}. Convert it to safetensors "
            "where you trust it."
        ) from error
    return file, tensors


def _safetensors(file: Path) -> dict[str, Tensor]:
    with safe_open(file, framework="pt", device="cpu") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118


def _saved(file: Path) -> dict[str, Tensor]:
    mapped = zipfile.is_zipfile(file)  # the form that torch writes since 1.6
    held: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(held, dict):
        raise ValueError(f"it holds {kind_of(held)}, not tensors by their names")
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{name!r} in it is {kind_of(value)}, not a tensor")
        if value.layout is not torch.strided or value.is_meta:
            raise ValueError(f"{name!r} in it is sparse or has no values")
    return held


def check_finite(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises WeightsError where a weight is NaN or infinite: such a head guesses nothing."""
    for name, tensor in tensors.items():
        if tensor.dtype not in STORED or not tensor.numel():
            continue
        if all(math.isfinite(end) for end in tensor.aminmax()):  # NaN is both ends; nothing copied
            continue
        bad = int((~tensor.isfinite()).sum())
        raise WeightsError(
            f"{bad} of {tensor.numel()} values of {name} in {file} are NaN or infinite. The file "
            "is damaged: download or convert it again."
        )


def as_ids(file: Path, name: str, values: Tensor) -> Ids:
    """A list of integers. Raises WeightsError for what is none."""
    if values.dtype not in _INTEGERS or values.dim() != 1:
        raise WeightsError(
            f"{file}: {name} is {values.dtype} of {list(values.shape)}, not a list of integers."
        )
    return values.numpy().astype(np.int64)


def check_ids(file: Path, name: str, ids: Ids, size: int) -> None:
    """Raises WeightsError where `ids`, which `name` gives, aren't different ones below `size`."""
    if len(ids) and (ids.min() < 0 or ids.max() >= size or len(np.unique(ids)) < len(ids)):
        raise WeightsError(
            f"{file}: {name} leads to tokens from {ids.min():,} to {ids.max():,}, some of them "
            f"twice or beyond the vocabulary of {size:,}."
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
