"""How much is asked of an engine, over what it can do at once: what an autoscaler goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def capacity_of(stats: Mapping[str, Any], max_num_seqs: int) -> int:
    """Sequences that fit into a step; where some wait, the cache holds no more than those that run.

    stats: `AsyncLLM.stats()`.
    """
    full = stats["waiting"] and stats["running"]
    return min(stats["running"], max_num_seqs) if full else max_num_seqs


def demand_of(stats: Mapping[str, Any], max_num_seqs: int) -> float:
    """Sequences that run or wait over those that can run: 0 is idle, 1 full, 2 needs another."""
    asked: int = stats["running"] + stats["waiting"] + stats["swapped"]
    return asked / capacity_of(stats, max_num_seqs)
