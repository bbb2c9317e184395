"""Carrying out what a plan says of blocks: copies out of the cache, within it, and back in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.engine.plan import Plan
from penstock.engine.request import Request, Status
from penstock.engine.scheduler import Scheduler
from penstock.runtime import Runner

logger = logging.getLogger("penstock")

Fail = Callable[[Request, Exception], Request]
"""Ends a request with an error; returns the one that a caller knows of."""


class Mover:
    """Moves blocks before a step."""

    def __init__(self, runner: Runner, scheduler: Scheduler, fail: Fail) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._fail = fail

    def move(self, plan: Plan, touched: dict[str, Request]) -> None:
        """Copy blocks out, within the cache, and back in.

        Where that fails, what should have gone out will be computed again, and what should have
        come in fails with its request, which becomes one of `touched`.
        """
        preemption, space = self._scheduler.preemption, self._scheduler.swapper.space
        for swap in plan.swaps_out:
            start = time.perf_counter()
            try:
                self._runner.swap_out(swap.pairs)
            except Exception as error:  # out of memory, most likely
                logger.warning("%d blocks can't be swapped out: %r", len(swap.pairs), error)
                self._scheduler.forget_swapped(swap.group)
                preemption.not_copied()
                continue
            preemption.copied(swap, time.perf_counter() - start, back=False)
        if plan.copies:
            self._copy(plan, touched)
        for swap in plan.swaps_in:
            start = time.perf_counter()
            try:
                self._runner.swap_in(swap.pairs)
            except Exception as error:
                failed = self._fail(swap.group[0].request, error)
                touched[failed.request_id] = failed
            else:
                preemption.copied(swap, time.perf_counter() - start, back=True)
            space.release(swap.slots)
        plan.parts = [part for part in plan.parts if part[0].status is Status.RUNNING]

    def _copy(self, plan: Plan, touched: dict[str, Request]) -> None:
        """Make the plan's copies; if that fails, so do the requests that would write to them."""
        try:
            self._runner.copy(plan.copies)
        except Exception as error:  # out of memory, most likely
            targets = {target for _, target in plan.copies}
            for sequence in list(self._scheduler.running):  # also one that is held back
                written = {
                    block for blocks in (sequence.blocks, *sequence.ways) for block in blocks
                }
                if sequence.status is Status.RUNNING and not targets.isdisjoint(written):
                    failed = self._fail(sequence.request, error)
                    touched[failed.request_id] = failed
            plan.parts = [part for part in plan.parts if part[0].status is Status.RUNNING]
