"""Where structures are compiled: threads of a large stack, a few at once, each with a deadline.

The library's compiler goes into a schema by recursion, and an overflow of the stack would end the
process: 1,000 schemas that each name the next are more than the 8 MB of an ordinary thread hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

STACK_BYTES: Final = 1 << 30
"""Reserved, of which only what is used takes memory. 10,000 definitions that each hold the next are
compiled or refused in it; 8 MB overflow between 300 and 1,000."""

_starting = threading.Lock()  # the size is the whole process's: the next thread's that starts


class Worker:
    """Runs a few tasks at once, each in a thread of its own that needn't be waited for."""

    def __init__(self, at_once: int) -> None:
        self._free = threading.Semaphore(at_once)

    def run(self, task: Callable[[], None], wait_s: float) -> bool:
        """Begin it once there is room; False where there is none within `wait_s`."""
        if not self._free.acquire(timeout=wait_s):
            return False
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
            self._free.release()
            raise
        return True

    def _run(self, task: Callable[[], None]) -> None:
        try:
            task()
        finally:
            self._free.release()
