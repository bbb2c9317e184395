"""A source with some of its tensors replaced: a quantized model that no file holds yet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.checkpoint import Source
from penstock.models.over import Over
from penstock.quant import Codes, Scheme


class Overlay(Over):
    """`base`, but for the tensors given: what `quantize_model` yields, in memory."""

    def __init__(self, base: Source, tensors: Iterable[tuple[str, Tensor | Codes]]) -> None:
        super().__init__(base)
        self._own = dict(tensors)

    def files(self) -> list[Path]:
        """None: what tells one run over it from another isn't in files."""
        raise ConfigError(
            f"{len(self._own)} tensors over {self.path} are in memory alone, so nothing made of "
            "them can be kept in a work folder. Leave it out, or write them to a checkpoint."
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        own = self._own.get(name)
        return super().shape(name) if own is None else tuple(own.shape)

    def scheme(self, name: str) -> Scheme | None:
        """How a tensor is quantized, here or in the base."""
        own = self._own.get(name)
        if own is None:
            return super().scheme(name)
        return own.scheme if isinstance(own, Codes) else None

    def read(self, name: str) -> Tensor | Codes:
        """A tensor, or codes."""
        own = self._own.get(name)
        return super().read(name) if own is None else own
