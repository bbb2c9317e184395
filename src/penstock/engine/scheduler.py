"""Which sequences take part in the next step, and with how many tokens.

Continuous batching with chunked prefill: every step is planned anew, decoding sequences first, so
that a long prompt never holds up the others by more than one step's budget.
Sources: Yu et al. 2022 (Orca), Agrawal et al. 2023, arXiv:2308.16369 (Sarathi).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.cache import BlockPool, PrefixTree
from penstock.config import SchedulerConfig
from penstock.engine.request import Request, Sequence, Status
from penstock.errors import ConfigError, OutOfCacheError, RequestError

Part = tuple[Sequence, int]
"""A sequence and how many of its next tokens take part in a step."""


@dataclass(slots=True)
class Plan:
    """One step: its sequences with their new tokens, and blocks to copy before it."""

    parts: list[Part] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to), all at once
    num_tokens: int = 0

    def take(self, sequence: Sequence, count: int) -> None:
        """`count` tokens of `sequence` take part."""
        self.parts.append((sequence, count))
        self.num_tokens += count

    def drop(self, sequence: Sequence) -> None:
        """`sequence` takes no part; nothing is copied into its blocks, which others may get."""
        gone = set(sequence.blocks)
        self.parts = [part for part in self.parts if part[0] is not sequence]
        self.copies = [copy for copy in self.copies if copy[1] not in gone]
        self.num_tokens = sum(count for _, count in self.parts)


class Scheduler:
    """First come, first served; the latest arrival gives way when blocks run out."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        tree: PrefixTree | None,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self.config = config
        self.pool = pool
        self.tree = tree
        self.block_size = block_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        width = -(-max_model_len // block_size)
        if pool.num_blocks < width:  # it would give way to itself for ever
            raise OutOfCacheError(
                f"One sequence of max_model_len={max_model_len} needs {width} blocks of "
                f"{block_size} tokens, but the cache holds {pool.num_blocks}. Lower max_model_len "
                f"to {pool.num_blocks * block_size}, or give the cache more blocks."
            )
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"Without chunked prefill a prompt of max_model_len ({max_model_len}) must fit in "
                f"max_num_batched_tokens ({config.max_num_batched_tokens}). Raise the second, or "
                "lower the first."
            )
        self.table = np.zeros((config.max_num_seqs, width), dtype=np.int32)
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))

    # ── the queue ────────────────────────────────────────────────────────────────────────────

    def check(self, n: int) -> None:
        """Raises RequestError for a request of `n` samples that could never run."""
        if n > self.config.max_num_seqs:
            raise RequestError(
                f"n={n} samples can't run at once: max_num_seqs is {self.config.max_num_seqs}. "
                "Raise it, or send several requests."
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` let pass."""
        self.waiting.append(request.sequences[0])

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        self._let_go(sequence)
        sequence.status = Status.FINISHED

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> Plan:
        """Plan the next step; an empty plan means that there is nothing to do."""
        plan = Plan()
        limit = self.config.max_num_batched_tokens
        preempted = self.num_preemptions
        for sequence in self._by_phase():
            if sequence.status is not Status.RUNNING:
                continue  # gave way to one before it
            count = self._share(sequence, limit - plan.num_tokens)
            if count and self._make_room(sequence, count, plan):
                plan.take(sequence, count)
        if self.num_preemptions == preempted:
            self._admit(plan, limit)
        return plan

    def _by_phase(self) -> list[Sequence]:
        """Decoding sequences, then those with more of their prompt to come; each by arrival."""
        decoding = [s for s in self.running if s.is_decoding]
        if len(decoding) == len(self.running):
            return decoding
        return decoding + [s for s in self.running if not s.is_decoding]

    def _share(self, sequence: Sequence, budget: int) -> int:
        """How many of its tokens fit the budget: all or none without chunked prefill."""
        remaining = sequence.remaining
        if remaining <= budget:
            return remaining
        return budget if self.config.enable_chunked_prefill else 0

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Give `sequence` blocks for `count` more tokens; later arrivals give way if need be."""
        while not self._extend(sequence, count, plan):
            victim = max(self.running, key=lambda s: s.order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _admit(self, plan: Plan, limit: int) -> None:
        """Start waiting sequences while there are rows, budget and blocks."""
        while self.waiting and plan.num_tokens < limit:
            sequence = self.waiting[0]
            fresh = sequence.index == 0 and sequence.num_output == 0
            rows = sequence.request.params.n if fresh else 1
            if len(self._free_rows) < rows:
                return
            hit = self._look_up(sequence)
            count = self._share(sequence, limit - plan.num_tokens)
            if not (count and self._fits(sequence, count) and self._extend(sequence, count, plan)):
                self._let_go(sequence)
                return
            self.waiting.popleft()
            self._start(sequence, hit, fresh)
            plan.take(sequence, count)

    def _fits(self, sequence: Sequence, count: int) -> bool:
        """Whether a newcomer leaves a block for each running sequence: or it would soon give way.

        Asked before anything is allocated, which would give up cached blocks for nothing.
        """
        need = -(-(sequence.num_computed + count) // self.block_size) - len(sequence.blocks)
        return self.pool.num_available >= need + len(self.running)

    def _look_up(self, sequence: Sequence) -> int:
        """Hold the cached prefix of a sequence that is about to start; tokens found."""
        unread = sequence.request.reads_prompt and not sequence.num_output
        if self.tree is None or unread:
            return 0
        sequence.nodes = self.tree.match(sequence.tokens, sequence.request.options.cache_salt)
        sequence.blocks = [node.block for node in sequence.nodes]
        for block in sequence.blocks:
            self.pool.share(block)
        sequence.num_computed = len(sequence.blocks) * self.block_size
        return sequence.num_computed

    def _start(self, sequence: Sequence, hit: int, fresh: bool) -> None:
        group = sequence.request.sequences if fresh else [sequence]
        for member in group:
            member.row = self._free_rows.pop()
            member.status = Status.FORKING
        sequence.status = Status.RUNNING
        self.table[sequence.row, : len(sequence.blocks)] = sequence.blocks
        self.running.append(sequence)
        metrics = sequence.request.metrics
        if metrics.first_scheduled_time is None:  # not when it starts again after giving way
            metrics.first_scheduled_time = time.monotonic()
            metrics.cached_tokens = hit
            if self.tree is not None:
                self.tree.count(sequence.num_prompt, hit)

    # ── blocks ───────────────────────────────────────────────────────────────────────────────

    def _extend(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Blocks for `count` more tokens, and one of its own to write in: all or nothing."""
        blocks, size = sequence.blocks, self.block_size
        first = len(blocks)
        need = -(-(sequence.num_computed + count) // size) - first
        at = sequence.num_computed // size
        shared = at < first and self.pool.count(blocks[at]) > 1
        if need <= 0 and not shared:
            return True
        new = self.pool.allocate(max(need, 0) + shared)
        if new is None:
            return False
        if shared:  # copy on write
            own = new.pop()
            plan.copies.append((blocks[at], own))
            self.pool.release([blocks[at]])
            blocks[at] = own
            if sequence.row >= 0:
                self.table[sequence.row, at] = own
        blocks += new
        if sequence.row >= 0:
            self.table[sequence.row, first : len(blocks)] = new
        return True

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        """Take everything from `victim` but its tokens; it will be computed again."""
        self.running.remove(victim)
        plan.drop(victim)
        for member in victim.request.sequences:
            if member is victim or (member.status is Status.FORKING and victim.index == 0):
                self._let_go(member)
                member.status = Status.WAITING
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        victim.request.metrics.preemptions += 1

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks, sequence.nodes, sequence.num_computed = [], [], 0
        if sequence.row >= 0:
            self._free_rows.append(sequence.row)
            sequence.row = -1

    # ── after a step ─────────────────────────────────────────────────────────────────────────

    def computed(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens of `sequence` are in the cache; full blocks become findable."""
        sequence.num_computed += count
        if self.tree is None:
            return
        size, nodes = self.block_size, sequence.nodes
        while (len(nodes) + 1) * size <= sequence.num_computed:
            at = len(nodes)
            tokens = sequence.tokens[at * size : (at + 1) * size]
            salt = sequence.request.options.cache_salt
            parent = nodes[-1] if nodes else self.tree.root(salt)
            node = self.tree.insert(parent, tokens, sequence.blocks[at])
            if node.block != sequence.blocks[at]:  # somebody computed the same: hold theirs
                self.pool.share(node.block)
                self.pool.release([sequence.blocks[at]])
                sequence.blocks[at] = node.block
                self.table[sequence.row, at] = node.block
            nodes.append(node)

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Start the other samples of a request whose prompt `parent` has computed."""
        forks = [s for s in parent.request.sequences if s.status is Status.FORKING]
        for sequence in forks:
            sequence.num_computed = parent.num_computed
            sequence.blocks = list(parent.blocks)
            sequence.nodes = list(parent.nodes)
            for block in sequence.blocks:
                self.pool.share(block)
            self.table[sequence.row, : len(sequence.blocks)] = sequence.blocks
            sequence.status = Status.RUNNING
            self.running.append(sequence)
        return forks
