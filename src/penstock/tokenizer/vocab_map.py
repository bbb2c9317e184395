"""A reduced vocabulary: which of a tokenizer's ids a model still has, and how to write the others.

Outside a model, ids are always the tokenizer's. The file lies beside the weights,
`vocab_map.safetensors`:
    kept       [N] int32, ascending: the original id of each row of the embedding and the head
    start      [V + 1] int32, and
    rewritten  [start[V]] int32: original id i is written as rewritten[start[i]:start[i + 1]],
               kept ids; itself where it is kept, nothing where it can't be written
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from penstock.errors import InvalidPromptError, WeightsError

FILE = "vocab_map.safetensors"

Ids = NDArray[np.int32]


def _ids(name: str, stored: NDArray[Any]) -> Ids:
    """An array of a file; ValueError where it isn't a list of int32."""
    if stored.ndim != 1 or stored.dtype.kind not in "iu":
        raise ValueError(f"{name} is {stored.dtype} of {list(stored.shape)}")
    limits = np.iinfo(np.int32)
    if len(stored) and not limits.min <= int(stored.min()) <= int(stored.max()) <= limits.max:
        raise ValueError(f"{name} has ids from {stored.min()} to {stored.max()}")
    return stored.astype(np.int32)


class VocabMap:
    """N kept ids of V."""

    def __init__(self, kept: Ids, start: Ids, rewritten: Ids) -> None:
        """Raises ValueError for arrays that aren't a map."""
        size = len(start) - 1
        new = np.full(max(size, 0), -1, dtype=np.int32)
        if (
            size < 1
            or not len(kept)
            or kept[0] < 0
            or kept[-1] >= size
            or (np.diff(kept) < 1).any()
        ):
            raise ValueError(f"kept isn't ascending ids below {size}")
        new[kept] = np.arange(len(kept), dtype=np.int32)
        if start[0] != 0 or start[-1] != len(rewritten) or (np.diff(start) < 0).any():
            raise ValueError("start doesn't part rewritten")
        if len(rewritten) and (
            rewritten.min() < 0 or rewritten.max() >= size or (new[rewritten] < 0).any()
        ):
            raise ValueError("rewritten holds ids that aren't kept")
        self.kept, self._start, self._rewritten = kept, start, rewritten
        self.new = new  # [V] the row of each id, −1 where it isn't kept

    @classmethod
    def of(cls, size: int, kept: Iterable[int], rewritten: Mapping[int, Sequence[int]]) -> VocabMap:
        """From the ids that are kept of `size`, and what some of the others are written as."""
        chosen = sorted(set(kept))
        parts: list[Sequence[int]] = [rewritten.get(i, ()) for i in range(size)]
        for one in chosen:
            parts[one] = (one,)
        start = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        flat = np.array([i for part in parts for i in part], dtype=np.int32)
        return cls(np.array(chosen, dtype=np.int32), start, flat)

    @classmethod
    def load(cls, folder: Path) -> VocabMap | None:
        """The map of a checkpoint; None for one with its whole vocabulary."""
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            found = load_file(file)
            return cls(*(_ids(name, found[name]) for name in ("kept", "start", "rewritten")))
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise WeightsError(
                f"{file} isn't a map of a reduced vocabulary: {error}. Reduce the model again."
            ) from error

    def save(self, folder: Path) -> None:
        """Write the map beside a checkpoint's weights."""
        arrays = {"kept": self.kept, "start": self._start, "rewritten": self._rewritten}
        save_file(arrays, folder / FILE)

    @property
    def original_size(self) -> int:
        """V."""
        return len(self.new)

    def __len__(self) -> int:
        """N."""
        return len(self.kept)

    def has(self, token: int) -> bool:
        """Whether the id is kept."""
        return 0 <= token < len(self.new) and bool(self.new[token] >= 0)

    def original(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Rows of the model as original ids; those that it doesn't have are left out."""
        return tuple(int(self.kept[i]) for i in ids if 0 <= i < len(self.kept))

    def write(self, ids: Sequence[int], name: Callable[[int], str] = lambda _: "") -> list[int]:
        """The same text in kept ids.

        name: what a token looks like, for the error. Raises InvalidPromptError for an id that
        can't be written.
        """
        given = np.asarray(ids, dtype=np.int64)
        outside = given[given >= len(self.new)]  # tokens added without resizing the embedding
        if len(outside):
            raise InvalidPromptError(
                f"Token id {outside[0]}{name(int(outside[0]))} is outside the vocabulary of "
                f"{len(self.new)}. Leave it out."
            )
        if not len(given) or (self.new[given] >= 0).all():
            return list(ids)
        found: list[int] = []
        for token in given.tolist():
            part = self._rewritten[self._start[token] : self._start[token + 1]]
            if not len(part):
                raise InvalidPromptError(
                    f"Token id {token}{name(token)} isn't among the {len(self):,} of "
                    f"{len(self.new):,} that this model's reduced vocabulary has, and no others "
                    "can stand for it. Leave it out, or use the whole model."
                )
            found += part.tolist()
        return found
