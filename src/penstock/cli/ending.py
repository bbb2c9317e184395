"""SIGTERM for commands that write files: they end as Ctrl-C ends them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """The process is asked to end; whatever cleans up after Ctrl-C does so after this."""


_asked = threading.Event()


@contextmanager
def terminated_first() -> Iterator[None]:
    """Raise `Terminated` where a command fails after SIGTERM: C code may put an error of its own in
    the place of what interrupts it.
    """
    try:
        yield
    except Exception as error:
        if _asked.is_set():
            raise Terminated from error
        raise


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """Raise `Terminated` in the main thread at SIGTERM; a second one ends the process at once."""
    before = signal.getsignal(signal.SIGTERM)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield  # somebody else's to heed, or to ignore
        return

    def end(number: int, _: object) -> NoReturn:
        _asked.set()
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
