"""One of the processes that the first rank of a divided model starts (`runtime.team`)."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from penstock.ops.stages import bytes_of
from penstock.parallel import Ranks, Stage
from penstock.runtime import orders
from penstock.runtime.divided import LoadedPart, load_part
from penstock.runtime.hidden import HiddenRunner
from penstock.runtime.orders import Assignment, Kind, Ready
from penstock.runtime.runner import Runner
from penstock.runtime.team import map_meeting, say_gone
from penstock.step import Step


def run() -> None:
    """The process's whole life. Arguments: the numbers of its files for orders, for meetings, for
    rows that come and for those that leave.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    orders_by, meeting_in, before, after = map(int, sys.argv[1:5])
    link, meeting = Connection(orders_by), map_meeting(meeting_in)
    os.close(meeting_in)
    threading.Thread(target=_watch, args=(link.fileno(),), daemon=True).start()
    try:
        _serve(link, meeting, before, after)
    except EOFError:
        return  # the first rank has hung up
    except BaseException as error:
        link.send(f"{type(error).__name__}: {error}")  # before anybody asks
        say_gone([meeting])
        raise SystemExit(1) from error


def _watch(file: int) -> None:
    """End with the first rank, wherever this one is."""
    poll = select.poll()
    poll.register(file, 0)  # hanging up is told unasked
    poll.poll()
    os._exit(0)


def _serve(link: Connection, meeting: Tensor, before: int, after: int) -> None:
    assignment: Assignment = link.recv()
    if assignment.cpus:
        os.sched_setaffinity(0, assignment.cpus)
    asked = assignment.config.parallel
    count = asked.pipeline_parallel_size
    stage = Stage(assignment.stage, count, before, after) if count > 1 else None
    width, whole = asked.tensor_parallel_size, asked.enable_expert_parallel
    part = load_part(
        assignment.folder,
        assignment.config,
        Ranks(assignment.rank, width, meeting, whole, stage),
    )
    link.send(Ready())
    (num_blocks, _), *_ = orders.read_pairs(bytearray(link.recv_bytes()))
    runner = part.runner(num_blocks)
    steps = _Steps(part, runner)
    link.send(Ready(runner.finds_largest))
    speaks = stage is not None and stage.is_last and assignment.rank == 0
    found: list[tuple[Tensor, ...]] = []  # of the parts of a step
    while True:
        order = bytearray(link.recv_bytes())
        kind = orders.kind_of(order)
        if kind in (Kind.COPY, Kind.SWAP_OUT, Kind.SWAP_IN):
            _move(runner, kind, orders.read_pairs(order))
            continue
        answer = steps.run(kind, orders.read_step(order))
        if not speaks:
            continue
        more = orders.has_more(order)
        found.append(tuple(one.clone() for one in answer) if more else answer)
        if not more:
            for each in zip(*found, strict=True):
                link.send_bytes(bytes_of(torch.cat(each)))
            found.clear()


class _Steps:
    """Steps of each kind."""

    def __init__(self, part: LoadedPart, runner: Runner) -> None:
        stage = part.loaded.model.stage
        self._ends = stage is None or stage.is_last  # else all kinds are the same until here
        self._part = part
        self._runner = runner
        self._hidden: HiddenRunner | None = None

    def run(self, kind: Kind, step: Step) -> tuple[Tensor, ...]:
        """This rank's part of it, and what it has found if it is the one that finds."""
        if kind is Kind.STEP or not self._ends:
            return (self._runner.forward(step),)
        if kind is Kind.LARGEST:
            return self._runner.largest(step)
        self._hidden = self._hidden or HiddenRunner(self._part.loaded.model, self._runner)
        return (self._hidden.forward(step),)


def _move(runner: Runner, kind: Kind, pairs: list[tuple[int, int]]) -> None:
    if kind is Kind.COPY:
        runner.copy(pairs)
    elif kind is Kind.SWAP_OUT:
        runner.swap_out(pairs)
    else:
        runner.swap_in(pairs)
