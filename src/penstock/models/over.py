"""A source over another: what changes some of its tensors inherits the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.models.checkpoint import Source
from penstock.quant import Codes, Scheme


class Over:
    """`base` as it is."""

    def __init__(self, base: Source) -> None:
        self._base = base

    @property
    def base(self) -> Source:
        """What lies under it."""
        return self._base

    @property
    def path(self) -> Path:
        """Of the base."""
        return self._base.path

    @property
    def config(self) -> dict[str, Any]:
        """Of the base."""
        return self._base.config

    def files(self) -> list[Path]:
        """Of the base."""
        return self._base.files()

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._base.shape(name)

    def dtype(self) -> torch.dtype:
        """Of the base's tensors."""
        return self._base.dtype()

    def scheme(self, name: str) -> Scheme | None:
        """How a tensor is quantized."""
        return self._base.scheme(name)

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or codes."""
        return self._base.read(name)
