"""Which sequences take part in the next step, and with how many tokens.

Continuous batching with chunked prefill: every step is planned anew, decoding sequences first, so
that a long prompt never holds up the others by more than one step's budget.
Sources: Yu et al. 2022 (Orca), Agrawal et al. 2023, arXiv:2308.16369 (Sarathi).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from penstock.cache import BlockPool, PrefixTree, SwapSpace
from penstock.config import PROMPT_LOGITS, SchedulerConfig
from penstock.engine.forks import Forks, rows_of
from penstock.engine.lockstep import hold_back
from penstock.engine.options import RequestOptions
from penstock.engine.outputs import PreemptionRecord
from penstock.engine.plan import Part, Plan, Swap
from penstock.engine.policy import check_options, policy_of
from penstock.engine.preemption import Preemption, blocks_grown
from penstock.engine.prefixes import Prefixes
from penstock.engine.refusals import Refusals
from penstock.engine.request import Request, Sequence, Status
from penstock.engine.reservations import Reservations, add_drafts, share_of_drafts
from penstock.engine.rows import Rows
from penstock.engine.states import States
from penstock.engine.swapping import Swapper
from penstock.engine.waiting import Entry, WaitingQueue
from penstock.engine.window import Window
from penstock.runtime import SEES_ALL, Horizon

__all__ = ["Part", "Plan", "Scheduler"]


class Scheduler:
    """In the order of a policy; who ranks lowest gives way when blocks run out."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        tree: PrefixTree | None,
        block_size: int,
        max_model_len: int,
        swap_space: SwapSpace,
        preemption: Preemption,
        clock: Callable[[], float] = time.monotonic,
        horizon: Horizon = SEES_ALL,
        states: States | None = None,
    ) -> None:
        """clock: seconds that never go back; what waiting is measured by. horizon: what layers
        see, where the cache has a block that stays empty. states: of a model that has some.
        """
        self.config = config
        self.pool = pool
        self.tree = tree
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.clock = clock
        self.policy = policy_of(config)
        # first come, first served overtakes nobody
        patience_s = math.inf if config.policy == "fcfs" else config.starvation_s
        self.waiting = WaitingQueue(self.policy, patience_s)
        self.running: list[Sequence] = []
        self.preemption = preemption
        longest = horizon.most_blocks(block_size, max_model_len, config.max_num_batched_tokens)
        self.refusals = Refusals(config, pool.num_blocks, block_size, max_model_len, longest)
        width = -(-max_model_len // block_size)
        self.table = np.zeros((config.max_num_seqs, width), dtype=np.int32)
        self.forks = Forks(pool, self.table, self.running, states)
        self.states = states
        self.reservations = Reservations(
            pool, self.table, block_size, self.running, self.waiting, states
        )
        self.window = Window(pool, self.table, block_size, horizon)
        self.prefixes = Prefixes(tree, pool, self.table, block_size, self.window, states)
        self.swapper = Swapper(swap_space, pool, block_size, self.prefixes.cached)
        self.rows = Rows(config.max_num_seqs)
        self._stuck: Sequence | None = None  # lacked blocks in the last step; none were freed since

    # ── the queue ────────────────────────────────────────────────────────────────────────────

    def check(self, n: int, options: RequestOptions) -> None:
        """Raises RequestError for `n` samples that could never run, or a wish that can't be met."""
        check_options(self.policy, options)
        self.refusals.check_samples(n)

    def add(self, request: Request) -> None:
        """Queue a request that `check` let pass."""
        first = request.sequences[0]
        request.num_uncached = first.num_prompt
        if request.guides is not None:  # they rank alike
            request.num_uncached = request.guides.num_uncached
        elif self.config.policy == "sjf":
            request.num_uncached -= len(self.prefixes.cached(first)) * self.block_size
        self.waiting.add(first, self.clock())

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_waiting(self) -> int:
        """Of the queue: those that hold nothing."""
        return max(len(self.waiting) - len(self.swapper.groups), 0)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.running)

    @property
    def num_swapped(self) -> int:
        """Sequences that hold swap slots."""
        return self.swapper.num_sequences

    @property
    def num_preemptions(self) -> int:
        """Times that a sequence, or a group that was swapped, gave way."""
        return self.preemption.num_recompute + self.preemption.num_swap

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free what it holds."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.swapper.forget(sequence)
        self._let_go(sequence)
        self._stuck = None
        sequence.status = Status.FINISHED

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    @property
    def admits(self) -> bool:
        """Whether somebody waits who might start in the next step."""
        self.waiting.age(self.clock())
        if not self.waiting or self.policy.preempts:
            return bool(self.waiting)
        return self.rows.num_free > 0 and self.waiting.first() is not self._stuck

    def has_room(self, sequence: Sequence) -> bool:
        """Whether a running sequence has a block for one more token than it has; it is given one
        that nobody else needs.
        """
        return self.reservations.reserve(sequence, 1) > 0

    def schedule(self) -> Plan:
        """Plan the next step; an empty plan means that there is nothing to do."""
        plan, self._stuck = Plan(), None
        self.waiting.age(self.clock())
        limit = self.config.max_num_batched_tokens
        preempted = self.num_preemptions
        drafted = [s for s in self.running if s.draft is not None]
        kept = share_of_drafts(drafted, self.config) if drafted else 0
        for sequence in self._by_phase():
            if sequence.status is not Status.RUNNING:
                continue  # gave way to one before it
            count = self._share(sequence, plan, limit - kept - plan.num_tokens)
            if count and self._make_room(sequence, count + sequence.draft_depth, plan):
                plan.take(sequence, count)
        if self.num_preemptions == preempted:
            self._admit(plan, limit - kept)
        if drafted:
            add_drafts(plan, limit)
        if hold_back(plan) and not plan.parts and self.waiting:
            lowest = max(self.running, key=self.waiting.rank)
            first = self.waiting.first()
            assert first is not None  # just looked
            self._preempt(lowest, first, plan)
        return plan

    def _by_phase(self) -> list[Sequence]:
        """Decoding sequences by arrival, then those with more of their prompt to come, by rank."""
        decoding = [s for s in self.running if s.is_decoding]
        if len(decoding) == len(self.running):
            return decoding
        filling = [s for s in self.running if not s.is_decoding]
        return decoding + sorted(filling, key=self.waiting.rank)

    def _share(self, sequence: Sequence, plan: Plan, budget: int) -> int:
        """How many of its tokens fit the budget: all or none of a prompt without chunks, and of
        tokens that see each other both ways.
        """
        remaining = sequence.remaining
        if self.config.enable_chunked_prefill and sequence.reads_logits:
            budget = min(budget, max(PROMPT_LOGITS - plan.num_read, 0))
        if remaining <= budget:
            return remaining
        if self.config.enable_chunked_prefill or sequence.num_output:
            seen = sequence.request.seen
            return budget if seen is None else seen.whole(sequence.num_computed, budget)
        return 0

    def _make_room(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Give `sequence` blocks for `count` more tokens; who ranks lowest gives way if need be."""
        while not self._extend(sequence, count, plan):
            self._preempt(max(self.running, key=self.waiting.rank), sequence, plan)
            if sequence.status is not Status.RUNNING:
                return False
        return True

    def _admit(self, plan: Plan, limit: int) -> None:
        """Start waiting sequences in their order while there are rows, budget and blocks."""
        aside: list[Entry] = []
        displaced = False  # whoever was must not come back in the same step
        while plan.num_tokens < limit and not displaced:
            sequence = self.waiting.first()
            if sequence is None:
                break
            rows = rows_of([sequence])
            waits = self._lacks_logits(sequence, plan) or self.prefixes.awaits(
                sequence, self.running
            )
            if rows <= self.rows.num_free and waits:
                aside.append(self.waiting.set_aside())
                self.rows.kept += rows
                continue
            while not self._enter(sequence, plan, limit):
                if not self._displace(sequence, plan, limit):
                    break
                displaced = True
            if sequence.status is not Status.RUNNING:
                if plan.num_tokens == len(plan.parts):  # no prompts, which took of the budget
                    self._stuck = sequence
                break
        self.waiting.put_back(aside)
        self.rows.kept = 0

    def _enter(self, sequence: Sequence, plan: Plan, limit: int) -> bool:
        """Start the first of the queue, or start it again: all or nothing."""
        if sequence.status is Status.SWAPPED:
            return self._resume(sequence, plan, limit)
        if self.rows.num_free < rows_of([sequence]):
            return False
        hit = self.prefixes.hold(sequence)
        count = self._share(sequence, plan, limit - plan.num_tokens)
        if not (count and self._fits(sequence, count) and self._extend(sequence, count, plan)):
            self._let_go(sequence)
            return False
        self.waiting.remove(sequence)
        self._start(sequence, hit)
        plan.take(sequence, count)
        return True

    def _resume(self, leader: Sequence, plan: Plan, limit: int) -> bool:
        """Start a group again that was swapped out, all of it with its next tokens."""
        group = self.swapper.groups[leader.request]
        budget = limit - plan.num_tokens
        if self.rows.num_free < rows_of(group) or budget < len(group):
            return False
        counts: list[int] = []
        for others, sequence in enumerate(reversed(group)):  # one token each at least
            left = budget - sum(counts) - (len(group) - 1 - others)
            counts.append(self._share(sequence, plan, left))
        counts.reverse()
        if 0 in counts:
            return False
        growth = sum(
            self._blocks_for(s.num_computed + count) - len(s.slots)
            for s, count in zip(group, counts, strict=True)
        )
        pairs = self.swapper.come_back(group, growth + len(self.running))
        if pairs is None:
            if not self.running:  # there won't ever be more room: it shared more than it can now
                self.forget_swapped(group)
                return self._enter(leader, plan, limit)
            return False
        self.waiting.remove(leader)
        record, leader.preempted = leader.preempted, None
        assert record is not None  # it gave way
        slots = [slot for s in group for slot in s.slots]
        plan.swaps_in.append(Swap(group, record, pairs, slots))
        for sequence, count in zip(group, counts, strict=True):
            sequence.slots = []
            sequence.overdue = leader.overdue
            self._run(sequence)
            self._extend(sequence, count, plan)
            plan.take(sequence, count)
        self.rows.reserve(leader)
        return True

    def _displace(self, newcomer: Sequence, plan: Plan, limit: int) -> bool:
        """Make the lowest in rank give way to `newcomer`, if that can bring it a row or blocks.

        Only a request that has never run may take places, and not of its equals. So what gave way
        waits for room, and two requests can't make each other give way in turns, whatever becomes
        of their ranks.
        """
        request, key = newcomer.request, self.policy.key(newcomer.request)
        if not self.policy.preempts or newcomer.overdue:
            return False
        if request.metrics.first_scheduled_time is not None:
            return False
        lower = [s for s in self.running if not s.overdue and self.policy.key(s.request) > key]
        if not lower:
            return False
        found = self.prefixes.findable(newcomer)
        newcomer.num_computed = len(found) * self.block_size
        count = self._share(newcomer, plan, limit - plan.num_tokens)
        need = self._blocks_for(newcomer.num_computed + count) + len(self.running)
        gone = self.window.passed(newcomer.num_computed)
        need -= len(gone)
        held = (node.block for at, node in enumerate(found) if at not in gone)
        need -= sum(self.pool.count(block) > 0 for block in held)
        newcomer.num_computed = 0
        lacks_rows = self.rows.num_free < request.params.n
        if not count or not (lacks_rows or self.pool.num_available < need):
            return False  # it is the budget that it lacks, and that is new with every step
        holders = {member for s in lower for member in s.request.sequences if member.row >= 0}
        own = sum(self.pool.filled(s.blocks) for s in lower)
        blocks = self.pool.num_available + own + len(lower)
        if self.rows.num_free + len(holders) < request.params.n or blocks < need:
            return False
        self._preempt(max(lower, key=self.waiting.rank), newcomer, plan)
        return True

    def _fits(self, sequence: Sequence, count: int) -> bool:
        """Whether a newcomer leaves a block for each running sequence: or it would soon give way.

        Asked before anything is allocated, which would give up cached blocks for nothing.
        """
        need = self._blocks_for(sequence.num_computed + count) - len(sequence.blocks)
        return self.pool.num_available >= need + len(self.running)

    def _lacks_logits(self, sequence: Sequence, plan: Plan) -> bool:
        """Whether others of the step read as many of their prompts' logits as can be."""
        limited = self.config.enable_chunked_prefill and sequence.reads_logits
        return limited and plan.num_read >= PROMPT_LOGITS

    def _start(self, sequence: Sequence, hit: int) -> None:
        self._run(sequence)
        self.rows.reserve(sequence)
        self.preemption.starts_again(sequence, hit)
        metrics = sequence.request.metrics
        if metrics.first_scheduled_time is None:  # not when it starts again after giving way
            metrics.first_scheduled_time = self.clock()
            metrics.cached_tokens = hit
            if self.tree is not None:
                self.tree.count(sequence.num_prompt, hit)

    def _run(self, sequence: Sequence) -> None:
        """Let a sequence run that has its blocks."""
        self.rows.take(sequence)
        sequence.status = Status.RUNNING
        self.table[sequence.row, : len(sequence.blocks)] = sequence.blocks
        self.running.append(sequence)

    # ── blocks ───────────────────────────────────────────────────────────────────────────────

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _extend(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Blocks for `count` more tokens, and one of its own to write in: all or nothing."""
        blocks, size = sequence.blocks, self.block_size
        first = len(blocks)
        need = self._blocks_for(sequence.num_computed + count) - first
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

    def _preempt(self, victim: Sequence, asker: Sequence, plan: Plan) -> None:
        """Take blocks and row from `victim`, and from its group if that is swapped out."""
        own = sum(self.pool.count(block) == 1 for block in victim.blocks[: len(victim.nodes)])
        stay = len(victim.nodes) - min(self._taken_meanwhile([victim], asker), own)
        record = self.preemption.recompute(
            victim, self.pool.filled(victim.blocks), stay * self.block_size
        )
        if swap := self._swap_out(victim, asker, record, plan):
            leaving, leader, record = swap.group, swap.group[0], swap.record
        else:
            leaving, leader = [victim], victim
        self.preemption.gave_way(leader, record)
        for sequence in leaving:
            self.running.remove(sequence)
            plan.drop(sequence)
            if sequence.index == 0 and not sequence.num_output:  # nobody has forked yet
                for member in sequence.request.sequences:
                    if member.status is Status.FORKING:
                        self._stop(member)
            self._stop(sequence, swapped=record.mode == "swap")
        self.waiting.add(leader, self.clock())

    def _taken_meanwhile(self, leaving: list[Sequence], asker: Sequence) -> int:
        """Blocks of those leaving that others will have taken when there is room again."""
        if self.tree is None:
            return self.pool.num_blocks  # nothing is found again
        others = [s for s in {*self.running, asker} if s not in leaving]
        steps = min(map(self.tokens_left, others), default=0)
        grown = blocks_grown(others, steps, self.block_size)
        open_blocks = sum(len(s.blocks) - len(s.nodes) for s in leaving)  # not in the tree: free
        return max(grown - open_blocks - self.pool.num_available, 0)

    def tokens_left(self, sequence: Sequence) -> int:
        """How many tokens a sequence may still be given."""
        room, limit = self.max_model_len - len(sequence.tokens), sequence.request.params.max_tokens
        return room if limit is None else min(limit - sequence.num_output, room)

    def _swap_out(
        self, victim: Sequence, asker: Sequence, other: PreemptionRecord, plan: Plan
    ) -> Swap | None:
        """Slots for `victim` and the samples that run with it, if that is the better way."""
        group = self.swapper.group_of(victim)
        if asker in group and len(group) == len(self.running):
            return None  # nobody would be left, and it would come back to the same
        if any(s in swap.group for swap in plan.swaps_in for s in group):
            return None  # its blocks aren't filled yet
        blocks, held = self.swapper.stake(group)
        if not blocks:
            return None
        partial = sum(s.num_computed % self.block_size > 0 for s in group)  # never in the tree
        back = min(self._taken_meanwhile(group, asker) + partial, blocks - held)
        record = self.preemption.swap(group, blocks, back)
        if not self.preemption.prefers_swap(other, record):
            return None
        pairs = self.swapper.leave(group, plan)
        if not pairs:
            return None
        swap = Swap(group, record, pairs)
        plan.swaps_out.append(swap)
        return swap

    def _stop(self, sequence: Sequence, *, swapped: bool = False) -> None:
        """Take row and blocks from a sequence; what it has computed is kept where it is swapped."""
        computed = sequence.num_computed
        self._let_go(sequence)
        sequence.status = Status.SWAPPED if swapped else Status.WAITING
        if swapped:
            sequence.num_computed = computed

    def forget_swapped(self, group: list[Sequence]) -> None:
        """What `group` has in the swap space will be computed again instead."""
        for sequence in list(group):
            self.swapper.forget(sequence)
            sequence.num_computed = 0
            sequence.status = Status.WAITING
            sequence.preempted = None
            if sequence not in self.waiting:
                self.waiting.add(sequence, self.clock())

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks, sequence.nodes, sequence.num_computed = [], [], 0
        if self.states is not None:
            self.states.let_go(sequence)
        self.reservations.drop(sequence)
        self.rows.give_back(sequence)

    # ── after a step ─────────────────────────────────────────────────────────────────────────

    def computed(self, sequence: Sequence, count: int) -> bool:
        """`count` more tokens of `sequence` are in the cache; full blocks become findable.

        Whether a block of it has given way to another's that holds the same, or is seen no more.
        """
        sequence.num_computed += count
        replaced = self.prefixes.computed(sequence)
        if self.states is not None:
            self.states.computed(sequence)
        return self.window.pass_by(sequence) or replaced
