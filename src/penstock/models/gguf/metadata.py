"""The metadata of a GGUF file: typed access that remembers which keys were read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from penstock.errors import UnsupportedModelError


class Metadata:
    """The keys of one file, each of which is read or named."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self._values = values
        self._path = path
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def own(self, key: str) -> str:
        """`key` with the architecture before it."""
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        """The value of the full `key`."""
        self._read.add(key)
        return self._values.get(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return str(self._typed(key, str, "a text", default))

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 on; of a list with one entry per layer, the one they all have."""
        value = self.get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        elif isinstance(value, list):
            raise self.fail(key, value, "the same for every layer")
        else:
            value = self._typed(key, int, "a whole number", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(key, value, "a whole number from 0 on")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._typed(key, (int, float), "a number", default)
        if isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        return bool(self._typed(key, bool, "true or false", default))

    def unread(self) -> dict[str, Any]:
        """Keys of the architecture that nobody asked for, with their values."""
        prefix = self.own("")
        return {
            key: value
            for key, value in self._values.items()
            if key.startswith(prefix) and key not in self._read
        }

    def fail(self, key: str, value: Any, wanted: str) -> UnsupportedModelError:
        """An error about one key."""
        shown = repr(value) if len(repr(value)) < 60 else f"a {type(value).__name__}"
        return UnsupportedModelError(f"{self._path}: {key} must be {wanted}, not {shown}.")

    def _typed(self, key: str, kind: Any, wanted: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise UnsupportedModelError(
                f"{self._path} has no {key}, which this kind of model needs."
            )
        if not isinstance(value, kind):
            raise self.fail(key, value, wanted)
        return value
