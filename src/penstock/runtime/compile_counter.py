"""What this process has traced, recorded or compiled: an engine that is built does none of it.

Whoever traces a model calls `note`. torch's own compiler is counted by what it says of itself.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter

_guard = threading.Lock()
_counts: Counter[str] = Counter()


def note(kind: str) -> None:
    """Count one: `program` (a decoder's operators were recorded), `export`, `aot_inductor`, …"""
    with _guard:
        _counts[kind] += 1


def counts() -> dict[str, int]:
    """How often each kind has happened in this process, kinds that haven't left out."""
    with _guard:
        found = dict(_counts)
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        graphs = dynamo.counters["stats"].get("unique_graphs", 0)
        if graphs:
            found["torch.compile"] = graphs
    return found


def total() -> int:
    """All of them together."""
    return sum(counts().values())
