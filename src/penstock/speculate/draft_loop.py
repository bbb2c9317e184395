"""Drafts by a model: one token after another, all sequences in each pass.

A pass gives logits, and the sampler chooses from them as it does from the target's: with the same
parameters, the same masks, and the random number of the place. So a draft whose logits are near the
target's is accepted as often in a lively text as in a greedy one, and one with the same logits
always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import PenstockError
from penstock.sampling import Sampler
from penstock.speculate.proposer import Draft
from penstock.step import Step

Ints = NDArray[np.int32]

DraftForward = Callable[[Step], Tensor]
"""Logits [S, V] over the target's ids of the rows `step.sample_at`, good until the next call."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """The sizes that a model's drafts keep within."""

    vocab_size: int  # of the target's ids
    block_size: int  # tokens
    max_num_seqs: int
    max_num_tokens: int  # in one pass
    max_model_len: int  # tokens of a sequence


@dataclass(slots=True, eq=False)
class Run:
    """A sequence's part in the passes of one call."""

    draft: Draft  # grows
    tokens: list[int]  # to be computed next
    first: int  # the position of the first of these: so many are computed
    blocks: Ints
    limit: int  # tokens that the draft may get; 0: what is to be computed is all there is to do

    @property
    def most(self) -> int:
        """Positions that may be computed in the end: a draft's last token isn't."""
        return self.first + len(self.tokens) + max(self.limit - len(self.draft) - 1, 0)


class DraftLoop:
    """Runs passes until every draft has its length."""

    def __init__(self, forward: DraftForward, limits: DraftLimits) -> None:
        self._forward = forward
        self._steps = StepArrays(limits)
        self._sampler = Sampler(limits.vocab_size)
        self.last_computed = 0
        """Tokens that the last call has run through the model."""

    def run(self, runs: list[Run]) -> None:
        """Compute what each has to be computed, and go on to its limit."""
        self.last_computed = 0
        if not runs:
            return
        step = self._steps.lay_out(runs)
        active = [run for run in runs if run.limit]
        while True:
            going = self._pass(step, active)
            self.last_computed += step.num_tokens
            for run in runs:
                run.first += len(run.tokens)
                run.tokens = run.draft.tokens[-1:]
            if not going:
                return
            if going == runs == active and step.num_tokens == len(runs):
                self._steps.advance([run.tokens[0] for run in runs])
            else:
                step = self._steps.lay_out(going)
                runs = active = going

    def _pass(self, step: Step, active: list[Run]) -> list[Run]:
        """Compute, and give each of `active` its next token; those that go on with it."""
        rows = [run.draft.states[-1] for run in active]
        self._sampler.prepare(rows)
        sampled = self._sampler(self._forward(step), rows)
        going = []
        for row, run in enumerate(active):
            draft = run.draft
            # one without a token has an error, which its request will be told by the target
            if row not in sampled.errors and draft.add(sampled.token_ids[row]):
                if len(draft) < run.limit:
                    going.append(run)
        return going


class Array:
    """Memory that is written to again and again, and the same as a tensor."""

    def __init__(self, size: int) -> None:
        self.held: Ints = np.zeros(size, dtype=np.int32)
        self._tensor = torch.from_numpy(self.held)

    def fill(self, values: Sequence[int] | NDArray[np.integer[Any]]) -> Tensor:
        """The first places, holding `values`."""
        self.held[: len(values)] = values
        return self._tensor[: len(values)]

    def table(self, rows: int, width: int) -> tuple[Ints, Tensor]:
        """The first places as a matrix."""
        size = rows * width
        return self.held[:size].reshape(rows, width), self._tensor[:size].view(rows, width)


class StepArrays:
    """Lays passes out, in arrays that are allocated once: a `Step` is good until the next one."""

    def __init__(self, limits: DraftLimits) -> None:
        self._block_size = limits.block_size
        seqs = limits.max_num_seqs
        tokens = max(limits.max_num_tokens, seqs)
        self._tokens, self._positions, self._slots = (Array(tokens) for _ in range(3))
        self._query_start, self._context_len, self._sample_at = (Array(seqs + 1) for _ in range(3))
        self._blocks = Array(seqs * -(-limits.max_model_len // limits.block_size))
        self._width = 0  # of the last pass's block table

    def lay_out(self, runs: Sequence[Run]) -> Step:
        """The pass that computes the runs' tokens; of those with a limit, logits of the last."""
        size = self._block_size
        counts = [len(run.tokens) for run in runs]
        starts = np.cumsum([0, *counts], dtype=np.int64)
        self._width = max(-(-run.most // size) for run in runs)
        table, block_table = self._blocks.table(len(runs), self._width)
        for row, run in zip(table, runs, strict=True):
            blocks = run.blocks[: -(-run.most // size)]
            if len(blocks) * size < run.most:
                raise PenstockError(
                    f"A draft needs room for {run.most} tokens, but its sequence has "
                    f"{len(blocks)} blocks of {size}."
                )
            row[: len(blocks)] = blocks
        firsts = np.array([run.first for run in runs], dtype=np.int64)
        owner = np.repeat(np.arange(len(runs)), counts)
        positions = np.arange(int(starts[-1])) - starts[owner] + firsts[owner]
        ends = zip(starts[1:].tolist(), runs, strict=True)
        return Step(
            tokens=self._tokens.fill([token for run in runs for token in run.tokens]),
            positions=self._positions.fill(positions),
            slots=self._slots.fill(table[owner, positions // size] * size + positions % size),
            query_start=self._query_start.fill(starts),
            context_len=self._context_len.fill(firsts + counts),
            block_table=block_table,
            sample_at=self._sample_at.fill([end - 1 for end, run in ends if run.limit]),
        )

    def advance(self, tokens: list[int]) -> None:
        """Make the last pass, where each sequence had one token, the one after it."""
        count, size = len(tokens), self._block_size
        self._tokens.held[:count] = tokens
        positions, slots = self._positions.held[:count], self._slots.held[:count]
        positions += 1
        slots += 1
        self._context_len.held[:count] += 1
        (entering,) = (positions % size == 0).nonzero()
        if len(entering):
            table, _ = self._blocks.table(count, self._width)
            slots[entering] = table[entering, positions[entering] // size] * size
