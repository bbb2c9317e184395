"""Drafts by an EAGLE head: one layer that goes on from the target's own states.

Its keys and values are kept beside the target's, in the same blocks. What it reads is there for
one step only: a prompt's states are read at once, those of tokens that were decoded are laid aside,
and read together with the first pass of the next draft. So after steps without drafts only the
latest are there; blocks that were missed meanwhile are left out of what the head sees.
Source: Li et al. 2024, arXiv:2401.15077 and arXiv:2406.16858; 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.speculate.draft_loop import DraftLimits
from penstock.speculate.eagle_context import Context, Contexts, Shelf
from penstock.speculate.eagle_passes import Head, HeadPasses, Reading
from penstock.speculate.eagle_tree import Chains, Trees
from penstock.speculate.proposer import Computed, Draft, Wish

LAID_ASIDE = 2
"""Blocks' worth of a sequence's states that are laid aside, the latest."""


def shelf_rows(block_size: int, depth: int) -> int:
    """Rows of states that one sequence may have laid aside, those of a step before it is seen to
    that they are too many included.
    """
    return max(LAID_ASIDE * block_size, depth + 1) + depth + 1


@dataclass(frozen=True, slots=True)
class Shape:
    """How large drafts may be."""

    depth: int  # tokens one after another
    width: int  # tokens that may follow one; 1: a chain
    most_tokens: int  # in a tree


class EagleProposer:
    """Lets a head go ahead. One thread's, as an engine is."""

    by_passes = True

    def __init__(
        self, name: str, head: Head, limits: DraftLimits, shape: Shape, num_blocks: int
    ) -> None:
        """name: the method's; num_blocks: of the pool, without those of ways."""
        self.name = name
        self.last_caught_up = 0
        self.wants = limits.block_size * 3 // 2  # it goes on where a block begins
        width = min(shape.width, head.num_logits)
        self._limits = limits
        self._few = shape.depth + 1  # tokens that a step brings at most
        aside = shelf_rows(limits.block_size, shape.depth)
        self._most_aside = aside - self._few
        self._contexts = Contexts(num_blocks, limits.block_size)
        self._passes = HeadPasses(head, self._contexts, limits, width)
        self._shelf = Shelf(head.kept, aside * limits.max_num_seqs)
        self._kept = head.kept
        self._guess = (
            Chains(self._passes, limits.vocab_size).draw
            if width == 1
            else Trees(self._passes, width, shape.most_tokens).grow
        )
        self.stamps = self._contexts.stamps
        """To be told of blocks that are copied or swapped."""

    # ── states ───────────────────────────────────────────────────────────────────────────────

    def saw(self, computed: Sequence[Computed]) -> None:
        """Read or lay aside the states of a step's rows."""
        with torch.inference_mode():
            self._saw(computed)

    def _saw(self, computed: Sequence[Computed]) -> None:
        aside = list[tuple[Context, Computed, int]]()  # from which of its rows on
        read = list[tuple[Context, Computed, int]]()  # up to which
        for one in computed:
            context = self._contexts.of(one.key, one.tokens, one.blocks)
            self._meet(context, one.first)
            # the last one's token is there if it was sampled; its logits will be asked for
            rest = len(one.tokens) - one.first - len(one.rows)
            count = len(one.rows) - (rest <= 1)
            if rest > 1 or count >= self._few:
                read.append((context, one, count))
                aside.append((context, one, count))
            else:
                aside.append((context, one, 0))
        if read:
            self._read(read)
        self._lay_aside([entry for entry in aside if entry[2] < len(entry[1].rows)])

    def _meet(self, context: Context, first: int) -> None:
        """Rows of positions from `first` on come: what is laid aside must lead up to them."""
        context.written = min(context.written, first)
        if context.end != first:
            self._clear(context)
            context.first = first
        elif context.places and context.first < context.written:  # its logits aren't wanted now
            self._drop(context, min(context.written - context.first, len(context.places)))

    def _read(self, chunks: Sequence[tuple[Context, Computed, int]]) -> None:
        """Read what is laid aside of some sequences and the first rows of their chunks."""
        older = list[Reading]()
        for context, one, _ in chunks:
            older += self._readable(context, one.tokens, context.first, context.places)
        self._passes.read(older)
        newer = list[Reading]()
        for context, one, count in chunks:
            self._clear(context)
            start = self._contexts.start(context, one.first)
            rows = one.rows[start - one.first : count]
            if rows:
                newer.append(Reading(context, one.tokens, start, self._kept, rows))
            context.first = one.first + count
        self._passes.read(newer)

    def _readable(
        self, context: Context, tokens: Sequence[int], first: int, places: Sequence[int]
    ) -> list[Reading]:
        """What can be read of states that are laid aside, from position `first` on."""
        start = self._contexts.start(context, first)
        left = places[start - context.first :]
        return [Reading(context, tokens, start, self._shelf.store, left)] if left else []

    def _lay_aside(self, rows: Sequence[tuple[Context, Computed, int]]) -> None:
        for context, one, start in rows:
            over = len(context.places) + len(one.rows) - start - self._most_aside
            if over > 0:  # whole blocks are given up: one that has begun is none
                size = self._limits.block_size
                end = -(-(context.first + over) // size) * size
                self._drop(context, min(end - context.first, len(context.places)))
        wanted = [row for _, one, start in rows for row in one.rows[start:]]
        if self._shelf.num_free < len(wanted):  # of sequences that wait, or were swapped out
            present = {id(context) for context, _, _ in rows}
            for context in self._contexts.all():
                if id(context) not in present:
                    self._clear(context)
        places = self._shelf.put(wanted)
        for context, one, start in rows:
            count = len(one.rows) - start
            context.places += places[:count]
            del places[:count]

    def _drop(self, context: Context, count: int) -> None:
        self._shelf.give_back(context.places[:count])
        del context.places[:count]
        context.first += count

    def _clear(self, context: Context) -> None:
        self._drop(context, len(context.places))

    # ── drafts ───────────────────────────────────────────────────────────────────────────────

    def propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        """A draft for each wish, of no tokens for one whose last state isn't there."""
        with torch.inference_mode():
            return self._propose(wishes)

    def _propose(self, wishes: Sequence[Wish]) -> list[Draft]:
        drafts = [Draft(wish.sampling) for wish in wishes]
        plan = list[tuple[Draft, Reading, int]]()
        for wish, draft in zip(wishes, drafts, strict=True):
            reading = self._last_states(wish)
            depth = min(wish.limit, self._limits.max_model_len - len(wish.tokens) + 1)
            if reading is not None and depth > 0:
                plan.append((draft, reading, depth))
        counts = [len(reading.places) for _, reading, _ in plan]
        self.last_caught_up = sum(max(count - self._few, 0) for count in counts)
        if not plan:
            return drafts
        if sum(counts) > self._passes.most_rows:
            self._passes.read([reading.part(0, len(reading.places) - 1) for _, reading, _ in plan])
            plan = [
                (draft, reading.part(len(reading.places) - 1, len(reading.places)), depth)
                for draft, reading, depth in plan
            ]
            counts = [1] * len(plan)
        rows = np.cumsum(counts) - 1
        readings = [reading for _, reading, _ in plan]
        logits = self._passes.pass_over(readings, rows.tolist())
        depths = [depth for _, _, depth in plan]
        self._guess([draft for draft, _, _ in plan], readings, depths, logits, rows)
        return drafts

    def _last_states(self, wish: Wish) -> Reading | None:
        """The states up to that before the last token, as far as they haven't been read."""
        context = self._contexts.of(wish.key, wish.tokens, wish.blocks)
        last = len(wish.tokens) - 2
        if not context.places or context.end != last + 1:
            return None
        first = max(context.first, min(context.written, last))
        found = self._readable(context, wish.tokens, first, context.places)
        return found[0] if found else None

    def known_places(self, key: object, tokens: Sequence[int], blocks: Sequence[int]) -> list[int]:
        """Which of a sequence's full blocks the head relies on, counted from 0."""
        context = self._contexts.of(key, tokens, blocks)
        return self._contexts.known_places(context, min(len(context.marks), len(blocks)))

    def forget(self, key: object) -> None:
        """The sequence of that key has ended; what is in its blocks may serve another."""
        context = self._contexts.pop(key)
        if context is not None:
            self._clear(context)
