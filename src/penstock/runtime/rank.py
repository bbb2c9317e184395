"""One of the processes that the first rank of a divided model starts (`runtime.team`)."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from penstock.errors import ConfigError, RankError
from penstock.models.hub import resolve
from penstock.ops.ranks import HEADER
from penstock.ops.stages import bytes_of
from penstock.parallel import Stage, member
from penstock.parent import die_with
from penstock.runtime import orders
from penstock.runtime.away import accept, connect, version, wait_for_end
from penstock.runtime.divided import LoadedPart, load_part
from penstock.runtime.hidden import HiddenRunner
from penstock.runtime.identity import weights_digest
from penstock.runtime.orders import ANSWER, ERROR, FAILED, READY, Assignment, Kind, Ready
from penstock.runtime.runner import Runner
from penstock.runtime.team import map_meeting, say_gone
from penstock.step import Step

logger = logging.getLogger("penstock")


def run() -> None:
    """The process's whole life. Arguments: its parent, and the numbers of its files for orders, for
    meetings, for rows that come and for those that leave.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent, orders_by, meeting_in, before, after = map(int, sys.argv[1:6])
    link, meeting = Connection(orders_by), map_meeting(meeting_in)
    os.close(meeting_in)
    threading.Thread(target=_watch, args=(link.fileno(), parent), daemon=True).start()
    with _telling(link, meeting):
        _serve(link, link.recv(), meeting, before, after)


def empty_bytes() -> int:
    """What such a process has before it has a part of a model, files left out. Raises RankError."""
    code = (
        "import penstock.runtime.rank; from penstock.hardware import resident_bytes, "
        "resident_file_bytes; print(resident_bytes() - resident_file_bytes())"
    )
    command = [sys.executable, "-P", "-c", code]
    try:
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RankError(f"A process like a rank's can't be started: {error}") from error
    return int(told)


def run_away() -> None:
    """The same of a stage on another machine. Arguments: its parent, its model, and the number of
    the socket that the first rank comes to, and then the stage before.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not die_with(int(sys.argv[1])):
        return
    listening = socket.socket(fileno=int(sys.argv[3]))
    link, meeting = _coming(listening, "orders"), torch.zeros(HEADER + 128, dtype=torch.uint8)
    threading.Thread(target=_watch, args=(link.fileno(),), daemon=True).start()
    with _telling(link, meeting):
        theirs, ours = link.recv(), version()
        if theirs != ours:
            raise ConfigError(f"the first rank is Penstock {theirs}, and this {ours}.")
        assignment: Assignment = link.recv()
        folder = resolve(sys.argv[2])
        if weights_digest(folder) != assignment.weights:
            raise ConfigError(
                f"the weights in {folder}, where this stage is, aren't those in "
                f"{assignment.folder}, where the first one is"
            )
        before = _coming(listening, "rows")
        after = None if assignment.after is None else connect(assignment.after, "rows")
        count = assignment.config.parallel.pipeline_parallel_size
        print(f"In use as stage {assignment.stage + 1} of {count}.", file=sys.stderr, flush=True)
        own = replace(assignment, folder=folder)
        _serve(link, own, meeting, before.fileno(), -1 if after is None else after.fileno())


def _coming(listening: socket.socket, role: str) -> Connection:
    """Whoever comes for that; others are hung up on."""
    while True:
        found = accept(listening)
        if found is not None and found[1] == role:
            return found[0]
        if found is not None:
            found[0].close()
        logger.warning("Somebody came who doesn't know the key, or left before he had shown it.")


@contextmanager
def _telling(link: Connection, meeting: Tensor) -> Iterator[None]:
    """What goes wrong is the first rank's to tell; that it hangs up is no fault."""
    try:
        yield
    except EOFError:
        return
    except BaseException as error:
        link.send_bytes(ERROR)  # before anybody asks
        link.send_bytes(f"{type(error).__name__}: {error}".encode())
        say_gone([meeting])
        raise SystemExit(FAILED) from error


def _watch(file: int, parent: int | None = None) -> None:
    """End with the first rank, wherever this one is; parent: its process, whose forks may keep the
    connection open.
    """
    wait_for_end(file, process=parent)
    os._exit(0)


def _serve(
    link: Connection, assignment: Assignment, meeting: Tensor, before: int, after: int
) -> None:
    if assignment.cpus:
        os.sched_setaffinity(0, assignment.cpus)
    asked = assignment.config.parallel
    count = asked.pipeline_parallel_size
    away = bool(asked.stage_addresses)
    stage = Stage(assignment.stage, count, before, after, away) if count > 1 else None
    part = load_part(
        assignment.folder,
        assignment.config,
        member(asked, assignment.rank, meeting, stage),
    )
    _say_ready(link, Ready(most_blocks=part.most_blocks if away else None))
    (num_blocks, _), *_ = orders.read_pairs(bytearray(link.recv_bytes()))
    runner = part.runner(num_blocks)
    steps = _Steps(part, runner)
    _say_ready(link, Ready(runner.finds_largest))
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
                link.send_bytes(ANSWER)
                link.send_bytes(bytes_of(torch.cat(each)))
            found.clear()


def _say_ready(link: Connection, ready: Ready) -> None:
    link.send_bytes(READY)
    link.send(ready)


class _Steps:
    """Steps of each kind."""

    def __init__(self, part: LoadedPart, runner: Runner) -> None:
        model = part.loaded.model  # where it doesn't end, all kinds are the same until there
        self._ends = model.ends_here
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
