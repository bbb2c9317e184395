"""Which sequences take part in the next step, and with how many tokens.

Continuous batching with chunked prefill: every step is planned anew, decoding sequences first, so
that a long prompt never holds up the others by more than one step's budget.
Sources: Yu et al. 2022 (Orca), Agrawal et al. 2023, arXiv:2308.16369 (Sarathi).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.cache import BlockPool, PrefixTree
from penstock.config import SchedulerConfig
from penstock.engine.request import Request, Sequence, Status
from penstock.errors import ConfigError, OutOfCacheError


@dataclass(slots=True)
class Plan:
    """One step: its sequences with their new tokens, and blocks to copy before it."""

    parts: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from, to)


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
        self.table = np.zeros((config.max_num_seqs, width), dtype=np.int32)
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))

    # ── the queue ────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request) -> None:
        """Queue a request; refuse one that could never run."""
        params = request.params
        if params.n > self.config.max_num_seqs:
            raise ConfigError(
                f"n={params.n} samples can't run at once: max_num_seqs is "
                f"{self.config.max_num_seqs}. Raise it, or send several requests."
            )
        need = -(-len(request.prompt_token_ids) // self.block_size)
        if need > self.pool.num_blocks:
            raise OutOfCacheError(
                f"The prompt needs {need} blocks but the cache holds {self.pool.num_blocks}. "
                f"Shorten it to {self.pool.num_blocks * self.block_size} tokens, or give the "
                "cache more memory."
            )
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
        budget = self.config.max_num_batched_tokens
        preempted = self.num_preemptions
        for sequence in self._by_phase():
            if sequence.status is not Status.RUNNING:
                continue  # gave way to one before it
            count = self._share(sequence, budget)
            if count and self._make_room(sequence, count, plan):
                plan.parts.append((sequence, count))
                budget = self._left(plan)
        if self.num_preemptions == preempted:
            self._admit(plan, budget)
        return plan

    def _by_phase(self) -> list[Sequence]:
        """Decoding sequences, then those with more of their prompt to come; each by arrival."""
        decoding = [s for s in self.running if s.num_output and s.remaining == 1]
        if len(decoding) == len(self.running):
            return decoding
        return decoding + [s for s in self.running if not (s.num_output and s.remaining == 1)]

    def _left(self, plan: Plan) -> int:
        return self.config.max_num_batched_tokens - sum(n for _, n in plan.parts)

    def _share(self, sequence: Sequence, budget: int) -> int:
        """How many of its tokens fit the budget: all or none without chunked prefill."""
        if sequence.remaining <= budget:
            return sequence.remaining
        return budget if self.config.enable_chunked_prefill else 0

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Give `sequence` blocks for `count` more tokens; later arrivals give way if need be."""
        while not self._extend(sequence, count, plan):
            victim = max(self.running, key=lambda s: s.order)
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        return True

    def _admit(self, plan: Plan, budget: int) -> None:
        """Start waiting sequences while there are rows, budget and blocks."""
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            fresh = sequence.index == 0 and sequence.num_output == 0
            rows = sequence.request.params.n if fresh else 1
            if len(self._free_rows) < rows:
                return
            hit = self._look_up(sequence)
            count = self._share(sequence, budget)
            if not count or not self._extend(sequence, count, plan):
                self._let_go(sequence)
                return
            self.waiting.popleft()
            self._start(sequence, hit, fresh)
            plan.parts.append((sequence, count))
            budget -= count

    def _look_up(self, sequence: Sequence) -> int:
        """Hold the cached prefix of a sequence that is about to start; tokens found."""
        if self.tree is None:
            return 0
        sequence.nodes = self.tree.match(sequence.tokens)
        sequence.blocks = [node.block for node in sequence.nodes]
        for block in sequence.blocks:
            self.pool.share(block)
        # prompt logprobs need the logits of every prompt row
        if sequence.request.params.prompt_logprobs is not None and not sequence.num_output:
            self._let_go(sequence)
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
        if fresh and self.tree is not None:
            self.tree.count(sequence.num_prompt, hit)
            sequence.request.metrics.cached_tokens = hit

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
        plan.parts = [part for part in plan.parts if part[0] is not victim]
        gone = set(victim.blocks)
        plan.copies = [copy for copy in plan.copies if copy[1] not in gone]
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
            parent = nodes[-1] if nodes else self.tree.root()
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
