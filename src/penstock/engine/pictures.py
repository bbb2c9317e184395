"""Where a request's pictures stand in its prompt, and what of them a step computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import InvalidPromptError
from penstock.models.vision.pictures import Picture
from penstock.runtime.vision import Sight

if TYPE_CHECKING:
    from penstock.engine.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Turning:
    """By which positions the tokens of a prompt turn, where pictures take fewer than they have
    tokens (M-RoPE).

    Source: Wang et al. 2024, arXiv:2409.12191.
    """

    positions: NDArray[np.int64]  # of the prompt's tokens; −1 where a picture's is
    places: NDArray[np.int64]  # [rows, 3]: time, row and column of each token of a picture
    shift: int  # of what follows the prompt

    @classmethod
    def of(cls, length: int, pictures: Sequence[Picture], places: NDArray[np.int64]) -> Turning:
        positions = np.full(length, -1)
        found: list[NDArray[np.int64]] = []
        at, done = 0, 0  # the next position, the tokens that have theirs
        row = 0
        for picture in pictures:
            assert picture.grid is not None
            first, (high, wide) = int(places[row]), picture.grid
            positions[done:first] = np.arange(at, at + first - done)
            at += first - done
            y, x = np.divmod(np.arange(high * wide), wide)
            found.append(np.stack((np.zeros_like(y), y, x), axis=1) + at)
            at, done, row = at + max(high, wide), first + high * wide, row + high * wide
        positions[done:] = np.arange(at, at + length - done)
        return cls(positions, np.concatenate(found), at + length - done - length)

    def of_tokens(self, at: NDArray[np.int64], row: int, spare: int) -> NDArray[np.int64]:
        """The positions of tokens at places `at` of the sequence, in the step's rows from `row` on.

        spare: of the first row that a picture's token turns by.
        """
        found = at + self.shift
        inside = at < len(self.positions)
        found[inside] = self.positions[at[inside]]
        own = found < 0
        found[own] = spare + row + np.flatnonzero(own)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The pictures of a request, whose rows take the places of certain tokens in turn."""

    pictures: tuple[Picture, ...]
    places: NDArray[np.int64]  # of the tokens that stand for rows, ascending
    ends: list[int]  # rows up to the end of each picture
    keys: list[int]  # the prompt's tokens, with a picture's key where it stands
    turning: Turning | None  # of a model whose tokens turn by rows and columns
    runs: tuple[tuple[int, int], ...] = ()  # [first, end) of tokens that see each other both ways

    @classmethod
    def of(
        cls,
        prompt: list[int],
        pictures: Sequence[Picture],
        token_id: int,
        turns: bool,
        both_ways: bool = False,
    ) -> Seen | None:
        """None where there are no pictures. Raises InvalidPromptError where the prompt has more
        places than they have rows, or fewer, or a picture's don't come one after another where they
        see each other both ways.
        """
        tokens = np.array(prompt, dtype=np.int64)
        places = np.flatnonzero(tokens == token_id)
        ends = list(accumulate(picture.tokens for picture in pictures))
        rows = ends[-1] if ends else 0
        if len(places) != rows:
            raise InvalidPromptError(
                f"The prompt has {len(places):,} tokens {token_id}, which stand for pieces of "
                f"pictures, but its {len(pictures)} pictures have {rows:,}. Give one placeholder "
                "for each picture, and no such token beside them."
            )
        if not pictures:
            return None
        begin = 0
        for picture, end in zip(pictures, ends, strict=True):
            tokens[places[begin:end]] = picture.key
            begin = end
        turning = Turning.of(len(prompt), pictures, places) if turns else None
        runs = _runs_of(pictures, places, len(prompt)) if both_ways else ()
        return cls(tuple(pictures), places, ends, tokens.tolist(), turning, runs)

    def whole(self, first: int, count: int) -> int:
        """As many of `count` tokens from `first` on as don't end inside a run."""
        for begin, end in self.runs:
            if begin < first + count < end:
                return max(begin - first, 0)
        return count

    def runs_in(self, first: int, end: int) -> list[tuple[int, int]]:
        """Those of which some tokens are among [first, end), as far as they are."""
        return [(max(a, first), b) for a, b in self.runs if b > first and a < end]

    def keyed(self, tokens: list[int]) -> list[int]:
        """A sequence's tokens, told apart by what is seen, too."""
        return self.keys[: len(tokens)] + tokens[len(self.keys) :]

    def place(self, sight: Sight, row: int, first: int, end: int) -> None:
        """Put the rows of the prompt's tokens [first, end) in the step's rows from `row` on."""
        low, high = np.searchsorted(self.places, (first, end))
        at = (self.places[low:high] - first + row).tolist()
        begin = 0
        for picture, stop in zip(self.pictures, self.ends, strict=True):
            here, there = max(begin, int(low)), min(stop, int(high))
            if here < there:
                rows = sight.rows_of(picture, here == begin)
                turns = None if self.turning is None else self.turning.places[here:there]
                some = rows[here - begin : there - begin]
                sight.place(at[here - low : there - low], some, turns)
            begin = stop


def _runs_of(
    pictures: Sequence[Picture], places: NDArray[np.int64], length: int
) -> tuple[tuple[int, int], ...]:
    """The tokens of each tile, in a prompt of `length`."""
    counts = [p.tokens // len(p.tiles) for p in pictures for _ in p.tiles]
    ends = np.cumsum(counts)
    firsts, lasts = places[ends - counts], places[ends - 1]
    if (lasts - firsts != np.array(counts) - 1).any() or lasts[-1] == length - 1:
        raise InvalidPromptError(
            "The tokens of a picture, which see each other both ways in this model, must come one "
            "after another, and the prompt's last token after them. Give one placeholder for each "
            "picture."
        )
    return tuple(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))


def check_pictures(pictures: object) -> None:
    """Raises InvalidPromptError for what isn't a tuple of pictures."""
    if not isinstance(pictures, tuple) or not all(isinstance(p, Picture) for p in pictures):
        raise InvalidPromptError(
            "RequestOptions.pictures must be a tuple of Picture, as `runtime.sight.pictures` cuts "
            "them. Or give the prompt as {'prompt': …, 'multi_modal_data': {'image': …}}."
        )


@contextmanager
def seeing(sight: Sight | None, batch: Batch) -> Iterator[None]:
    """Around a batch's step: what it computes of pictures lies where it reads it.

    The batch's size is told what the tower has spent for it.
    """
    if sight is None or not batch.seen:
        yield
        return
    try:
        with torch.inference_mode():
            for seen, row, first, end in batch.seen:
                seen.place(sight, row, first, end)
        batch.size.seen = sight.take_spent()
        yield
    finally:
        sight.clear()
