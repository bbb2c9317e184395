"""A process's place among those that compute each step together, as a configuration has them."""

from __future__ import annotations

from torch import Tensor

from penstock.config.parallel import ParallelConfig
from penstock.parallel.ranks import Ranks
from penstock.parallel.ring import Ring
from penstock.parallel.stages import Stage


def member(
    asked: ParallelConfig, rank: int, meeting: Tensor, stage: Stage | None = None
) -> Ranks | Ring:
    """Rank `rank` of a stage, or of all where there is one."""
    if asked.context_parallel_size > 1:
        return Ring(rank, asked.context_parallel_size, meeting)
    whole = asked.enable_expert_parallel
    return Ranks(rank, asked.tensor_parallel_size, meeting, whole, stage)
