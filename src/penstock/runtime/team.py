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
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, product
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.cpus import numa_cpus, usable_cpus
from penstock.errors import PenstockError, RankError
from penstock.ops.ranks import HEADER
from penstock.ops.stages import bytes_of
from penstock.parallel import Stage, member
from penstock.runtime import orders
from penstock.runtime.away import There, connect, version
from penstock.runtime.identity import weights_digest
from penstock.runtime.orders import ANSWER, ERROR, FAILED, GONE, READY, Assignment, Kind, Ready
from penstock.runtime.parts import joined, parts_of
from penstock.step import Step

logger = logging.getLogger("penstock")

PLACE_BYTES = 64 << 20
"""Of each of a meeting's two places, taken as they are first used: 2,048 rows of 16,384 values in
bfloat16, which then are read where they were written."""

_RUN = "from penstock.runtime.rank import run; run()"
_PATIENCE_S = 5.0  # for a rank to end by itself
_LAST_WORDS_S = 1.0  # for what has happened to another rank to be known


class Team:
    """The ranks beside this one: of its stage, and those of the stages that come after."""

    STEP_S = 10.0
    """That a step may take when the engine is to end: then a rank is taken to have stopped."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """Starts them, and they begin to load. Raises RankError where one can't be started."""
        asked = config.parallel
        self.size, self.stages = asked.size, asked.pipeline_parallel_size
        self._width = asked.width
        self.threads = max(torch.get_num_threads() // self._width, 1)
        self.finds_largest = False
        self.most_blocks: int | None = None  # that all other machines have room for
        self._broken: str | None = None
        self._said: list[str] = []  # by ranks that have raised something
        self._meetings: list[Tensor] = []
        self._links: list[Connection] = []
        self._others: list[Here | There] = []
        self._files: list[socket.socket | Connection] = []  # that rows leave by
        self._masks: dict[int, set[int]] = {}  # of threads, before they had CPUs of their own
        held = self._links, self._files, self._others, self._masks
        self._end = weakref.finalize(self, _end, *held)
        sets = cpus_of_ranks(self._width)
        try:
            if asked.stage_addresses:
                self._join(config, folder)
            else:
                self._start_all(config, folder, sets)
        except OSError as error:
            self.close()
            rank = len(self._links) + 1
            raise RankError(f"Rank {rank} of {self.size} can't be started: {error}") from error
        except BaseException:
            self.close()
            raise
        stage = None
        if self._files:
            after = self._files[0].fileno()
            stage = Stage(0, self.stages, after=after, is_away=bool(asked.stage_addresses))
        self.ranks = member(asked, 0, self._meetings[0], stage)
        if sets[0]:
            self._masks |= pin_threads(sets[0])
        shared = "model" if asked.context_parallel_size == 1 else "context"
        logger.info(
            "%d processes (ranks) share the %s: %s, %d thread%s each%s.",
            self.size, shared, asked.described, self.threads, "s" * (self.threads > 1),
            ", one memory node after another" if sets[0] else "",
        )  # fmt: skip
        if not asked.stage_addresses and self.size > torch.get_num_threads():
            logger.warning(
                "%d ranks share %d threads' cores: each waits for others that don't run.",
                self.size, torch.get_num_threads(),
            )  # fmt: skip

    @property
    def is_pipelined(self) -> bool:
        """Whether logits are made by another stage than the first rank's."""
        return self.stages > 1

    def _start_all(
        self, config: EngineConfig, folder: Path, sets: Sequence[tuple[int, ...]]
    ) -> None:
        width, stages = self._width, self.stages
        with ExitStack() as files:  # of others, once they have them
            meetings = [os.memfd_create("penstock-meeting") for _ in range(stages)]
            for meeting in meetings:
                files.callback(os.close, meeting)
                os.ftruncate(meeting, HEADER + 2 * PLACE_BYTES)
                self._meetings.append(map_meeting(meeting))
            between = [[socket.socketpair() for _ in range(width)] for _ in range(stages - 1)]
            for end in chain.from_iterable(chain.from_iterable(between)):
                files.enter_context(end)
            if between:
                self._files.append(between[0][0][0].dup())
            for stage, rank in list(product(range(stages), range(width)))[1:]:
                before = between[stage - 1][rank][1].fileno() if stage else -1
                after = between[stage][rank][0].fileno() if stage + 1 < stages else -1
                assignment = Assignment(config, folder, rank, stage, sets[rank])
                self._start(assignment, (meetings[stage], before, after))

    def _start(self, assignment: Assignment, files: Sequence[int]) -> None:
        """files: of its meetings, of rows that come, and of those that leave; −1: none."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            numbers = [theirs.fileno(), *files]
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _RUN, str(os.getpid()), *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                pass_fds=[number for number in numbers if number >= 0],
                env=os.environ | {"OMP_NUM_THREADS": str(self.threads)},
                start_new_session=True,  # Ctrl-C in a terminal is the first rank's to heed
            )
            self._take(Here(process), Connection(os.dup(ours.fileno())))
        self._links[-1].send(assignment)

    def _take(self, other: Here | There, link: Connection) -> None:
        self._others.append(other)
        self._links.append(link)
        watch = threading.Thread(
            target=_watch, args=(other, self._meetings), name="penstock-rank", daemon=True
        )
        watch.start()

    def _join(self, config: EngineConfig, folder: Path) -> None:
        """Have stages compute that wait on other machines."""
        self._meetings.append(torch.zeros(HEADER + 128, dtype=torch.uint8))  # of one rank
        addresses = config.parallel.stage_addresses
        for address in addresses:
            link = connect(address, "orders")
            self._take(There(address, link), link)
        weights = weights_digest(folder)
        for stage, link in enumerate(self._links, 1):
            after = addresses[stage] if stage < len(addresses) else None
            link.send(version())
            link.send(Assignment(config, folder, 0, stage, (), weights, after))
        self._files.append(connect(addresses[0], "rows"))

    def loaded(self) -> None:
        """Wait until all have their weights. Raises RankError, with the reason, where one can't."""
        found = self._hear("load its part of the model")
        rooms = [said.most_blocks for said in found if said.most_blocks is not None]
        self.most_blocks = min(rooms, default=None)

    def allocate(self, num_blocks: int) -> None:
        """Have all make caches of so many blocks, and get ready for steps."""
        self._tell(orders.of_pairs(Kind.COPY, [(num_blocks, num_blocks)]))
        found = self._hear("get ready")
        self.finds_largest = self.is_pipelined and found[-self._width].finds_largest

    def _hear(self, what: str) -> list[Ready]:
        found: list[Ready] = []
        for rank, link in enumerate(self._links, 1):
            said: Ready | str
            try:
                said = link.recv() if link.recv_bytes() == READY else link.recv_bytes().decode()
            except (EOFError, OSError):
                said = self._reason(_PATIENCE_S) or "it has hung up"
            if not isinstance(said, Ready):
                self.close()
                raise RankError(f"Rank {rank} of {self.size} couldn't {what}: {said}")
            found.append(said)
        return found

    @contextmanager
    def doing(self, order: bytes) -> Iterator[None]:
        """Have all do it while the first rank does. Raises RankError where one has ended."""
        self.check()
        with self._together():
            self._tell(order)
            yield

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What is done within is done by all ranks, or the team is at its end."""
        try:
            yield
        except BaseException as error:
            # the others have been told what this one hasn't done
            by_others = isinstance(error, RuntimeError | OSError | EOFError)
            told = str(error) if isinstance(error, RankError | _SaidError) else None
            self._said += [told] if isinstance(error, _SaidError) and told else []
            found = self._reason(_LAST_WORDS_S if by_others else 0.0)
            self._broken = found or told or f"the first rank stopped: {error!r}"
            self.close()
            if isinstance(error, Exception):
                raise self._error() from error
            raise

    def compute(
        self, step: Step, kind: Kind, forward: Callable[[Step], Tensor], columns: int
    ) -> list[Tensor]:
        """What `kind` asks of a step whose last stage is another process's, of the first stage
        `forward`: logits or hidden states [S, columns] float32, or each row's largest as `argmax`
        gives it. Raises RankError where a rank has ended.
        """
        self.check()
        parts = parts_of(step, self.stages)
        with self._together():
            for one in parts:
                self._tell(orders.of_step(_plain(one), kind, more=one is not parts[-1]))
                forward(one)
            rows = step.sample_at.shape[0]
            if kind is Kind.LARGEST:
                answer = [torch.empty(rows, dtype=torch.int64), torch.empty(rows)]
            else:
                answer = [torch.empty(rows, columns)]
            for each in answer:
                self._receive(each)
        return [joined([each], step, parts) if len(parts) > 1 else each for each in answer]

    def _receive(self, answer: Tensor) -> None:
        """Fill a tensor with what the last stage's first rank says."""
        link, room = self._links[-self._width], bytes_of(answer)
        if link.recv_bytes() != ANSWER:
            raise _SaidError(f"rank {self.size - self._width} raised {link.recv_bytes().decode()}")
        if room:
            link.recv_bytes_into(room)
        else:
            link.recv_bytes()

    def step(self, step: Step, kind: Kind) -> bytes:
        """What `doing` tells of a step, of which `kind` is wanted."""
        return orders.of_step(_plain(step), kind)

    def moving(self, kind: Kind, pairs: Sequence[tuple[int, int]]) -> bytes:
        """What `doing` tells of blocks that are copied."""
        return orders.of_pairs(kind, pairs)

    def check(self) -> None:
        """Raises RankError where a rank has ended."""
        if self._broken is None and self._gone:
            self._broken = self._reason(_LAST_WORDS_S) or "a rank has ended"
        if self._broken is not None:
            self.close()
            raise self._error()

    @property
    def fault(self) -> RankError | None:
        """Which rank has ended, for whoever asks while another thread computes."""
        if self._broken is None and not self._gone:
            return None
        ended = (
            f"rank {rank} {how}"
            for rank, other in enumerate(self._others, 1)
            if self._broken is None and (how := other.ended()) is not None
        )
        return self._error(next(ended, "a rank has ended"))

    def give_up(self) -> None:
        """Have a step raise that waits for a rank which does nothing, from another thread."""
        say_gone(self._meetings)
        for other in self._others:
            other.kill()

    def close(self) -> None:
        """End the other ranks."""
        self._broken = self._broken or "the model was closed"
        say_gone(self._meetings)
        self._end()

    @property
    def _gone(self) -> bool:
        return bool(self._meetings[0][0])

    def _tell(self, order: bytes) -> None:
        for rank, link in enumerate(self._links, 1):
            try:
                link.send_bytes(order)
            except OSError as error:
                raise RankError(self._reason(_PATIENCE_S) or f"rank {rank} has hung up") from error

    def _error(self, why: str = "") -> RankError:
        return RankError(
            f"A model that {self.size} processes compute together can't go on: "
            f"{self._broken or why}. Load it again."
        )

    def _reason(self, within_s: float = 0.0) -> str | None:
        """Which rank has ended, and how; None: none that is known of within that time. Those that
        only miss another come last.
        """
        until = time.monotonic() + within_s
        while True:
            self._listen()
            causes = [said for said in self._said if GONE not in said]
            ended = [
                f"rank {rank} {how}"
                for rank, other in enumerate(self._others, 1)
                if (how := other.ended()) is not None and not other.gave_up
            ]
            if causes or ended:
                return [*causes, *ended][0]
            if time.monotonic() >= until:
                return next(iter(self._said), None)
            time.sleep(0.01)

    def _listen(self) -> None:
        """Hear what ranks have said of their ends; answers that nobody waits for are dropped."""
        for rank, link in enumerate(self._links, 1):
            with suppress(EOFError, OSError):
                while link.poll():
                    told, said = link.recv_bytes(), link.recv_bytes()
                    if told == ERROR:
                        self._said.append(f"rank {rank} raised {said.decode()}")


class _SaidError(Exception):
    """What another rank has raised."""


class Here:
    """A rank that this process has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def ended(self) -> str | None:
        """How it has ended; None: it hasn't."""
        code = self.process.poll()
        if code is None:
            return None
        said = ": stderr has its last words" if code > 0 else ""
        return f"(process {self.process.pid}) has ended with {code}{said}"

    @property
    def gave_up(self) -> bool:
        """Whether it ended by raising something, which it has told."""
        return self.process.returncode == FAILED

    def wait(self) -> None:
        """Until it has ended."""
        self.process.wait()

    def hang_up(self) -> None:
        """Closing its connection does."""

    def kill(self) -> None:
        """End it now."""
        self.process.kill()

    def end(self) -> None:
        """See that it ends, having been hung up on."""
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _end(
    links: list[Connection],
    files: list[socket.socket | Connection],
    others: list[Here | There],
    masks: dict[int, set[int]],
) -> None:
    """Hang up, which a rank takes as its end, and see that it is."""
    for thread, cpus in masks.items():
        with suppress(OSError):  # it has ended
            os.sched_setaffinity(thread, cpus)
    for other in others:
        other.hang_up()
    for link in links:
        link.close()
    for file in files:
        file.close()
    for other in others:
        other.end()


def _watch(other: Here | There, meetings: Sequence[Tensor]) -> None:
    """Say at the meetings that a rank has gone, so that nobody waits there for it."""
    other.wait()
    say_gone(meetings)


def say_gone(meetings: Sequence[Tensor]) -> None:
    """Say at meetings that somebody won't come, so that nobody waits there for ever."""
    for meeting in meetings:
        meeting[:4].view(torch.int32)[0] = 1


def _plain(step: Step) -> Step:
    """A step that can be told."""
    if step.adapters is not None:
        raise PenstockError("Steps with adapters aren't built for several ranks.")
    return step


def map_meeting(file: int) -> Tensor:
    """The memory that all ranks map."""
    size = os.fstat(file).st_size
    return torch.frombuffer(mmap.mmap(file, size, flags=mmap.MAP_SHARED), dtype=torch.uint8)


def pin_threads(cpus: Sequence[int]) -> dict[int, set[int]]:
    """Have all threads of this process run on these CPUs; returns where each ran before."""
    before: dict[int, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            thread = int(task.name)
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, cpus)
    return before


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
