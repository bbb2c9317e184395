"""One of the processes that the first rank of a divided model starts (`runtime.team`)."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection

import torch

from penstock.parallel import Ranks
from penstock.runtime import orders
from penstock.runtime.divided import load_part
from penstock.runtime.hidden import HiddenRunner
from penstock.runtime.orders import Assignment, Kind
from penstock.runtime.runner import Runner
from penstock.runtime.team import map_meeting, say_gone


def run() -> None:
    """The process's whole life. Arguments: the numbers of its files for orders and for meetings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link, meeting = Connection(int(sys.argv[1])), map_meeting(int(sys.argv[2]))
    os.close(int(sys.argv[2]))
    threading.Thread(target=_watch, args=(link.fileno(),), daemon=True).start()
    try:
        _serve(link, meeting)
    except EOFError:
        return  # the first rank has hung up
    except BaseException as error:
        link.send(f"{type(error).__name__}: {error}")  # before anybody asks
        say_gone(meeting)
        raise SystemExit(1) from error


def _watch(file: int) -> None:
    """End with the first rank, wherever this one is."""
    poll = select.poll()
    poll.register(file, 0)  # hanging up is told unasked
    poll.poll()
    os._exit(0)


def _serve(link: Connection, meeting: torch.Tensor) -> None:
    assignment: Assignment = link.recv()
    if assignment.cpus:
        os.sched_setaffinity(0, assignment.cpus)
    config = assignment.config
    whole = config.parallel.enable_expert_parallel
    ranks = Ranks(assignment.rank, assignment.size, meeting, whole)
    part = load_part(assignment.folder, config, ranks)
    link.send(None)
    (num_blocks, _), *_ = orders.read_pairs(bytearray(link.recv_bytes()))
    runner = part.runner(num_blocks)
    hidden: HiddenRunner | None = None
    link.send(None)
    while True:
        order = bytearray(link.recv_bytes())
        kind = orders.kind_of(order)
        if kind is Kind.STEP:
            runner.forward(orders.read_step(order))
        elif kind is Kind.LARGEST:
            runner.largest(orders.read_step(order))
        elif kind is Kind.HIDDEN:
            hidden = hidden or HiddenRunner(part.loaded.model, runner)
            hidden.forward(orders.read_step(order))
        else:
            _move(runner, kind, orders.read_pairs(order))


def _move(runner: Runner, kind: Kind, pairs: list[tuple[int, int]]) -> None:
    if kind is Kind.COPY:
        runner.copy(pairs)
    elif kind is Kind.SWAP_OUT:
        runner.swap_out(pairs)
    else:
        runner.swap_in(pairs)
