"""Which tokens a step sees: rows from several sources, at paces that may change during a run.

What row comes next depends only on how many each source has given, so a run that was killed goes
on with the rows it would have had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import ConfigError
from recipes.corpus import Examples, Stream


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows."""

    tokens: Tensor  # [B, T + 1] int64
    weights: Tensor  # [B, T] float32: how much the loss of tokens[:, 1:] counts
    documents: Tensor | None  # [B, T] int64; None where a token may see all before it

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`, copied while the device works on."""
        move = {"device": device, "non_blocking": True}
        documents = None if self.documents is None else self.documents.to(**move)
        return Batch(self.tokens.to(**move), self.weights.to(**move), documents)

    def split(self, rows: int) -> list["Batch"]:
        """Micro-batches of `rows` rows."""
        return [
            Batch(
                self.tokens[i : i + rows],
                self.weights[i : i + rows],
                None if self.documents is None else self.documents[i : i + rows],
            )
            for i in range(0, len(self.tokens), rows)
        ]

    def cut(self, length: int) -> "Batch":
        """The same tokens as shorter rows, none of which sees another: [B · T / length, length]."""
        documents = self.documents
        return Batch(
            self.tokens.unfold(1, length + 1, length).flatten(0, 1),
            self.weights.reshape(-1, length),
            None if documents is None else documents.reshape(-1, length),
        )


Row = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]
"""Tokens [T + 1], weights [T], documents [T]."""


class Source(Protocol):
    """Rows, some number of them an epoch."""

    def __len__(self) -> int: ...

    def row(self, index: int, shift: float) -> Row:
        """Row `index` of an epoch whose windows are moved by `shift` (0 to 1) of a row."""
        ...


class Windows:
    """Windows of `length` + 1 tokens of a stream; each epoch cuts it at other places."""

    def __init__(self, stream: Stream, length: int) -> None:
        self.tokens, self.length = stream.tokens, length
        if len(self.tokens) < 2 * length + 2:
            # too short to be cut twice: repeat it
            times = -(-(2 * length + 2) // len(self.tokens))
            self.tokens = np.tile(self.tokens, times)
        self._ones = np.ones(length, np.float32)
        self._zeros = np.zeros(length, np.int64)

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length - 1

    def row(self, index: int, shift: float) -> Row:
        start = index * self.length + int(shift * self.length)
        tokens = self.tokens[start : start + self.length + 1].astype(np.int64)
        return tokens, self._ones, self._zeros


class PackedExamples:
    """Whole conversations, as many to a row as fit; none sees another one of its row.

    Source: best-fit packing: Ding et al. 2024, arXiv:2404.10830.
    """

    def __init__(self, examples: Examples, length: int, all_tokens: bool = False) -> None:
        self.examples, self.length, self.all_tokens = examples, length, all_tokens
        self.rows = best_fit(np.diff(examples.offsets), length + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int, shift: float) -> Row:
        tokens = np.zeros(self.length + 1, np.int64)
        weights = np.zeros(self.length + 1, np.float32)
        documents = np.full(self.length + 1, -1, np.int64)
        at = 0
        for number, example in enumerate(self.rows[index]):
            start, end = self.examples.offsets[example], self.examples.offsets[example + 1]
            end = min(end, start + self.length + 1 - at)  # only a row's sole example is cut
            size = int(end - start)
            tokens[at : at + size] = self.examples.tokens[start:end]
            mask = self.examples.mask[start:end]
            weights[at : at + size] = 1.0 if self.all_tokens else mask
            weights[at] = 0.0  # nothing predicts an example's first token
            documents[at : at + size] = number
            at += size
        return tokens, weights[1:], documents[:-1]


def best_fit(lengths: Sequence[int] | NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Items by row: the longest first, each to the row with the least room that still fits."""
    rows: list[list[int]] = []
    room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by what is left in them
    for item in np.argsort(-np.asarray(lengths), kind="stable"):
        size = min(int(lengths[item]), capacity)
        left = next((left for left in range(size, capacity + 1) if room[left]), None)
        if left is None:
            rows.append([])
            number, left = len(rows) - 1, capacity
        else:
            number = room[left].pop()
        rows[number].append(int(item))
        room[left - size].append(number)
    return rows


class Mixture:
    """Batches from several sources.

    sources: rows by name. paces: how often each source is read, next to the others, at the start
    and at the end; in between they change linearly. With all paces equal, every source has been
    read equally often at any moment, however long the run. isolate: conversations of one row don't
    see each other.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        paces: Mapping[str, tuple[float, float]],
        rows: int,
        seed: int,
        isolate: bool,
    ) -> None:
        missing = sorted(set(paces) - set(sources))
        if missing or not paces:
            raise ConfigError(
                f"The mixture names {', '.join(missing) or 'nothing'}, but the sources are "
                f"{', '.join(sorted(sources))}."
            )
        self.sources, self.paces = dict(sources), dict(paces)
        self.rows, self.seed, self.isolate = rows, seed, isolate
        self.drawn = dict.fromkeys(paces, 0)
        self.owed = dict.fromkeys(paces, 0.0)  # rows that a source is behind its share
        self._orders: dict[str, tuple[int, NDArray[np.int64], float]] = {}

    def state(self) -> dict[str, dict[str, float]]:
        """What `restore` needs to go on."""
        return {"drawn": dict(self.drawn), "owed": dict(self.owed)}

    def restore(self, state: dict[str, dict[str, float]]) -> None:
        self.drawn = {name: int(count) for name, count in state["drawn"].items()}
        self.owed = dict(state["owed"])

    def epochs(self) -> dict[str, float]:
        """How often each source was read."""
        return {name: count / len(self.sources[name]) for name, count in self.drawn.items()}

    def batch(self, progress: float) -> Batch:
        """The next rows; progress (0 to 1) decides the paces."""
        found = [self._next(name) for name in self._names(progress)]
        tokens, weights, documents = (
            torch.from_numpy(np.stack(x)) for x in zip(*found, strict=True)
        )
        return Batch(tokens, weights, documents if self.isolate else None)

    def _names(self, progress: float) -> list[str]:
        """The source of each row: whoever is furthest behind its share comes next."""
        mix = {
            name: (start + (end - start) * progress) * len(self.sources[name])
            for name, (start, end) in self.paces.items()
        }
        total = sum(mix.values())
        for name, share in mix.items():
            self.owed[name] += self.rows * share / total
        names = []
        for _ in range(self.rows):
            name = max(self.owed, key=lambda n: self.owed[n])
            self.owed[name] -= 1.0
            names.append(name)
        return names

    def _next(self, name: str) -> Row:
        source, count = self.sources[name], self.drawn[name]
        epoch, place = divmod(count, len(source))
        if self._orders.get(name, (-1,))[0] != epoch:
            key = [self.seed, epoch, *name.encode()]
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
            order = generator.permutation(len(source))
            self._orders[name] = epoch, order, float(generator.random())
        _, order, shift = self._orders[name]
        self.drawn[name] += 1
        return source.row(int(order[place]), shift)
