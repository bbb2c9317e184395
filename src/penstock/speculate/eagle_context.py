"""What an EAGLE head's cache holds of each sequence, and the states that it hasn't read yet.

Row p of the head has the key and value of position p; they are made of the target's state there and
of the token at p + 1, and of nothing else, as the head has one layer. So a block of them is known
by the tokens up to one beyond its end, whoever computed it, and one that isn't known is left out of
what the head sees: the other blocks keep their positions. States are gone with the next step: those
that nobody has asked guesses for lie on a shelf, as many as it holds, the latest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.sampling.transfer import upload
from penstock.speculate.draft_loop import Ints
from penstock.speculate.stamps import NOTHING, Stamps, mark_after


class HeadStamps(Stamps):
    """Of a block that isn't full its writer's copies hold what it holds: the sequence may go on in
    one of them, as in the block of a way through a tree, and after a swap.
    """

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        held = self.of([source for source, _ in pairs])
        for (_, target), mark in zip(pairs, held, strict=True):
            self.set(target, mark)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        for (_, slot), mark in zip(pairs, self.of([b for b, _ in pairs]), strict=True):
            self._swapped[slot] = mark


class Shelf:
    """Rows of states that were copied from where the target keeps them."""

    def __init__(self, kept: Tensor, rows: int) -> None:
        """kept: the target's, of its last step."""
        self._kept = kept
        self.store = kept.new_empty((rows, kept.shape[1]))
        self._free = list(range(rows - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Rows that are free."""
        return len(self._free)

    def put(self, rows: Sequence[int]) -> list[int]:
        """Copy these rows of the target's; where they are."""
        places = [self._free.pop() for _ in rows]
        if len(rows) == 1:
            self.store[places[0]].copy_(self._kept[rows[0]])
        elif rows:
            where = self._kept.device
            found = self._kept.index_select(0, upload(torch.tensor(rows), where))
            self.store.index_copy_(0, upload(torch.tensor(places), where), found)
        return places

    def give_back(self, places: Sequence[int]) -> None:
        """They are needed no longer."""
        self._free += places


@dataclass(slots=True, eq=False)
class Context:
    """One sequence's."""

    key: object  # held, so that its id stays its own
    serial: int  # above 0
    blocks: list[int] = field(default_factory=list)
    row: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # the same
    marks: list[int] = field(default_factory=list)  # of its full blocks, by its tokens alone
    written: int = 0  # after the last position that the head has read
    writing: int | None = None  # which block isn't full yet
    first: int = 0  # the position of the first state on the shelf
    places: list[int] = field(default_factory=list)  # of it and of those after it

    @property
    def end(self) -> int:
        """After the last position whose state is on the shelf."""
        return self.first + len(self.places)


class Contexts:
    """Those of all sequences, and what each block holds."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.stamps = HeadStamps(num_blocks)
        """To be told of blocks that are copied or swapped."""
        self._size = block_size
        self._of: dict[int, Context] = {}  # by the key's id
        self._serials = itertools.count(1)

    def of(self, key: object, tokens: Sequence[int], blocks: Sequence[int]) -> Context:
        """That of a sequence of these tokens, in these blocks."""
        context = self._of.get(id(key))
        if context is None:
            context = self._of[id(key)] = Context(key, next(self._serials))
        if context.blocks != blocks:
            context.blocks = list(blocks)
            context.row = np.array(blocks, dtype=np.int32)
        marks, size = context.marks, self._size
        for at in range(len(marks), (len(tokens) - 1) // size):
            before = marks[-1] if marks else mark_after(NOTHING, tokens[:1])
            marks.append(mark_after(before, tokens[at * size + 1 : (at + 1) * size + 1]))
        return context

    def pop(self, key: object) -> Context | None:
        """Forget a sequence."""
        return self._of.pop(id(key), None)

    def all(self) -> list[Context]:
        """Those of all sequences, the oldest first."""
        return list(self._of.values())

    def start(self, context: Context, position: int) -> int:
        """From where on rows may be written, the first of them being that of `position`.

        In the middle of a block only after what is known of it; else from the next block on.
        """
        at, offset = divmod(position, self._size)
        if not offset:
            return position
        [held] = self.stamps.of((context.blocks[at],))
        known = at < len(context.marks) and held == context.marks[at]
        mine = held == -context.serial and context.writing == at
        if known or (mine and position <= context.written):
            return position
        return (at + 1) * self._size

    def begin(self, context: Context, first: int, end: int) -> None:
        """The rows of positions from `first` to before `end` will be written."""
        for at in range(first // self._size, -(-end // self._size)):
            self.stamps.set(context.blocks[at], -context.serial)

    def done(self, context: Context, first: int, end: int) -> None:
        """They have been."""
        size = self._size
        for at in range(first // size, end // size):
            self.stamps.set(context.blocks[at], context.marks[at])
        context.writing = end // size if end % size else None
        context.written = end

    def guessed(self, context: Context, first: int, end: int) -> None:
        """Guesses were written from position `first` on; their blocks hold nothing to rely on."""
        for at in range(-(-first // self._size), -(-end // self._size)):
            self.stamps.set(context.blocks[at], NOTHING)

    def known(self, context: Context, count: int) -> Ints:
        """Those of its first `count` blocks, full ones, that are known."""
        row = context.row[:count]
        places = self.known_places(context, count)
        return row if len(places) == count else row[places]

    def known_places(self, context: Context, count: int) -> list[int]:
        """Which of its first `count` blocks these are, counted from 0."""
        held, marks = self.stamps.of(context.blocks[:count]), context.marks[:count]
        if held == marks:
            return list(range(count))
        return [at for at, (a, b) in enumerate(zip(held, marks, strict=True)) if a == b]
