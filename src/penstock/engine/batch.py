"""From a plan to a `Step`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from penstock.engine.layout import Ints, Layout
from penstock.engine.pictures import Seen
from penstock.engine.plan import Part
from penstock.engine.request import Sequence, Status
from penstock.engine.states import States
from penstock.roofline import StepSize
from penstock.step import (
    AdaptedStatefulStep,
    AdaptedStep,
    ForkedStep,
    Runs,
    SeeingStep,
    StatefulStep,
    Step,
)

if TYPE_CHECKING:
    from penstock.engine.beams import Beams

_FEW: Final = 64
"""Numbers that are faster one by one: arithmetic on arrays has to be fetched from memory first, of
which a forward pass has just used all that is near.
"""


@dataclass(slots=True)
class Batch:
    """A step, and which rows of its logits belong to whom."""

    step: Step
    size: StepSize
    sampled: list[Sequence]  # those that get a token, forks included; again for each drafted one
    logit_rows: list[int]  # the row of each, ascending
    prompt_rows: list[tuple[Sequence, int, int]]  # (sequence, first row, count)
    drawn: list[Sequence]  # those that a token is drawn for, each once
    drawn_at: list[int] | None  # the places in `sampled` that are drawn for; None: all
    rows: list[range]  # of those places, the ones of each of `drawn`: one more than its draft has
    searches: list[Beams]  # what the others belong to, but for shadows
    seen: list[tuple[Seen, int, int, int]] = field(default_factory=list)  # `pictures.seeing`

    @property
    def only_decodes(self) -> bool:
        """Whether each sequence brings the token it was given last, and is given one."""
        plain = not self.prompt_rows and not self.searches and self.drawn_at is None
        single = len(self.size.queries) == len(self.drawn) == len(self.sampled)
        return plain and single and self.size.tokens == len(self.drawn)

    def of(self, kept: list[Sequence]) -> Batch:
        """The same step, as far as these of its sequences go, one row each."""
        rows = [range(i, i + 1) for i in range(len(kept))]
        return replace(self, sampled=kept, drawn=kept, rows=rows, logit_rows=list(range(len(kept))))


class _Buffer:
    """An array that is written to again and again, and its views as tensors.

    The last views are kept: most steps have the form of the one before.
    """

    def __init__(self, size: int) -> None:
        self._make(size)

    def _make(self, size: int) -> None:
        self.array: Ints = np.zeros(size, dtype=np.int32)
        self._tensor = torch.from_numpy(self.array)
        self._filled = self._tensor
        self._table = self.array[:0, None], self._tensor[:0, None]

    def fill(self, values: list[int] | Ints) -> Tensor:
        """The first `len(values)` places, holding them; of a larger array, where there are more."""
        count = len(values)
        if count > len(self.array):
            self._make(2 * count)
        self.array[:count] = values
        if len(self._filled) != count:
            self._filled = self._tensor[:count]
        return self._filled

    def table(self, rows: int, width: int) -> tuple[Ints, Tensor]:
        """The first `rows · width` places as a matrix; of a larger array, where there are more."""
        if self._table[0].shape != (rows, width):
            size = rows * width
            if size > len(self.array):
                self._make(2 * size)
            array, tensor = self.array[:size], self._tensor[:size]
            self._table = array.reshape(rows, width), tensor.view(rows, width)
        return self._table


class Batcher:
    """Lays plans out, in arrays that are allocated once: a `Step` is good until the next one.

    While the same sequences go on decoding, the step stays the same object and its arrays are
    moved on in place: new tokens, positions and lengths one further, and a block table that only
    changes where a sequence has just filled a block.
    """

    def __init__(
        self,
        table: Ints,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        spare: int = 0,
        states: States | None = None,
    ) -> None:
        """table [max_num_seqs, M] is where the scheduler keeps the sequences' blocks.

        spare: `Sight.spare`. states: of a model that has some.
        """
        self._states = states
        self._spare = spare
        self._table = table
        self._block_size = block_size
        self._tokens, self._positions, self._slots, self._sample_at, self._adapters = (
            _Buffer(max_num_tokens) for _ in range(5)
        )
        # a sequence is several, where its draft is a tree: up to one for each token
        most = max(max_num_seqs, max_num_tokens)
        self._query_start, self._context_len = _Buffer(most + 1), _Buffer(most)
        self._blocks, self._copies = _Buffer(table.size), _Buffer(0)
        self._from, self._kept = _Buffer(0 if states is None else most), _Buffer(0)
        self._batch: Batch | None = None  # the last one, if every sequence in it decoded
        self._rows: list[int] = []  # of the last one's sequences in the scheduler's table

    def build(self, parts: list[Part]) -> Batch:
        """The parts' step; the one before it is overwritten."""
        if self._batch is not None and self._advance(self._batch, parts):
            return self._batch
        batch = self._lay_out(parts)
        members = [sequence for sequence, _ in parts]
        decoding = len(batch.step.tokens) == len(parts) and batch.sampled == members
        self._batch = batch if decoding and not batch.prompt_rows else None
        self._rows = [sequence.row for sequence in members]
        return batch

    def following(self, members: list[Sequence], rows: list[int]) -> Batch:
        """The step in which `members` bring the tokens that the last one gives them.

        Those aren't known yet: in their places stand `rows`, where they will be among what the
        last step has chosen.
        """
        self.forget()
        count, size = len(members), self._block_size
        done = [len(sequence.tokens) for sequence in members]
        contexts = [at + 1 for at in done]
        width = -(-max(contexts) // size)
        blocks, block_table = self._blocks.table(count, width)
        blocks[:] = self._table[[sequence.row for sequence in members], :width]
        starts = list(range(count + 1))
        step = Step(
            self._tokens.fill(rows),
            self._positions.fill(self._turned(members, done)),
            self._slots.fill(self._slots_of(blocks, starts, done)),
            self._query_start.fill(starts),
            self._context_len.fill(contexts),
            block_table,
            self._sample_at.fill(starts[:-1]),
        )
        size_of = StepSize([1] * count, contexts, count)
        empty = Batch(step, size_of, [], [], [], [], None, [], [])
        return empty.of(members)

    def forget(self) -> None:
        """Let go of the last batch's sequences: one of them has ended."""
        self._batch = None

    def _advance(self, batch: Batch, parts: list[Part]) -> bool:
        """Move the last batch on by one token each; False if that isn't what `parts` are."""
        members = [sequence for sequence, count in parts if count == 1]
        count = len(parts)
        # Lists of the same objects compare by identity, in C.
        if members != batch.sampled or len(members) != count:
            return False
        size, width = self._block_size, batch.step.block_table.shape[1]
        done = [sequence.num_computed for sequence in members]
        # One that gave way in between may have started again elsewhere.
        if batch.size.contexts != done or [s.row for s in members] != self._rows:
            return False
        if max(done) >= width * size:
            return False
        contexts = [at + 1 for at in done]
        slots = [slot + 1 for slot in self._slots.array[:count].tolist()]
        blocks, _ = self._blocks.table(count, width)
        for i, at in enumerate(done):
            if at % size == 0:  # a new block; the one before may have become one that held the same
                block = at // size
                blocks[i, block - 1 : block + 1] = self._table[self._rows[i], block - 1 : block + 1]
                slots[i] = int(blocks[i, block]) * size
        if self._states is not None:
            states, kept = self._states.enter(parts)
            self._from.fill(states)
            self._kept.fill(kept)
        self._tokens.fill([s.tokens[at] for s, at in zip(members, done, strict=True)])
        self._positions.fill(self._turned(members, done))
        self._context_len.fill(contexts)
        self._slots.fill(slots)
        read = batch.size.adapter_bytes
        batch.size = StepSize(batch.size.queries, contexts, count, adapter_bytes=read)
        batch.seen = []
        return True

    def _turned(self, members: list[Sequence], at: list[int]) -> list[int]:
        """The positions that tokens turn by, which decode at places `at` of their sequences."""
        if not self._spare:
            return at
        return [place + s.shift for s, place in zip(members, at, strict=True)]

    def _lay_out(self, parts: list[Part]) -> Batch:
        layout = Layout()
        wanted: list[int] = []  # rows of T whose logits are computed
        sampled: list[Sequence] = []
        drawn: list[Sequence] = []
        logit_rows: list[int] = []
        prompt_rows: list[tuple[Sequence, int, int]] = []
        seen: list[tuple[Seen, int, int, int]] = []
        runs: list[tuple[int, int, int, int]] = []  # way, first row, rows, where it ends
        for sequence, count in parts:
            at, first = layout.starts[-1], sequence.num_computed
            pictures = sequence.request.seen
            if pictures is not None and first < sequence.num_prompt:
                seen.append((pictures, at, first, first + count))
                runs += (
                    (len(layout.rows), at + begin - first, end - begin, end)
                    for begin, end in pictures.runs_in(first, first + count)
                )
            guesses = layout.take(sequence, count)
            ends = sequence.num_computed + count == len(sequence.tokens) + guesses
            if not sequence.num_output and sequence.request.reads_prompt:
                prompt_rows.append((sequence, len(wanted), count))
                wanted += range(at, at + count - ends)
            if ends:
                members = [sequence]
                if sequence.index == 0 and not sequence.num_output:
                    members += [s for s in sequence.request.sequences if s.status is Status.FORKING]
                drawn += members
                for row in range(at + count - 1 - guesses, at + count):
                    sampled += members
                    logit_rows += [len(wanted)] * len(members)
                    wanted.append(row)
        adapters = _adapters_of(parts)
        positions: list[int] | Ints = layout.positions
        if self._spare:
            positions = self._turned_apart(parts, layout)
        step = self._step(layout, positions, wanted, adapters, parts)
        if runs:
            step = _seeing(step, runs)
        counted = StepSize(
            [count for _, count in parts],
            layout.lengths,
            len(wanted),
            layout.drafted,
            sum(count for sequence, count in parts if sequence.is_prefilling),
            _adapter_bytes(parts) if adapters else 0,
        )
        drawing = _drawing(drawn, sampled)
        return Batch(step, counted, sampled, logit_rows, prompt_rows, *drawing, seen)

    def _turned_apart(self, parts: list[Part], layout: Layout) -> Ints:
        """The positions that a step's tokens turn by, where pictures count otherwise."""
        found = np.array(layout.positions, dtype=np.int64)
        row = 0
        for sequence, count in parts:
            seen, end = sequence.request.seen, row + count
            if seen is not None and seen.turning is not None:
                found[row:end] = seen.turning.of_tokens(found[row:end], row, self._spare)
            row = end
        return found.astype(np.int32)

    def _step(
        self,
        layout: Layout,
        positions: list[int] | Ints,
        wanted: list[int],
        adapters: list[int] | None,
        parts: list[Part],
    ) -> Step:
        rows, width = layout.rows, -(-max(layout.contexts) // self._block_size)
        blocks, block_table = self._blocks.table(len(rows), width)
        blocks[:] = self._table[rows if len(rows) > 1 else rows[0], :width]  # a gather, or a copy
        copies = layout.part_blocks(blocks, self._block_size) if layout.trees else []
        arrays = (
            self._tokens.fill(layout.tokens),
            self._positions.fill(positions),
            self._slots.fill(self._slots_of(blocks, layout.starts, layout.positions)),
            self._query_start.fill(layout.starts),
            self._context_len.fill(layout.contexts),
            block_table,
            self._sample_at.fill(wanted),
        )
        of_tokens = None
        if adapters is not None:
            assert not layout.trees  # `LoraConfig.check_method`
            of_tokens = self._adapters.fill(np.repeat(adapters, np.diff(layout.starts)))
        if self._states is not None:
            states, kept = self._states.enter(parts)
            own = self._from.fill(states), self._kept.fill(kept).view(-1, 2)
            if of_tokens is not None:
                return AdaptedStatefulStep(*arrays, *own, of_tokens)
            return StatefulStep(*arrays, *own)
        if of_tokens is not None:
            return AdaptedStep(*arrays, of_tokens)
        if copies:
            return ForkedStep(*arrays, self._copies.fill(copies).view(-1, 2))
        return Step(*arrays)

    def _slots_of(self, blocks: Ints, starts: list[int], positions: list[int]) -> list[int] | Ints:
        """Where tokens are written; starts: of each row of `blocks`, and the end."""
        size = self._block_size
        if len(positions) <= _FEW:
            return [
                int(blocks[row, at // size]) * size + at % size
                for row, (first, end) in enumerate(pairwise(starts))
                for at in positions[first:end]
            ]
        at, beyond = np.divmod(np.array(positions, dtype=np.int32), np.int32(size))
        return blocks[np.repeat(np.arange(len(blocks)), np.diff(starts)), at] * size + beyond


def _seeing(step: Step, runs: list[tuple[int, int, int, int]]) -> SeeingStep:
    """The step with runs: of each its sequence, first row and rows, and where it ends there."""
    ways, firsts, counts, ends = zip(*runs, strict=True)
    rows = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    found = Runs(
        torch.tensor([row for some in rows for row in some], dtype=torch.int64),
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        step.block_table[torch.tensor(ways)],
    )
    return SeeingStep(
        step.tokens,
        step.positions,
        step.slots,
        step.query_start,
        step.context_len,
        step.block_table,
        step.sample_at,
        found,
        step.copies,
        step.adapters,
    )


def _adapters_of(parts: list[Part]) -> list[int] | None:
    """The slot of each part's adapter, −1 where it has none; None where none has."""
    found = [sequence.request.adapter for sequence, _ in parts]
    if not any(found):
        return None
    return [-1 if adapter is None else adapter.slot for adapter in found]


def _adapter_bytes(parts: list[Part]) -> int:
    """Of the adapters that these have, each once."""
    found = {sequence.request.adapter for sequence, _ in parts}
    return sum(adapter.nbytes for adapter in found if adapter is not None)


def _drawing(
    drawn: list[Sequence], sampled: list[Sequence]
) -> tuple[list[Sequence], list[int] | None, list[range], list[Beams]]:
    """The last four of a batch, where `drawn` are those of `sampled`, each once."""
    drawn_at = None
    if any(sequence.mates for sequence in drawn):
        drawn = [s for s in drawn if s.request.guides is None and s.request.beams is None]
        drawing = set(drawn)
        drawn_at = [row for row, sequence in enumerate(sampled) if sequence in drawing]
    lengths = [len(sequence.states) for sequence in drawn]
    rows = [range(end - n, end) for n, end in zip(lengths, accumulate(lengths), strict=True)]
    searching = {s.request.beams: None for s in sampled if s.request.beams is not None}
    return drawn, drawn_at, rows, [beams for beams in searching if beams is not None]
