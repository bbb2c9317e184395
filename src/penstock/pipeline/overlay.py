"""A source with some of its tensors replaced: a quantized model that no file holds yet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.models.weights import Source
from penstock.quant import Codes, Scheme


class Overlay:
    """`base`, but for the tensors given: what `quantize_model` yields, in memory."""

    def __init__(self, base: Source, tensors: Iterable[tuple[str, Tensor | Codes]]) -> None:
        self._base = base
        self._own = dict(tensors)

    @property
    def path(self) -> Path:
        """Of the base."""
        return self._base.path

    @property
    def config(self) -> dict[str, Any]:
        """Of the base."""
        return self._base.config

    def names(self) -> list[str]:
        """Every tensor's name, sorted."""
        return self._base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        own = self._own.get(name)
        return self._base.shape(name) if own is None else tuple(own.shape)

    def dtype(self) -> torch.dtype:
        """Of the base's tensors."""
        return self._base.dtype()

    def scheme(self, name: str) -> Scheme | None:
        """How a tensor is quantized, here or in the base."""
        own = self._own.get(name)
        if own is None:
            return self._base.scheme(name)
        return own.scheme if isinstance(own, Codes) else None

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or codes."""
        own = self._own.get(name)
        return self._base.read(name) if own is None else own
