"""A folder whose weights another tool quantized, as a source of codes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.models.checkpoint import Checkpoint
from penstock.quant import Codes, Scheme
from penstock.quant.files import Config, find_matrices

logger = logging.getLogger("penstock")


class QuantizedCheckpoint:
    """A checkpoint with a `quantization_config`; see `quant.files` for the layouts.

    What matrices are made of is hidden; they have the name of their weight. A matrix that no
    `Scheme` says has none, and reads as plain values: one warning names those.
    """

    def __init__(self, checkpoint: Checkpoint, config: Config) -> None:
        self._checkpoint, self._layout = checkpoint, str(config.get("quant_method"))
        found = find_matrices(config, checkpoint)
        self._matrices = found.matrices
        used = {part for matrix in found.matrices.values() for part in matrix.parts}
        hidden = used | found.hidden
        self._plain = [name for name in checkpoint.names() if name not in hidden]
        for text, names in found.notices.items():
            more = "" if len(names) == 1 else f" and {len(names) - 1} more"
            logger.warning("%s: %s (%s%s).", checkpoint.path.name, text, names[0], more)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._checkpoint.path

    @property
    def config(self) -> dict[str, Any]:
        """Of config.json."""
        return self._checkpoint.config

    def files(self) -> list[Path]:
        """Of the checkpoint."""
        return self._checkpoint.files()

    def names(self) -> list[str]:
        """Every weight's name, sorted."""
        return sorted([*self._plain, *self._matrices])

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it; of a quantized matrix [N, K]."""
        matrix = self._matrices.get(name)
        return self._checkpoint.shape(name) if matrix is None else matrix.shape

    def dtype(self) -> torch.dtype:
        """What most of the unquantized tensors are stored in."""
        return self._checkpoint.dtype_of(self._plain)

    def stored_as(self, name: str) -> str:
        """The name of a tensor's elements or a matrix's scheme; the layout's where none says it."""
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._checkpoint.stored_as(name)
        return matrix.scheme.name if matrix.scheme is not None else self._layout

    def scheme(self, name: str) -> Scheme | None:
        """How the matrix `name` is quantized; None where it isn't, or where nothing says it."""
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.scheme

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or the codes of one that is quantized."""
        matrix = self._matrices.get(name)
        return self._checkpoint.read(name) if matrix is None else matrix.read()
