"""Drafts by a model: one token after another, all sequences in each pass.

A pass gives logits, and the sampler chooses from them as it does from the target's: with the same
parameters, the same masks, and the random number of the place. So a draft whose logits are near the
target's is accepted as often in a lively text as in a greedy one, and one with the same logits
always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


class StepArrays:
    """Lays passes out, in arrays that are allocated once: a `Step` is good until the next one."""

    def __init__(self, limits: DraftLimits) -> None:
        self._block_size = limits.block_size
        width = -(-limits.max_model_len // limits.block_size)
        tokens, seqs = max(limits.max_num_tokens, limits.max_num_seqs), limits.max_num_seqs
        sizes = (tokens, tokens, tokens, seqs + 1, seqs, seqs * width, seqs)
        self._arrays: list[Ints] = [np.zeros(size, dtype=np.int32) for size in sizes]
        self._tensors = [torch.from_numpy(array) for array in self._arrays]
        self._count = 0  # of sequences in the last pass
        self._width = 0  # of its block table

    def lay_out(self, runs: Sequence[Run]) -> Step:
        """The pass that computes the runs' tokens; of those with a limit, logits of the last."""
        size = self._block_size
        counts = [len(run.tokens) for run in runs]
        starts = np.cumsum([0, *counts])
        total, width = int(starts[-1]), max(-(-run.most // size) for run in runs)
        held = self._arrays[5][: len(runs) * width].reshape(len(runs), width)
        for row, run in zip(held, runs, strict=True):
            blocks = run.blocks[: -(-run.most // size)]
            if len(blocks) * size < run.most:
                raise PenstockError(
                    f"A draft needs room for {run.most} tokens, but its sequence has "
                    f"{len(blocks)} blocks of {size}."
                )
            row[: len(blocks)] = blocks
        firsts = np.array([run.first for run in runs])
        owner = np.repeat(np.arange(len(runs)), counts)
        positions = np.arange(total) - starts[owner] + firsts[owner]
        contents = (
            [token for run in runs for token in run.tokens],
            positions,
            held[owner, positions // size] * size + positions % size,
            starts,
            firsts + counts,
            None,
            [end - 1 for end, run in zip(starts[1:].tolist(), runs, strict=True) if run.limit],
        )
        self._count, self._width = len(runs), width
        tensors = []
        for array, tensor, content in zip(self._arrays, self._tensors, contents, strict=True):
            if content is None:
                tensors.append(tensor[: held.size].view(held.shape))
                continue
            array[: len(content)] = content
            tensors.append(tensor[: len(content)])
        return Step(*tensors)

    def advance(self, tokens: list[int]) -> None:
        """Make the last pass, where each sequence had one token, the one after it."""
        count, size = self._count, self._block_size
        held, positions, slots, _, contexts, table, _ = self._arrays
        held[:count] = tokens
        positions, slots = positions[:count], slots[:count]
        positions += 1
        contexts[:count] += 1
        slots += 1
        (entering,) = (positions % size == 0).nonzero()
        if len(entering):
            slots[entering] = table[entering * self._width + positions[entering] // size] * size
