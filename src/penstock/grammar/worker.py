"""Where structures are compiled: threads of a large stack, a few at once, each with a deadline.

The library's compiler goes into a schema by recursion, and an overflow of the stack would end the
process: 1,000 schemas that each name the next are more than the 8 MB of an ordinary thread hold.
It can't be stopped either. So a task that is late runs on with the lowest priority, and another one
may begin in its place, until too many are late.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

STACK_BYTES: Final = 1 << 30
"""Reserved, of which only what is used takes memory. 10,000 definitions that each hold the next are
compiled or refused in it; 8 MB overflow between 300 and 1,000."""

_LOWEST_PRIORITY: Final = 19

_starting = threading.Lock()  # the size is the whole process's: the next thread's that starts


@dataclass(slots=True, eq=False)
class _Task:
    """What a thread of its own is at."""

    run: Callable[[], None]
    late_at: float
    native_id: int | None = None  # once it runs
    slowed: bool = False


class Worker:
    """Runs a few tasks at once, each in a thread of its own that needn't be waited for."""

    def __init__(self, at_once: int, late_s: float, most_late: int = 4) -> None:
        """late_s: after which a task doesn't count any more, so that the next may begin;
        most_late: of those at most.
        """
        self._at_once, self._late_s, self._most_late = at_once, late_s, most_late
        self._tasks: list[_Task] = []
        self._changed = threading.Condition()

    def run(self, run: Callable[[], None], wait_s: float) -> bool:
        """Begin it once there is room; False where there is none within `wait_s`."""
        until = time.monotonic() + wait_s
        with self._changed:
            while not self._has_room():
                now = time.monotonic()
                if now >= until:
                    return False
                late = [task.late_at for task in self._tasks if task.late_at > now]
                self._changed.wait(min([until, *late]) - now)
            task = _Task(run, time.monotonic() + self._late_s)
            self._tasks.append(task)
        # A daemon: what takes for ever must not keep the process from ending.
        thread = threading.Thread(
            target=self._run, args=(task,), name="penstock-grammar", daemon=True
        )
        try:
            with _starting:
                before = threading.stack_size(STACK_BYTES)
                try:
                    thread.start()
                finally:
                    threading.stack_size(before)
        except BaseException:
            self._end(task)
            raise
        return True

    @property
    def num_late(self) -> int:
        """Tasks that run on after their time."""
        with self._changed:
            return len(self._late())

    def _has_room(self) -> bool:
        late = self._late()
        return len(self._tasks) - len(late) < self._at_once and len(late) < self._most_late

    def _late(self) -> list[_Task]:
        """Those whose time is over, from now on with the lowest priority."""
        now = time.monotonic()
        late = [task for task in self._tasks if task.late_at <= now]
        for task in late:
            if task.native_id is not None and not task.slowed:
                task.slowed = True
                _slow_down(task.native_id)
        return late

    def _run(self, task: _Task) -> None:
        task.native_id = threading.get_native_id()
        try:
            task.run()
        finally:
            self._end(task)

    def _end(self, task: _Task) -> None:
        with self._changed:
            self._tasks.remove(task)
            self._changed.notify_all()


def _slow_down(native_id: int) -> None:
    """Where threads have priorities of their own: what is late leaves the cores to the engine."""
    if sys.platform == "linux":
        with suppress(ProcessLookupError, PermissionError):  # it has ended; or isn't let
            os.setpriority(os.PRIO_PROCESS, native_id, _LOWEST_PRIORITY)
