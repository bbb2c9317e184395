"""How `linear` is cut into tiles and K into spans, by sizes alone.

What decides the order in which a row's products are added, spans of K and the step along it, is a
function of the matrix. Tiles, warps and stages may differ with the number of rows: they change no
bit, so a benchmark may try others (`override`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["float32", "half", "w8a16", "w4a16", "w8a8", "w4a8", "e4m3"]
"""Of what is read and multiplied: floats; codes of eight or four bits beside floats or int8; E4M3
beside E4M3, whose sums take twice the registers while they are promoted."""

PROCESSORS = 132
"""Programs that run at once, at least: the multiprocessors of an H100 or H200."""
FEATURES = 64
"""Out features of the least tile: a warp group's side of a product on Hopper."""
LEAST_SPAN = 1024
"""A span's values of K, at least: shorter ones spend their time filling the pipeline."""
WIDENED: tuple[Kind, ...] = ("w8a16", "w4a16")
"""Kinds whose codes are widened first: that keeps a program waiting, so that four of them share a
multiprocessor, each with half of LEAST_SPAN at least."""
ONE_SUM = 64
"""Up to so many rows, a program has one span, or one part of a pair, and one sum a feature."""
BLOCK = 128
"""Spans are multiples of it."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sides of a tile, and who computes it. `k` and `spans` decide bits; the rest doesn't."""

    features: int
    rows: int
    k: int  # values of K in a step
    warps: int
    stages: int  # steps whose operands are on their way
    spans: int = 1  # parts of K that are summed apart, each from zero, and then added in order
    most_k: int = 0  # `k` many times where they divide K: as many sums as steps of k have

    def step(self, depth: int, length: int) -> int:
        """Values of K in a step of a matrix of that K, in spans of `length`."""
        wide = self.most_k
        return wide if wide and depth % wide == 0 and length % wide == 0 else self.k


Bucket = tuple[Kind, bool, int]
"""A kind, whether each feature has two sums (gated, or many rows with spans), and the most rows."""

MANY = 1 << 30
"""The last bucket's rows."""

STEP: dict[Kind, int] = {
    "float32": 32, "half": 64, "w8a16": 128, "w4a16": 128, "w8a8": 128, "w4a8": 128,
    "e4m3": 128,
}  # fmt: skip

WIDE_STEP, WIDE_ROWS = 256, 32
"""Of codes of four bits and so many rows, a step is wider: a loop's own work weighs least there."""

_Table = dict[Kind, list[tuple[int, int, int, int]]]
_ROWS = (16, 32, 64, 128, MANY)

# features, rows, warps, stages. Few rows: 40 kB on their way on each multiprocessor, or more. Many:
# a tile whose sums fill the registers of its warps.
_FEW: _Table = {
    "float32": [(64, 16, 4, 4), (64, 32, 4, 4), (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3)],
    "half": [(64, 16, 4, 5), (64, 32, 4, 6), (128, 64, 8, 4), (64, 128, 4, 4), (128, 256, 8, 3)],
    "w8a16": [(64, 16, 4, 6), (64, 32, 4, 5), (64, 64, 4, 4), (64, 128, 4, 3), (128, 128, 8, 3)],
    "w4a16": [(64, 16, 4, 4), (64, 32, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 128, 8, 3)],
    "w8a8": [(64, 16, 4, 6), (64, 32, 4, 6), (64, 64, 4, 5), (64, 128, 4, 4), (128, 256, 8, 3)],
    "w4a8": [(64, 16, 4, 12), (64, 32, 4, 8), (64, 64, 4, 5), (64, 128, 4, 4), (128, 128, 8, 4)],
    "e4m3": [(64, 16, 4, 6), (64, 32, 4, 6), (64, 64, 4, 5), (64, 128, 4, 4), (128, 128, 8, 4)],
}
_TWICE: _Table = {
    "float32": [(64, 16, 4, 3), (64, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 3), (64, 32, 4, 3)],
    "half": [(64, 16, 4, 5), (64, 32, 4, 4), (64, 64, 4, 4), (64, 128, 4, 3), (128, 128, 8, 4)],
    "w8a16": [(64, 16, 4, 5), (64, 32, 4, 4), (64, 64, 4, 4), (64, 64, 4, 4), (128, 128, 8, 3)],
    "w4a16": [(64, 16, 4, 4), (64, 32, 4, 3), (64, 64, 4, 4), (64, 64, 4, 4), (128, 128, 8, 3)],
    "w8a8": [(64, 16, 4, 5), (64, 32, 4, 5), (64, 64, 4, 4), (64, 128, 4, 4), (128, 128, 8, 4)],
    "w4a8": [(64, 16, 4, 9), (64, 32, 4, 6), (64, 64, 4, 4), (64, 64, 4, 4), (128, 64, 8, 4)],
    "e4m3": [(64, 16, 4, 5), (64, 32, 4, 5), (64, 64, 4, 4), (64, 64, 4, 4), (64, 128, 4, 4)],
}

_table: dict[Bucket, tuple[int, int, int, int]] = {
    (kind, twice, rows): each
    for twice, table in ((False, _FEW), (True, _TWICE))
    for kind, column in table.items()
    for rows, each in zip(_ROWS, column, strict=True)
}
_overridden: dict[Bucket, tuple[int, int, int, int]] = {}


def override(table: Mapping[Bucket, tuple[int, int, int, int]]) -> None:
    """Put (features, rows, warps, stages) in place of some buckets'; an empty table: none of them.

    For whoever measures: no bit of a result changes.
    """
    unknown = set(table) - set(_table)
    if unknown:
        raise KeyError(f"There are no tiles for {sorted(unknown)}; there are: {sorted(_table)}.")
    _overridden.clear()
    _overridden.update(table)


def spans_for(n: int, k: int, kind: Kind = "half", gated: bool = False) -> int:
    """Parts of K of a matrix [n, k], each half's n where gated: enough that few rows' programs fill
    the multiprocessors.

    A power of two, or less where that many parts of whole blocks don't make K.
    """
    tiles, spans = -(-n // FEATURES), 1
    programs, least = PROCESSORS, LEAST_SPAN
    if kind in WIDENED and not gated:
        programs, least = 4 * PROCESSORS, LEAST_SPAN // 2
    while tiles * spans < programs and k // (2 * spans) >= least:
        spans *= 2
    return -(-k // span_length(k, spans))


def span_length(k: int, spans: int) -> int:
    """Values of K in each part but perhaps the last: whole blocks."""
    return -(-k // (spans * BLOCK)) * BLOCK


def has_two_sums(kind: Kind, rows: int, n: int, k: int, gated: bool = False) -> bool:
    """Whether a program of `rows` rows times a matrix [n, k] has two sums for each feature."""
    return gated or (rows > ONE_SUM and spans_for(n, k, kind, gated) > 1)


def tiles_for(
    kind: Kind, rows: int, n: int, k: int, gated: bool = False, halves: bool = False
) -> Tiles:
    """For `rows` rows times a matrix [n, k], each half's n where gated.

    halves: which are summed apart, so that each feature of a tile has one sum.
    """
    spans = spans_for(n, k, kind, gated)
    twice = has_two_sums(kind, rows, n, k, gated and not halves)
    bucket = (kind, twice, next(most for most in _ROWS if rows <= most))
    features, wide, warps, stages = _overridden.get(bucket, _table[bucket])
    most = WIDE_STEP if kind == "w4a16" and rows <= WIDE_ROWS else 0
    return Tiles(features, wide, STEP[kind], warps, stages, spans, most)
