"""The other ranks of a model that is divided, as the first one sees them.

The first rank is the process that has the engine; it starts the others, and each loads its part of
the weights and has its part of the cache. What is done to a cache is done by all: `Team` tells the
others before the first rank does the same (`runtime.orders`), and they meet within the step
(`ops.ranks`). A rank that ends, ends the engine: nobody else has what it had.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.cpus import numa_cpus, usable_cpus
from penstock.errors import PenstockError, RankError
from penstock.ops.ranks import HEADER
from penstock.parallel import Ranks
from penstock.runtime import orders
from penstock.runtime.orders import Assignment, Kind
from penstock.step import Step

logger = logging.getLogger("penstock")

PLACE_BYTES = 64 << 20
"""Of each of a meeting's two places, taken as they are first used: 2,048 rows of 16,384 values in
bfloat16, which then are read where they were written."""

_RUN = "from penstock.runtime.rank import run; run()"
_PATIENCE_S = 5.0  # for a rank to end by itself


class Team:
    """The ranks beside this one."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """Starts them, and they begin to load. Raises RankError where one can't be started."""
        size = config.parallel.tensor_parallel_size
        self.size = size
        self.threads = max(torch.get_num_threads() // size, 1)
        meeting = os.memfd_create("penstock-meeting")
        os.ftruncate(meeting, HEADER + 2 * PLACE_BYTES)
        whole = config.parallel.enable_expert_parallel
        self.ranks = Ranks(0, size, map_meeting(meeting), whole)
        self._broken: str | None = None
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._end = weakref.finalize(self, _end, self._links, self._processes)
        sets = cpus_of_ranks(size)
        try:
            for rank in range(1, size):
                self._start(Assignment(config, folder, rank, size, sets[rank]), meeting)
        except OSError as error:
            self.close()
            raise RankError(
                f"Rank {len(self._links)} of {size} can't be started: {error}"
            ) from error
        finally:
            os.close(meeting)
        if sets[0]:
            os.sched_setaffinity(0, sets[0])
        logger.info(
            "%d processes (ranks) share the model by its columns, %d thread%s each%s.",
            size, self.threads, "s" * (self.threads > 1),
            ", one memory node after another" if sets[0] else "",
        )  # fmt: skip
        if size > torch.get_num_threads():
            logger.warning(
                "%d ranks share %d threads' cores: each waits for others that don't run.",
                size, torch.get_num_threads(),
            )  # fmt: skip

    def _start(self, assignment: Assignment, meeting: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN, str(theirs.fileno()), str(meeting)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), meeting),
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
                start_new_session=True,  # Ctrl-C in a terminal is the first rank's to heed
            )
            self._processes.append(process)
            self._links.append(Connection(os.dup(ours.fileno())))
        self._links[-1].send(assignment)
        watch = threading.Thread(
            target=_watch, args=(process, self.ranks.meeting), name="penstock-rank", daemon=True
        )
        watch.start()

    def loaded(self) -> None:
        """Wait until all have their weights. Raises RankError, with the reason, where one can't."""
        self._hear("load its part of the model")

    def allocate(self, num_blocks: int) -> None:
        """Have all make caches of so many blocks, and get ready for steps."""
        for link in self._links:
            self._send(link, orders.of_pairs(Kind.COPY, [(num_blocks, num_blocks)]))
        self._hear("get ready")

    def _hear(self, what: str) -> None:
        for rank, link in enumerate(self._links, 1):
            try:
                reason = link.recv()
            except (EOFError, OSError):
                reason = self._how(rank)
            if reason is not None:
                self.close()
                raise RankError(f"Rank {rank} of {self.size} couldn't {what}: {reason}")

    @contextmanager
    def doing(self, order: bytes) -> Iterator[None]:
        """Have all do it while the first rank does. Raises RankError where one has ended."""
        self.check()
        try:
            for link in self._links:
                self._send(link, order)
            yield
        except BaseException as error:
            # the others have been told what this one hasn't done
            self._broken = self._reason() or f"the first rank stopped: {error!r}"
            self.close()
            if isinstance(error, Exception):
                raise self._error() from error
            raise

    def step(self, step: Step, kind: Kind) -> bytes:
        """What `doing` tells of a step, of which `kind` is wanted."""
        if step.adapters is not None:
            raise PenstockError("Steps with adapters aren't built for several ranks.")
        return orders.of_step(step, kind)

    def moving(self, kind: Kind, pairs: Sequence[tuple[int, int]]) -> bytes:
        """What `doing` tells of blocks that are copied."""
        return orders.of_pairs(kind, pairs)

    def check(self) -> None:
        """Raises RankError where a rank has ended."""
        if self._broken is None and self._gone:
            self._broken = self._reason() or "a rank has ended"
        if self._broken is not None:
            self.close()
            raise self._error()

    def close(self) -> None:
        """End the other ranks."""
        self._broken = self._broken or "the model was closed"
        say_gone(self.ranks.meeting)
        self._end()

    @property
    def _gone(self) -> bool:
        return bool(self.ranks.meeting[0])

    def _send(self, link: Connection, order: bytes) -> None:
        try:
            link.send_bytes(order)
        except OSError as error:
            rank = 1 + self._links.index(link)
            raise RankError(self._how(rank)) from error

    def _error(self) -> RankError:
        return RankError(
            f"A model that {self.size} processes compute together can't go on: {self._broken}. "
            "Load it again."
        )

    def _reason(self) -> str | None:
        """Which rank has ended, and how; None: none that is known of."""
        for rank, link in enumerate(self._links, 1):
            with suppress(EOFError, OSError):
                while link.poll():
                    if (said := link.recv()) is not None:
                        return f"rank {rank} raised {said}"
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                said = ": stderr has its last words" if process.returncode > 0 else ""
                return (
                    f"rank {rank} (process {process.pid}) has ended with {process.returncode}{said}"
                )
        return None

    def _how(self, rank: int) -> str:
        """How a rank that has hung up has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._processes[rank - 1].wait(_PATIENCE_S)
        return self._reason() or "it has hung up"


def _end(links: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
    """Hang up, which a rank takes as its end, and see that it is."""
    for link in links:
        link.close()
    for process in processes:
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _watch(process: subprocess.Popen[bytes], meeting: Tensor) -> None:
    """Say at the meeting that a rank has gone, so that nobody waits there for it."""
    process.wait()
    say_gone(meeting)


def say_gone(meeting: Tensor) -> None:
    """Say at a meeting that somebody won't come, so that nobody waits there for ever."""
    meeting[:4].view(torch.int32)[0] = 1


def map_meeting(file: int) -> Tensor:
    """The memory that all ranks map."""
    size = os.fstat(file).st_size
    return torch.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_SHARED), dtype=torch.uint8)


def cpus_of_ranks(size: int) -> list[tuple[int, ...]]:
    """Which CPUs each rank runs on: an equal part of one memory node's, where there are several
    nodes; else empty sets, and any.
    """
    nodes = numa_cpus()
    if len(nodes) == 1 or len(usable_cpus()) < size or size % len(nodes):
        return [()] * size
    each = size // len(nodes)
    return [node[i * len(node) // each : (i + 1) * len(node) // each]
            for node in nodes for i in range(each)]  # fmt: skip
