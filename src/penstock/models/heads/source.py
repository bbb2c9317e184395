"""The tensors of heads: safetensors, or what `torch.save` has written."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.errors import ModelNotFoundError, WeightsError


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
        raise ValueError(f"it holds a {type(held).__name__}, not tensors by their names")
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{name!r} in it is a {type(value).__name__}, not a tensor")
    return held


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
