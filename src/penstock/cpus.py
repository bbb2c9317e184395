"""Which CPUs there are for instances, one by one and by memory node."""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.errors import ConfigError

_NODES = Path("/sys/devices/system/node")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def usable_cpus() -> tuple[int, ...]:
    """Those that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def numa_cpus() -> tuple[tuple[int, ...], ...]:
    """Of them, those of each memory node that has any."""
    usable = set(usable_cpus())
    lists = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda x: int(x.parent.name[4:]))
    nodes = [tuple(c for c in parse_cpus(x.read_text().strip()) if c in usable) for x in lists]
    return tuple(node for node in nodes if node) or (usable_cpus(),)


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-3,8` as Linux writes it (cpuset(7), "List format"). Raises ConfigError."""
    found: set[int] = set()
    for part in text.split(",") if text else []:
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"cpus has {text[:80]!r}; write it like 0-3,8.")
        first = int(match[1])
        found.update(range(first, int(match[2] or first) + 1))
    return tuple(sorted(found))
