"""`penstock serve` as one instance of a fleet: on CPUs of its own, and never without its fleet."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def run() -> None:
    """`PARENT CPUS serve …`: the fleet's process, and CPUs with commas or `all`."""
    parent, cpus, *rest = sys.argv[1:]
    if cpus != "all":
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before it could be watched
        return
    sys.argv[1:] = rest
    from penstock.cli.main import run as penstock  # after the CPUs: torch counts them once

    penstock()
