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

from penstock.sampling.transfer import upload
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
        for reading in readings:
            into = head.states[at : at + len(reading.places)]
            places = upload(torch.tensor(reading.places), into.device)
            torch.index_select(reading.store, 0, places, out=into)
            at += len(reading.places)
        logits = head.by_states(self._lay_out(readings, sample_at))
        for reading in readings:
            contexts.done(reading.context, reading.first, reading.end)
        return logits

    def _lay_out(self, readings: Sequence[Reading], sample_at: Sequence[int]) -> Step:
        size = self._size
        tables, starts, seen = list[Ints](), [0], list[int]()
        tokens, positions, slots = list[int](), list[int](), list[int]()
        for reading in readings:
            context, start, end = reading.context, reading.first // size, reading.end
            known = self._contexts.known(context, start)
            tables.append(np.concatenate((known, context.row[start : -(-end // size)])))
            seen.append(len(known) * size + end - start * size)
            where, blocks = range(reading.first, end), context.blocks
            positions += where
            slots += [blocks[at // size] * size + at % size for at in where]
            tokens += reading.tokens[reading.first + 1 : end + 1]
            starts.append(len(tokens))
        held, table = self._blocks.table(len(tables), max(map(len, tables)))
        for into, one in zip(held, tables, strict=True):
            into[: len(one)] = one
        return Step(
            tokens=self._tokens.fill(tokens),
            positions=self._positions.fill(positions),
            slots=self._slots.fill(slots),
            query_start=self._query_start.fill(starts),
            context_len=self._context_len.fill(seen),
            block_table=table,
            sample_at=self._sample_at.fill(sample_at),
        )

    # ── rows of its own features ─────────────────────────────────────────────────────────────

    def ways(self, readings: Sequence[Reading], depths: Sequence[int]) -> Ways:
        """Ways on from the ends of `readings`, which were read. depths: of guesses, 2 or more."""
        return Ways(self, self._contexts, readings, depths, self._size, self._width)

    def one_each(self, tables: Ints, positions: Ints, seen: Ints) -> Rows:
        """Passes over one row of each table, whose next positions are these."""
        rows, columns = tables.shape
        held, table = self._blocks.table(rows, columns)
        held[:] = tables
        step = Step(
            tokens=self._tokens.fill(positions),  # some, as yet
            positions=self._positions.fill(positions),
            slots=self._slots.fill(positions),
            query_start=self._query_start.fill(np.arange(rows + 1)),
            context_len=self._context_len.fill(seen),
            block_table=table,
            sample_at=self._sample_at.fill(np.arange(rows)),
        )
        arrays = self._tokens, self._positions, self._slots, self._context_len
        return Rows(step, *(array.held[:rows] for array in arrays))


@dataclass(frozen=True, slots=True)
class Rows:
    """A step, and what lies in its arrays."""

    step: Step
    tokens: Ints
    positions: Ints
    slots: Ints
    seen: Ints

    def advance(self) -> None:
        """To the next position of each row; its slot too, within its block."""
        for array in (self.positions, self.slots, self.seen):
            array += 1


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
        self._ends = [reading.end for reading in readings]  # the next position of each sequence
        self._starts = [end // size for end in self._ends]  # the block that it is in
        tails, knowns = list[Ints](), list[Ints]()
        for reading, start, depth in zip(readings, self._starts, depths, strict=True):
            last = reading.end + depth - 2  # the last guess isn't computed
            contexts.guessed(reading.context, reading.end, last + 1)
            knowns.append(contexts.known(reading.context, start))
            tails.append(reading.context.row[start : last // size + 1])
        self._knowns = [len(known) for known in knowns]
        self._tables = self._lay_out(knowns, tails)
        begun = [s for s, end in enumerate(self._ends) if end % size]
        self._copy([(s, 0, way, 0) for s in begun for way in range(1, width)])
        self._rows = self._restart()

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

    def _restart(self) -> Rows:
        """Passes from the next positions on."""
        each = np.array(self._ends, dtype=np.int32).repeat(self._width)
        missed = [k - start for k, start in zip(self._knowns, self._starts, strict=True)]
        beside = np.array(missed, dtype=np.int32).repeat(self._width) * self._size
        rows = self._passes.one_each(self._tables, each, each + beside + 1)
        self._enter(rows)
        return rows

    def _enter(self, rows: Rows) -> None:
        """Find the slots of the rows' positions: within a block each is one further."""
        held = np.minimum((rows.seen - 1) // self._size, self._tables.shape[1] - 1)  # after the end
        blocks = self._tables[np.arange(len(held)), held]
        rows.slots[:] = blocks * self._size + rows.positions % self._size

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with these sequences only, by their numbers among those that are left."""
        self._ends = [self._ends[s] for s in chosen]
        self._starts = [self._starts[s] for s in chosen]
        self._knowns = [self._knowns[s] for s in chosen]
        tables = self._tables.reshape(-1, self._width, self._tables.shape[1])
        self._tables = tables[list(chosen)].reshape(-1, self._tables.shape[1])
        self._rows = self._restart()

    def fork(self, pairs: Sequence[tuple[int, int, int]]) -> None:
        """(sequence, from, to): what is written on one way is copied to another."""
        wanted = list[tuple[int, int, int, int]]()
        for s, source, target in pairs:
            blocks = (self._ends[s] - 1) // self._size - self._starts[s] + 1
            wanted += [(s, source, target, block) for block in range(blocks)]
        self._copy(wanted)

    def _copy(self, wanted: Sequence[tuple[int, int, int, int]]) -> None:
        """(sequence, from, to, which of the blocks after the known ones)."""
        pairs = list[tuple[int, int]]()
        for s, source, target, block in wanted:
            first = s * self._width
            own = self._tables[first : first + self._width, self._knowns[s] + block].tolist()
            pairs.append((own[source], own[target]))
        if pairs:
            self._passes.head.copy(pairs)

    def go_on(self, tokens: Ids, source: Ids) -> Tensor:
        """One pass: each way's next token, with the feature that the last pass gave for a row.

        tokens, source [S · width]. Logits [S · width, …].
        """
        head, rows = self._passes.head, self._rows
        features = head.features[: len(source)]
        taken = upload(torch.from_numpy(source), features.device)
        torch.index_select(head.given, 0, taken, out=features)
        rows.tokens[:] = tokens
        logits = head.by_features(rows.step)
        rows.advance()
        self._ends = [end + 1 for end in self._ends]
        if any(end % self._size == 0 for end in self._ends):
            self._enter(rows)
        return logits


def scratch_blocks(max_num_seqs: int, width: int, depth: int, block_size: int) -> int:
    """Blocks behind the pool's that `Ways` may need."""
    if width == 1:
        return 0
    return max_num_seqs * width * ((block_size + depth - 2) // block_size + 1)
