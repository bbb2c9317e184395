"""`penstock serve` as one instance of a fleet: on CPUs of its own, and never without its fleet."""

from __future__ import annotations

import os
import sys

from penstock.parent import die_with


def run() -> None:
    """`PARENT CPUS serve …`: the fleet's process, and CPUs with commas or `all`."""
    parent, cpus, *rest = sys.argv[1:]
    if cpus != "all":
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    if not die_with(int(parent)):
        return
    sys.argv[1:] = rest
    from penstock.cli.main import run as penstock  # after the CPUs: torch counts them once

    penstock()
