"""Places for drafts: what nobody else needs of the cache, and a share of one step's tokens."""

from __future__ import annotations

from penstock.cache import BlockPool
from penstock.config import SchedulerConfig
from penstock.engine.layout import Ints
from penstock.engine.plan import Plan
from penstock.engine.request import Sequence, Status
from penstock.engine.states import States
from penstock.engine.waiting import WaitingQueue

SHARE = 8
"""Drafts may have one in so many of a step's tokens that prompts could have, too."""


def share_of_drafts(drafted: list[Sequence], config: SchedulerConfig) -> int:
    """How many of a step's tokens are kept for drafts, whoever waits for the others.

    A prompt takes little longer by it, and those that decode beside it get their drafts, which they
    need most while steps are long. Whoever comes back may need a token for each row that there is;
    a prompt that comes whole, all of them.
    """
    if not config.enable_chunked_prefill:
        return 0
    limit = config.max_num_batched_tokens
    wanted = sum(len(s.draft) for s in drafted if s.draft is not None)
    return max(min(wanted, limit // SHARE, limit - config.max_num_seqs), 0)


def add_drafts(plan: Plan, limit: int) -> None:
    """Let the drafts of those in `plan` have what is left of `limit` tokens, the first ones first;
    what has no room is dropped.
    """
    for at, (sequence, count) in enumerate(plan.parts):
        if sequence.draft is None:
            continue
        whole = count == sequence.remaining  # or it isn't sampled
        guesses = sequence.shorten_draft(limit - plan.num_tokens if whole else 0)
        plan.parts[at] = sequence, count + guesses
        plan.num_tokens += guesses


class Reservations:
    """Gives sequences blocks beyond their next token, and takes them back."""

    def __init__(
        self,
        pool: BlockPool,
        table: Ints,
        block_size: int,
        running: list[Sequence],
        waiting: WaitingQueue,
        states: States | None = None,
    ) -> None:
        """table [max_num_seqs, M], `running` and `waiting` are the scheduler's own; states: of a
        model that has some.
        """
        self._states = states
        self._pool = pool
        self._table = table
        self._block_size = block_size
        self._running = running
        self._waiting = waiting

    def reserve(self, sequence: Sequence, count: int) -> int:
        """Blocks for up to `count` tokens behind those of `sequence`; how many have room.

        Each that runs may need a block in the next step, and whoever waits first those of its
        tokens. None for a sequence that is about to copy the block it writes to.
        """
        if self._states is not None:
            count = min(count, self._states.most_guesses(len(self._running)))
        size, blocks = self._block_size, sequence.blocks
        at, first = sequence.num_computed // size, len(blocks)
        if at < first and self._pool.count(blocks[at]) > 1:
            return 0
        need = min(-(-(len(sequence.tokens) + count) // size) - first, self._spare)
        if need > 0:
            blocks += self._pool.allocate(need) or ()
            self._table[sequence.row, first : len(blocks)] = blocks[first:]
        return max(min(count, len(blocks) * size - len(sequence.tokens)), 0)

    def reserve_ways(self, sequence: Sequence) -> None:
        """Blocks for every way but the first through the draft of `sequence`, which reads and
        writes its own; where there are too few, its last guesses go.
        """
        size, first = self._block_size, (sequence.num_computed + 1) // self._block_size
        while sequence.draft is not None:
            each = (sequence.num_computed + sequence.draft.depth) // size + 1 - first
            others = len(sequence.draft.ways) - 1
            if others * each <= self._spare:
                sequence.ways = [self._pool.allocate(each) or [] for _ in range(others)]
                return
            sequence.shorten_draft(len(sequence.draft) - 1)

    def ways_to_copy(self, sequence: Sequence) -> list[tuple[int, int]]:
        """What its ways need of the block that they part in: (from, to)."""
        at, beyond = divmod(sequence.num_computed, self._block_size)
        if not beyond or beyond == self._block_size - 1 or sequence.draft is None:
            return []
        used = sequence.ways[: len(sequence.draft.ways) - 1]
        return [(sequence.blocks[at], way[0]) for way in used]

    def adopt(self, sequence: Sequence, number: int) -> None:
        """Let the blocks of a way be its own; `number` 0: they are."""
        if not number:
            return
        at = sequence.num_computed // self._block_size
        others, own = sequence.blocks[at:], sequence.ways[number - 1]
        sequence.blocks[at:], sequence.ways[number - 1] = own, others
        self._table[sequence.row, at : at + len(own)] = own

    def drop(self, sequence: Sequence) -> None:
        """It has no draft any more, and no ways."""
        sequence.draft = None
        for way in sequence.ways:
            self._pool.release(way)
        sequence.ways = []

    @property
    def _spare(self) -> int:
        """Blocks that nobody needs for the next step, and whoever waits first doesn't either."""
        return self._pool.num_available - len(self._running) - self._wanted

    @property
    def _wanted(self) -> int:
        """Blocks that the first of those who wait is about to take."""
        first = self._waiting.first()
        if first is None:
            return 0
        if first.status is Status.SWAPPED:  # with all of its request
            return self._pool.num_blocks
        return -(-len(first.tokens) // self._block_size)

    def trim(self, sequence: Sequence) -> None:
        """Give back the blocks of `sequence` that hold nothing it has computed."""
        self.drop(sequence)
        if self._states is not None:
            self._states.trim(sequence)
        if sequence.status is Status.RUNNING:
            kept = -(-sequence.num_computed // self._block_size)
            self._pool.release(reversed(sequence.blocks[kept:]))
            del sequence.blocks[kept:]
