"""A process that shall not outlive the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def die_with(parent: int) -> bool:
    """Have this process told to end when its parent does; False where that has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    return os.getppid() == parent
