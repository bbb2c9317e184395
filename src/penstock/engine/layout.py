"""A step's tokens, sequence after sequence; one whose draft is a tree is as many as it has ways.

Each way through a tree attends as a sequence of its own would: its blocks are the sequence's up to
where the ways part, then its own. A guess that lies on several ways is computed on the first of
them, and its key and value are written to all. So every row sees what it would see if its way were
all there is, in the same places, and no kernel knows of trees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.engine.request import Sequence
from penstock.speculate import Draft

Ints = NDArray[np.int32]


@dataclass(slots=True)
class Layout:
    """Lists that grow with each sequence."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])  # of each way, and the end
    contexts: list[int] = field(default_factory=list)  # of each way
    rows: list[int] = field(default_factory=list)  # of each way, its sequence's in the table
    lengths: list[int] = field(default_factory=list)  # of each sequence, all guesses included
    drafted: int = 0
    trees: list[tuple[Sequence, int]] = field(default_factory=list)  # and their first ways

    def take(self, sequence: Sequence, count: int) -> int:
        """Add `count` rows, the guesses included; how many these are."""
        first, draft = sequence.num_computed, sequence.draft
        self.tokens += sequence.tokens[first : first + count]
        guesses = 0
        if draft is not None:
            draft.arrange()
            self.tokens += draft.tokens
            guesses = len(draft)
            self.drafted += guesses
            if draft.parents is not None:
                self._part(sequence, draft)
                return guesses
        self.positions += range(first, first + count)
        self.starts.append(self.starts[-1] + count)
        self.contexts.append(first + count)
        self.lengths.append(first + count)
        self.rows.append(sequence.row)
        return guesses

    def _part(self, sequence: Sequence, draft: Draft) -> None:
        """A tree as its ways: each has the tokens that no way before it has, the first one the
        sequence's last.
        """
        first = sequence.num_computed
        self.trees.append((sequence, len(self.rows)))
        self.positions.append(first)
        known, root = 0, 1
        for way in draft.ways:
            new, end = way[-1] + 1 - known, first + 1 + len(way)
            self.positions += range(end - new, end)
            self.starts.append(self.starts[-1] + root + new)
            self.contexts.append(end)
            self.rows.append(sequence.row)
            known, root = way[-1] + 1, 0
        self.lengths.append(first + 1 + len(draft))  # as if they came one after another

    def part_blocks(self, blocks: Ints, size: int) -> list[int]:
        """Give ways their own blocks, in the table of all; what is written there too: the rows of
        tokens and the slots, by turns.
        """
        pairs = [pair for tree in self.trees for pair in self._part_blocks(*tree, blocks, size)]
        return [number for pair in pairs for number in pair]

    def _part_blocks(
        self, sequence: Sequence, at: int, blocks: Ints, size: int
    ) -> Iterator[tuple[int, int]]:
        assert sequence.draft is not None
        first, row = sequence.num_computed, self.starts[at]
        shared = (first + 1) // size
        known = 0  # guesses on the ways before
        for number, way in enumerate(sequence.draft.ways):
            if number:
                own = sequence.ways[number - 1]
                width = min(len(own), blocks.shape[1] - shared)
                blocks[at + number, shared : shared + width] = own[:width]
                again = [(first + 1 + i, row + 1 + place) for i, place in enumerate(way)]
                again = [pair for pair, place in zip(again, way, strict=True) if place < known]
                if first // size == shared:
                    again.append((first, row))
                for position, token in again:
                    yield token, own[position // size - shared] * size + position % size
            known = way[-1] + 1
