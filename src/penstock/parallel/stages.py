"""Who computes which layers, where processes go one after another (pipeline parallelism).

A step goes through all of them: rows of the residual stream from one to the next, as they lie in
memory. Long steps go in parts, so that one stage computes a part while the next computes the one
before; a row's bits depend on no other row, so neither do they on the parts.
Source: Huang et al. 2018, arXiv:1811.06965 (GPipe).
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers of one process, or of several that share their matrices."""

    number: int
    count: int
    before: int = -1  # the socket that rows come by; −1: none, in the first
    after: int = -1  # the one that they leave by; −1: none, in the last
    is_away: bool = False  # whether stages are on different machines

    @property
    def is_first(self) -> bool:
        """Whether it begins with tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with logits."""
        return self.number == self.count - 1

    def layers(self, total: int) -> range:
        """Its own, of so many. Raises UnsupportedModelError where some stage would have none."""
        if total < self.count:
            raise UnsupportedModelError(
                f"{total} layers are too few for {self.count} stages. Lower pipeline_parallel_size."
            )
        return range(self.number * total // self.count, (self.number + 1) * total // self.count)
