"""Reading little-endian values one after the other, never beyond the end of what there is."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from penstock.errors import WeightsError

_SCALARS: dict[int, tuple[str, struct.Struct]] = {
    0: ("uint8", struct.Struct("<B")),
    1: ("int8", struct.Struct("<b")),
    2: ("uint16", struct.Struct("<H")),
    3: ("int16", struct.Struct("<h")),
    4: ("uint32", struct.Struct("<I")),
    5: ("int32", struct.Struct("<i")),
    6: ("float32", struct.Struct("<f")),
    10: ("uint64", struct.Struct("<Q")),
    11: ("int64", struct.Struct("<q")),
    12: ("float64", struct.Struct("<d")),
}
"""Value types with a fixed size, by their number."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_DEPTH = 4  # of arrays in arrays; nothing written so far has more than one
_SMALLEST = {_BOOL: 1, _STRING: 8, _ARRAY: 12}
"""Bytes that an element takes at least: a count beyond the file is seen before it is believed."""

_uint32, _uint64 = struct.Struct("<I"), struct.Struct("<Q")


class Cursor:
    """A position in the bytes of a file."""

    def __init__(self, data: memoryview, path: str) -> None:
        self._data = data
        self._path = path
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes up to the end."""
        return len(self._data) - self.at

    def fail(self, what: str) -> WeightsError:
        """An error at this position."""
        return WeightsError(
            f"{self._path}: {what} (at byte {self.at:,} of {len(self._data):,}). The file is "
            "damaged or was cut off: download or convert it again."
        )

    def uint32(self, what: str) -> int:
        """Four bytes."""
        return int(self._scalar(_uint32, what))

    def uint64(self, what: str) -> int:
        """Eight bytes."""
        return int(self._scalar(_uint64, what))

    def count(self, what: str, smallest: int) -> int:
        """How many of `what` follow, each of `smallest` bytes at least."""
        count = self.uint64(f"the number of {what}")
        if count * smallest > self.left:
            raise self.fail(f"it announces {count:,} {what}, but only {self.left:,} bytes follow")
        return count

    def string(self, what: str) -> str:
        """A length and as many bytes of UTF-8."""
        length = self.count(f"bytes of {what}", 1)
        raw = self._data[self.at : self.at + length]
        self.at += length
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} isn't UTF-8: {error}") from error

    def value(self, what: str) -> Any:
        """A type and a value of it."""
        return self._of_type(self.uint32(f"the type of {what}"), what, 0)

    def _scalar(self, form: struct.Struct, what: str) -> Any:
        if form.size > self.left:
            raise self.fail(f"{what} needs {form.size} bytes and {self.left} are left")
        (value,) = form.unpack_from(self._data, self.at)
        self.at += form.size
        return value

    def _of_type(self, kind: int, what: str, depth: int) -> Any:
        if kind in _SCALARS:
            name, form = _SCALARS[kind]
            value = self._scalar(form, what)
            return shortest(value) if name == "float32" else value
        if kind == _BOOL:
            value = self._scalar(_SCALARS[0][1], what)
            if value > 1:
                raise self.fail(f"{what} is a truth value of {value}")
            return bool(value)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        raise self.fail(f"{what} has the value type {kind}, which there isn't")

    def _array(self, what: str, depth: int) -> list[Any]:
        if depth == _MAX_DEPTH:
            raise self.fail(f"{what} has more than {_MAX_DEPTH} arrays in each other")
        kind = self.uint32(f"the type of {what}'s elements")
        fixed = _SCALARS.get(kind)
        smallest = fixed[1].size if fixed else _SMALLEST.get(kind, 1)
        count = self.count(f"elements of {what}", smallest)
        if fixed is None:
            if kind not in _SMALLEST:
                raise self.fail(f"{what} has elements of type {kind}, which there isn't")
            return [self._of_type(kind, what, depth + 1) for _ in range(count)]
        name, form = fixed
        raw = self._data[self.at : self.at + count * form.size]
        self.at += count * form.size
        values: list[Any] = np.frombuffer(raw, np.dtype(name).newbyteorder("<")).tolist()
        return values


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the float32 `value`: 1e-05, not 9.999999747378752e-06.

    It is what the `config.json` said that the file was made of.
    """
    return float(str(np.float32(value)))
