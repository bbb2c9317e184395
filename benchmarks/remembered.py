"""A reader that keeps what it has read: one reference for many variants."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.bench.reader import About, Reader, Reading

MOST_BYTES = 1 << 30
"""Of logits that are kept; what comes after is read anew each time."""


class Remembered:
    """`reader`, whose windows are computed once."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: dict[tuple[int, tuple[int, ...]], Reading] = {}
        self._bytes = 0

    @property
    def about(self) -> About:
        """What it is."""
        return self._reader.about

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """Token ids of each."""
        return self._reader.encode(documents)

    def pieces(self) -> list[bytes]:
        """The bytes of every token."""
        return self._reader.pieces()

    def kept(self) -> Tensor | None:
        """The ids that it has."""
        return self._reader.kept()

    def read(self, ids: Sequence[int], first: int, layers: bool = False) -> Reading:
        """The rows that predict `ids[first:]`; with `layers` they are always computed."""
        key = first, tuple(ids)
        if not layers and key in self._kept:
            return self._kept[key]
        found = self._reader.read(ids, first, layers)
        if not layers and self._bytes + found.logits.nbytes <= MOST_BYTES:
            self._kept[key] = found
            self._bytes += found.logits.nbytes
        return found

    def close(self) -> None:
        """Let go of the model."""
        self._reader.close()
