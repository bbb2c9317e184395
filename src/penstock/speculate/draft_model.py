"""Drafts by a smaller model of the same vocabulary.

Its keys and values are kept beside the target's, in the same blocks: block 7 of a sequence is block
7 of both caches. So what is shared, copied, swapped or found again is so for both, and there is no
second pool whose blocks could run out. What the draft has computed of a sequence it keeps in mind:
the tokens that were guessed and then rejected are computed again, and so is what it has never seen,
the prompt to begin with.
Source: Leviathan, Kalman & Matias 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.speculate.draft_loop import DraftForward, DraftLimits, DraftLoop, Ints, Run
from penstock.speculate.proposer import Draft, Wish
from penstock.speculate.stamps import NOTHING, Stamps, mark_after


@dataclass(slots=True, eq=False)
class _Progress:
    """What the draft model's cache holds of one sequence."""

    key: object  # held, so that its id stays its own
    serial: int  # above 0
    blocks: list[int] = field(default_factory=list)
    row: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # the same
    num_known: int = 0  # tokens of the sequence that are computed …
    guessed: list[int] = field(default_factory=list)  # … and those computed after them
    marks: list[int] = field(default_factory=list)  # stamps of the blocks that hold them

    def lose(self, blocks: int, computed: int) -> None:
        """Keep no more than the first so many blocks, and what is computed in them."""
        del self.marks[blocks:]
        del self.guessed[max(computed - self.num_known, 0) :]
        self.num_known = min(self.num_known, computed)


class DraftModelProposer:
    """Lets a model with a cache of its own go ahead. One thread's, as an engine is."""

    name = "draft_model"
    by_passes = True

    def __init__(
        self, forward: DraftForward, limits: DraftLimits, num_blocks: int, num_ids: int
    ) -> None:
        """limits: max_num_tokens is of one call, what is caught up included. num_ids: the model's
        own; a sequence with a higher one, which is no token's, gets no drafts.
        """
        self.stamps = Stamps(num_blocks)
        """To be told of blocks that are copied or swapped."""
        self.last_caught_up = 0
        self._loop = DraftLoop(forward, limits)
        self._limits = limits
        self._num_ids = num_ids
        self._known: dict[int, _Progress] = {}  # by the key's id
        self._serials = itertools.count(1)

    @property
    def last_computed(self) -> int:
        """Tokens that the last call has run through the model, those caught up included."""
        return self._loop.last_computed

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish, of no tokens for one that can't be caught up within the limits."""
        drafts = [Draft(wish.sampling) for wish in wishes]
        plan = self._plan(wishes, drafts)
        self.last_caught_up = sum(
            min(run.first + len(run.tokens), len(wish.tokens) - 1) - run.first
            for wish, _, run in plan
        )
        for _, progress, run in plan:
            # should a pass raise, nothing is known of the sequence, or of what was being written
            del self._known[id(progress.key)]
            self._begin(progress, run)
        self._loop.run([run for _, _, run in plan])
        for wish, progress, run in plan:
            self._end(wish, progress, run)
            self._known[id(progress.key)] = progress
        return drafts

    def forget(self, key: object) -> None:
        """The sequence of that key has ended; what is in its blocks may serve another."""
        self._known.pop(id(key), None)

    def computed(self, key: object) -> tuple[list[int], int]:
        """The blocks of the sequence of that key, and how many of its tokens are computed there."""
        progress = self._known.get(id(key))
        return ([], 0) if progress is None else (list(progress.blocks), progress.num_known)

    # ── what is to be computed ───────────────────────────────────────────────────────────────

    def _plan(
        self, wishes: Sequence[Wish], drafts: Sequence[Draft]
    ) -> list[tuple[Wish, _Progress, Run]]:
        """Who takes part: those that lack least first, as far as the tokens of a call go."""
        lacking = []
        for wish, draft in zip(wishes, drafts, strict=True):
            # the last guess isn't computed
            limit = min(wish.limit, self._limits.max_model_len - len(wish.tokens) + 1)
            if limit < 1:
                continue
            progress = self._progress(wish)
            done = self._computed(progress, wish)
            if max(wish.tokens[done:]) < self._num_ids:
                lacking.append((len(wish.tokens) - done, limit, wish, progress, draft))
        lacking.sort(key=lambda entry: entry[0])
        left = self._limits.max_num_tokens
        plan = []
        for missing, limit, wish, progress, draft in lacking:
            if not left:
                break
            done = len(wish.tokens) - missing
            limit = min(limit, max(left - missing + 1, 0))
            run = Run(draft, wish.tokens[done : done + left], done, progress.row, limit)
            left -= run.most - done
            plan.append((wish, progress, run))
        return plan

    def _progress(self, wish: Wish) -> _Progress:
        progress = self._known.get(id(wish.key))
        if progress is None:
            progress = _Progress(wish.key, next(self._serials))
            self._known[id(wish.key)] = progress
        return progress

    def _computed(self, progress: _Progress, wish: Wish) -> int:
        """How many of the sequence's tokens needn't be computed: all but the last at most."""
        tokens, size = wish.tokens, self._limits.block_size
        whole = self._unchanged(progress, wish)
        if whole < len(progress.marks):
            progress.lose(whole, whole * size)
        done = progress.num_known
        for guess, token in zip(progress.guessed, tokens[done:], strict=False):
            if guess != token:
                break
            done += 1
        marks = progress.marks
        if done == len(marks) * size:  # whoever computed what comes next
            progress.marks = self.stamps.walk(tokens, wish.blocks, size, marks)
            if len(progress.marks) > len(marks):
                done = progress.num_known = len(progress.marks) * size
                progress.guessed = []
        if progress.blocks != wish.blocks:
            progress.blocks = list(wish.blocks)
            progress.row = np.array(wish.blocks, dtype=np.int32)
        return min(done, len(tokens) - 1)

    def _unchanged(self, progress: _Progress, wish: Wish) -> int:
        """How many of the first blocks are those of the last call, with what was in them then."""
        marks = progress.marks
        before, now = progress.blocks[: len(marks)], wish.blocks[: len(marks)]
        held = self.stamps.of(now)
        if before == now and held == marks:
            return len(marks)
        same = zip(before, now, held, marks, strict=False)
        return next((i for i, (a, b, c, d) in enumerate(same) if a != b or c != d), len(now))

    # ── what is in the blocks ────────────────────────────────────────────────────────────────

    def _begin(self, progress: _Progress, run: Run) -> None:
        """Take over the blocks that will be written to."""
        size = self._limits.block_size
        first = run.first // size
        del progress.marks[first:]
        for block in progress.blocks[first : -(-run.most // size)]:
            self.stamps.set(block, -progress.serial)

    def _end(self, wish: Wish, progress: _Progress, run: Run) -> None:
        """Note what was computed, and stamp the blocks that are full."""
        tokens, done, size = wish.tokens, run.first, self._limits.block_size
        known = progress.num_known = min(done, len(tokens))
        progress.guessed = run.draft.tokens[: done - known]
        marks = progress.marks
        for at in range(len(marks), done // size):
            start, end = at * size, (at + 1) * size
            held = tokens[start:end] + progress.guessed[max(start - known, 0) : max(end - known, 0)]
            marks.append(mark_after(marks[-1] if marks else NOTHING, held))
            self.stamps.set(progress.blocks[at], marks[-1])
        if done % size:
            marks.append(-progress.serial)
