"""Processes that measure one machine take turns: two at once would each measure half of it."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.hardware import cache_folder

logger = logging.getLogger("penstock")

PATIENCE_S = 60.0
"""For others that measure: each takes some seconds."""
_AGAIN_S = 0.05
_NAME = "measuring.lock"


@contextmanager
def turn() -> Iterator[None]:
    """While no other process with this cache folder measures; the lock of one that dies is free.

    Without a turn after `PATIENCE_S`, which is logged; and where the folder can't be written.
    """
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        lock = os.open(cache_folder() / _NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError:
        yield
        return
    try:
        _wait(lock)
        yield
    finally:
        os.close(lock)  # which gives the lock back


def _wait(lock: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                logger.warning(
                    "Another process has been measuring this machine for %g s, so it is measured "
                    "beside it: shares of the peak may come out too high. (%s is locked.)",
                    PATIENCE_S, cache_folder() / _NAME,
                )  # fmt: skip
                return None
        except OSError as error:  # a file system without locks
            logger.info("Whether others measure this machine can't be told: %s", error)
            return None
        time.sleep(_AGAIN_S)
