"""Where the last tokens stood before: hash chains, as compressors of the LZ77 family keep them.

For runs of n, 2n, 4n, … tokens a table has, for each hash, the latest place where such a run ended,
and each place knows the one before it in its chain. The longest run that is found anywhere is
lengthened token by token; where it stood says how it may go on. A place costs 4 bytes in each
chain and about as much in each table; hashes may collide, so every place's tokens are compared.
Source: Deutsch 1996, RFC 1951 §4.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

MOST_PLACES: Final = 64
"""Of a chain that are looked at, the latest first."""

_BASE: Final = 0x9E3779B97F4A7C15  # odd, its bits without pattern: 2**64 over the golden ratio
_BITS: Final = 64
_MASK: Final = (1 << _BITS) - 1
_MANY: Final = 48  # tokens from which on arrays are faster than a loop
_FULL: Final = 4  # places for an entry of the table, from which on it is made larger

Numbers = npt.NDArray[np.uint64]


class Runs:
    """The runs of a text that grows; only those that something follows."""

    __slots__ = ("_begin", "_bits", "_end", "_levels", "longest", "sizes")

    def __init__(self, shortest: int, longest: int, room: int) -> None:
        """Matches of `shortest` to `longest` tokens; room: tokens that are to be expected."""
        self.longest = longest
        self.sizes = [shortest]
        while 2 * self.sizes[-1] <= longest:
            self.sizes.append(2 * self.sizes[-1])
        self._bits = max(6, (room - 1).bit_length())
        self._levels = [_Level(size, self._bits) for size in self.sizes]
        self._begin = self._end = 0

    @property
    def nbytes(self) -> int:
        """What it takes, without the text."""
        return sum(4 * (len(one.heads) + len(one.previous)) for one in self._levels)

    @property
    def hashes(self) -> list[int]:
        """Of the runs that the text ends with, by size."""
        return [level.hash for level in self._levels]

    def salted(self, hashes: list[int], salt: int) -> list[int]:
        """What `hashes` would be if `salt` were added to every token."""
        pairs = zip(hashes, self._levels, strict=True)
        return [(value + salt * level.ones) & _MASK for value, level in pairs]

    def begin(self, place: int) -> None:
        """Go on at that place of the text, with what has nothing to do with all before it."""
        for level in self._levels:
            level.hash = 0
            level.previous.frombytes(bytes(4 * (place - self._end)))
        self._begin = self._end = place

    def read(self, text: Sequence[int], end: int | None = None) -> None:
        """Go on from where it was to the end of `text`, of which all before that is as it was."""
        end = len(text) if end is None else end
        if end > _FULL << self._bits and not self._begin:
            self._bits = (end - 1).bit_length() + 1
            self._levels = [_Level(size, self._bits) for size in self.sizes]
            self._end = 0
        if end - self._end < _MANY:
            for level in self._levels:
                level.read(text, self._begin, self._end, end)
        else:
            first = max(self._begin, self._end - self.sizes[-1])
            numbers = np.array(text[first:end], dtype=np.int64).astype(np.uint64)
            hashes = _hashes(numbers, self.sizes[0])
            for level in self._levels:
                if level.size > self.sizes[0]:
                    hashes = _joined(hashes, level.size // 2)
                level.read_many(hashes, first, self._begin, self._end, end)
        self._end = end

    def find(
        self, text: Sequence[int], tail: Sequence[int], hashes: list[int], first: bool = False
    ) -> tuple[int, list[int]]:
        """How many tokens of `tail`'s end stand in `text` too, and the places that follow them.

        Of at most `MOST_PLACES` places that the longest run leads to, those with the longest match,
        the latest first; first: no more than that one matters. tail: at most `longest` tokens, of
        text's type; hashes: of its runs.
        """
        for i in range(len(hashes) - 1, -1, -1):
            level = self._levels[i]
            place = level.heads[hashes[i] >> level.shift]
            if place and level.size <= len(tail):
                length, places = level.follow(place, text, tail, first)
                if places:
                    return length, places
        return 0, []


class _Level:
    """The runs of one size.

    A run's hash is the sum of its tokens, the last times the base, the one before it times the
    base's square, and so on, modulo 2**64: the next run's follows from it, and that of a run twice
    as long from those of its halves.
    """

    __slots__ = ("dropped", "hash", "heads", "ones", "previous", "shift", "size")

    def __init__(self, size: int, bits: int) -> None:
        self.size = size
        self.dropped = pow(_BASE, size + 1, 1 << _BITS)  # the factor of a token that is left behind
        self.ones = sum(pow(_BASE, i + 1, 1 << _BITS) for i in range(size)) & _MASK
        self.shift = _BITS - bits
        self.hash = 0  # of the last `size` tokens
        self.heads = array("i", bytes(4 << bits))  # the latest place by hash; 0 is none
        self.previous = array("i")  # by place

    def read(self, text: Sequence[int], begin: int, start: int, end: int) -> None:
        """text[start:end], of a document that begins at `begin`."""
        size, dropped, shift, value = self.size, self.dropped, self.shift, self.hash
        heads, previous = self.heads, self.previous
        for place in range(start, end):
            if place < begin + size:
                previous.append(0)
                value = (value + text[place]) * _BASE & _MASK
                continue
            bucket = value >> shift
            previous.append(heads[bucket])
            heads[bucket] = place
            value = ((value + text[place]) * _BASE - text[place - size] * dropped) & _MASK
        self.hash = value

    def read_many(self, hashes: Numbers, first: int, begin: int, start: int, end: int) -> None:
        """The same; hashes: of the runs that end with each token from `first` on."""
        linked = max(start, begin + self.size)  # the first place that a whole run leads to
        self.previous.frombytes(bytes(4 * (min(linked, end) - start)))
        self.hash = int(hashes[-1])
        if linked >= end:
            return
        buckets = hashes[linked - 1 - first : end - 1 - first] >> np.uint64(self.shift)
        order = np.argsort(buckets, kind="stable")
        sorted_buckets, places = buckets[order].astype(np.int64), order + linked
        new = np.concatenate(([True], sorted_buckets[1:] != sorted_buckets[:-1]))
        heads = np.frombuffer(self.heads, dtype=np.int32)
        before = np.empty(len(order), dtype=np.int32)
        before[order[1:]] = places[:-1]
        before[order[new]] = heads[sorted_buckets[new]]
        last = np.concatenate((new[1:], [True]))
        heads[sorted_buckets[last]] = places[last]
        self.previous.frombytes(before.tobytes())

    def follow(
        self, place: int, text: Sequence[int], tail: Sequence[int], first: bool
    ) -> tuple[int, list[int]]:
        """Runs.find, of the chain that begins at `place`."""
        best, most = self.size, len(tail)
        found: list[int] = []
        run, previous = tail[-best:], self.previous
        for _ in range(MOST_PLACES):
            if not place:
                break
            if text[place - best : place] == run:
                length, limit = best, min(most, place)
                while length < limit and text[place - length - 1] == tail[-length - 1]:
                    length += 1
                if length > best:
                    best, found = length, []
                    run = tail[-best:]
                found.append(place)
                if first and best == most:
                    break
            place = previous[place]
        return best, found


def _hashes(numbers: Numbers, size: int) -> Numbers:
    """Of the runs of so many numbers that end with each; shorter ones at the start."""
    found = np.zeros_like(numbers)
    for i in range(min(size, len(numbers))):
        found[i:] += numbers[: len(numbers) - i] * np.uint64(pow(_BASE, i + 1, 1 << _BITS))
    return found


def _joined(hashes: Numbers, size: int) -> Numbers:
    """Those of runs twice as long as `size`, from those of `size`."""
    found = hashes.copy()
    found[size:] += hashes[:-size] * np.uint64(pow(_BASE, size, 1 << _BITS))
    return found
