"""How much is asked of an engine, over what it can do at once: what an autoscaler goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_FULL = 0.9  # of the cache in use, from which who waits waits for blocks, not for a step's tokens


def capacity_of(stats: Mapping[str, Any], max_num_seqs: int) -> int:
    """Sequences that fit into a step; where some wait for blocks, no more than those that run.

    stats: `AsyncLLM.stats()`.
    """
    full = stats["used_blocks"] >= _FULL * stats["blocks"]
    running: int = stats["running"]
    if stats["waiting"] and running and full:
        return min(running, max_num_seqs)
    return max_num_seqs


def demand_of(stats: Mapping[str, Any], max_num_seqs: int) -> float:
    """Sequences that run or wait over those that can run: 0 is idle, 1 full, 2 needs another."""
    asked: int = stats["running"] + stats["waiting"] + stats["swapped"]
    return asked / capacity_of(stats, max_num_seqs)
