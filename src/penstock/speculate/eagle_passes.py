"""Passes of an EAGLE head: rows of the target's states, then rows that it has given itself.

The head sees blocks that it knows, which may be fewer than the sequence has: what a query sees is
counted in these, while its position, and its slot in its own block, are the sequence's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.speculate.draft_loop import Array, DraftForward, DraftLimits, Ints
from penstock.speculate.eagle_context import Context, Contexts
from penstock.step import Step

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Head:
    """A head, as those who guess with it see it. Logits are good until its next pass."""

    by_states: DraftForward  # reads `states`, one row for each token of the step
    by_features: DraftForward  # reads `features`
    states: Tensor  # [N, W]
    features: Tensor  # [N, D]
    given: Tensor  # [N, D]: what the last pass has given, for each token of its step
    kept: Tensor  # [M, W]: the target's states of its last step
    copy: Callable[[Sequence[tuple[int, int]]], None]  # blocks of its cache, (from, to)
    num_blocks: int  # that it has: behind those that sequences have, those of `Ways`
    num_logits: int
    ids: Ids | None  # the token of each logit; None: the logit's number


@dataclass(frozen=True, slots=True)
class Reading:
    """States of one sequence that the head reads."""

    context: Context
    tokens: Sequence[int]  # of the sequence
    first: int  # the position of the first state
    store: Tensor  # where the states are …
    places: Sequence[int]  # … and which rows of it

    @property
    def end(self) -> int:
        return self.first + len(self.places)

    def part(self, start: int, stop: int) -> Reading:
        """Some of its states, by their numbers."""
        places = self.places[start:stop]
        return Reading(self.context, self.tokens, self.first + start, self.store, places)


class HeadPasses:
    """Lays passes out, in arrays that are allocated once, and runs them."""

    def __init__(self, head: Head, contexts: Contexts, limits: DraftLimits, width: int) -> None:
        """width: ways of a sequence, each a row of a pass; the first is in its own blocks."""
        self.head = head
        self._contexts = contexts
        self._size = limits.block_size
        self._width = width
        self.most_rows = len(head.states)
        rows = max(self.most_rows, limits.max_num_seqs * width)
        self._tokens, self._positions, self._slots = (Array(rows) for _ in range(3))
        self._query_start, self._context_len, self._sample_at = (Array(rows + 1) for _ in range(3))
        longest = -(-limits.max_model_len // limits.block_size) + 1
        self._blocks = Array(limits.max_num_seqs * width * longest)

    # ── rows of the target's states ──────────────────────────────────────────────────────────

    def read(self, readings: Sequence[Reading]) -> None:
        """Write the keys and values of all rows, in as many passes as they need."""
        left = [reading for reading in readings if reading.places]
        while left:
            now, room = list[Reading](), self.most_rows
            while left and room:
                reading = left.pop(0)
                now.append(reading.part(0, room))
                if len(reading.places) > room:
                    left.insert(0, reading.part(room, len(reading.places)))
                room -= len(now[-1].places)
            self.pass_over(now, ())

    def pass_over(self, readings: Sequence[Reading], sample_at: Sequence[int]) -> Tensor:
        """One pass over all rows of `readings`, the first tables of a call: logits of some rows."""
        contexts, head = self._contexts, self.head
        for reading in readings:
            contexts.begin(reading.context, reading.first, reading.end)
        at = 0
        with torch.inference_mode():
            for reading in readings:
                count = len(reading.places)
                into, places = head.states[at : at + count], torch.tensor(reading.places)
                torch.index_select(reading.store, 0, places, out=into)
                at += count
        logits = head.by_states(self._lay_out(readings, sample_at))
        for reading in readings:
            contexts.done(reading.context, reading.first, reading.end)
        return logits

    def _lay_out(self, readings: Sequence[Reading], sample_at: Sequence[int]) -> Step:
        size = self._size
        tables, seen, slots = list[Ints](), list[int](), list[Ints]()
        tokens, positions = list[int](), list[Ints]()
        for reading in readings:
            row, start, end = reading.context.row, reading.first // size, reading.end
            known = self._contexts.known(reading.context, start)
            tables.append(np.concatenate((known, row[start : -(-end // size)])))
            seen.append(len(known) * size + end - start * size)
            where = np.arange(reading.first, end, dtype=np.int32)
            positions.append(where)
            slots.append(row[where // size] * size + where % size)
            tokens += reading.tokens[reading.first + 1 : end + 1]
        counts = [len(reading.places) for reading in readings]
        held, table = self._blocks.table(len(tables), max(map(len, tables)))
        for into, one in zip(held, tables, strict=True):
            into[: len(one)] = one
            into[len(one) :] = 0
        return Step(
            tokens=self._tokens.fill(tokens),
            positions=self._positions.fill(np.concatenate(positions)),
            slots=self._slots.fill(np.concatenate(slots)),
            query_start=self._query_start.fill(np.cumsum([0, *counts])),
            context_len=self._context_len.fill(seen),
            block_table=table,
            sample_at=self._sample_at.fill(sample_at),
        )

    # ── rows of its own features ─────────────────────────────────────────────────────────────

    def ways(self, readings: Sequence[Reading], depths: Sequence[int]) -> Ways:
        """Ways on from the ends of `readings`, which were read. depths: of guesses, 2 or more."""
        return Ways(self, self._contexts, readings, depths, self._size, self._width)

    def go_on(self, tables: Ints, tokens: Ids, positions: Ints, slots: Ints, seen: Ints) -> Tensor:
        """One pass over a row for each way, whose features are there: logits of all.

        tables [R, M]; the others [R].
        """
        rows = len(tokens)
        held, table = self._blocks.table(*tables.shape)
        held[:] = tables
        step = Step(
            tokens=self._tokens.fill(tokens),
            positions=self._positions.fill(positions),
            slots=self._slots.fill(slots),
            query_start=self._query_start.fill(np.arange(rows + 1)),
            context_len=self._context_len.fill(seen),
            block_table=table,
            sample_at=self._sample_at.fill(np.arange(rows)),
        )
        return self.head.by_features(step)


class Ways:
    """Several continuations of each sequence, each with blocks that the others don't write to.

    The first way of a sequence goes on in the sequence's own blocks, the others in blocks behind
    the pool's, after a copy of the block that isn't full.
    """

    def __init__(
        self,
        passes: HeadPasses,
        contexts: Contexts,
        readings: Sequence[Reading],
        depths: Sequence[int],
        size: int,
        width: int,
    ) -> None:
        self._passes = passes
        self._size = size
        self._width = width
        self._last = np.array([reading.end - 1 for reading in readings], dtype=np.int32)
        """The last position of each sequence that is written, on all its ways."""
        tails, knowns = list[Ints](), list[Ints]()
        starts = (self._last + 1) // size  # the block that the next position is in
        self._start = starts.astype(np.int32)
        for reading, start, depth in zip(readings, starts.tolist(), depths, strict=True):
            last = reading.end + depth - 2  # the last guess isn't computed
            contexts.guessed(reading.context, reading.end, last + 1)
            knowns.append(contexts.known(reading.context, start))
            tails.append(reading.context.row[start : last // size + 1])
        self._known = np.array([len(known) for known in knowns], dtype=np.int32)
        self._tables = self._lay_out(knowns, tails)
        partial = (self._last + 1) % size != 0
        if width > 1 and partial.any():
            begun = np.flatnonzero(partial).tolist()
            self._copy([(s, 0, way, 0) for s in begun for way in range(1, width)])

    def _lay_out(self, knowns: Sequence[Ints], tails: Sequence[Ints]) -> Ints:
        """Tables of all ways, [S · width, M]."""
        width, longest = self._width, max(map(len, tails))
        rows = len(tails) * width
        columns = max(len(k) + len(t) for k, t in zip(knowns, tails, strict=True))
        tables = np.zeros((rows, columns), dtype=np.int32)
        scratch = self._passes.head.num_blocks - rows * longest
        for s, (known, tail) in enumerate(zip(knowns, tails, strict=True)):
            own = tables[s * width : (s + 1) * width]
            own[:, : len(known)] = known
            own[0, len(known) : len(known) + len(tail)] = tail
            for way in range(1, width):
                at = scratch + (s * width + way) * longest
                own[way, len(known) : len(known) + len(tail)] = np.arange(at, at + len(tail))
        return tables

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these sequences only, by their numbers among those that are left."""
        chosen = np.array(rows, dtype=np.int64)
        self._last, self._start = self._last[chosen], self._start[chosen]
        self._known = self._known[chosen]
        tables = self._tables.reshape(-1, self._width, self._tables.shape[1])
        self._tables = tables[chosen].reshape(-1, self._tables.shape[1])

    def fork(self, pairs: Sequence[tuple[int, int, int]]) -> None:
        """(sequence, from, to): what is written on one way is copied to another."""
        wanted = list[tuple[int, int, int, int]]()
        for s, source, target in pairs:
            blocks = int(self._last[s]) // self._size - int(self._start[s]) + 1
            wanted += [(s, source, target, block) for block in range(blocks)]
        self._copy(wanted)

    def _copy(self, wanted: Sequence[tuple[int, int, int, int]]) -> None:
        """(sequence, from, to, which of the blocks after the known ones)."""
        pairs = list[tuple[int, int]]()
        for s, source, target, block in wanted:
            column = self._known[s] + block
            own = self._tables[s * self._width : (s + 1) * self._width, column]
            pairs.append((int(own[source]), int(own[target])))
        if pairs:
            self._passes.head.copy(pairs)

    def go_on(self, tokens: Ids, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """One pass: each way's next token, with the feature that the last pass gave for a row.

        tokens [S, width]; rows [S · width], of the last pass. Logits [S · width, …].
        """
        head, size, width = self._passes.head, self._size, self._width
        with torch.inference_mode():
            wanted = torch.as_tensor(rows)
            torch.index_select(head.given, 0, wanted, out=head.features[: len(wanted)])
        self._last = self._last + 1
        at = self._known + self._last // size - self._start
        columns = np.repeat(at, width)
        blocks = self._tables[np.arange(len(columns)), columns]
        positions = np.repeat(self._last, width)
        seen = np.repeat((self._known - self._start) * size + self._last + 1, width)
        slots = blocks * size + positions % size
        return self._passes.go_on(self._tables, tokens.ravel(), positions, slots, seen)


def scratch_blocks(max_num_seqs: int, width: int, depth: int, block_size: int) -> int:
    """Blocks behind the pool's that `Ways` may need."""
    if width == 1:
        return 0
    return max_num_seqs * width * ((block_size + depth - 2) // block_size + 1)
