"""How many processes compute each step together."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import positive
from penstock.errors import ConfigError

MOST_RANKS = 64

_GUESSING = ("self", "medusa", "eagle", "eagle3")
"""Methods of guessing that read a model's own layers, of which a rank has a part."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Among how many processes (ranks) a model is divided."""

    tensor_parallel_size: int = 1  # each has so much of every matrix and of the cache

    def __post_init__(self) -> None:
        positive(self, "tensor_parallel_size")
        if self.tensor_parallel_size > MOST_RANKS:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}, and {MOST_RANKS} is the most."
            )

    def check_beside(self, asked: dict[str, bool]) -> None:
        """Raises ConfigError for the first of what was asked for that ranks don't have.

        asked: what, as its user writes it, and whether it was.
        """
        first = next((name for name, given in asked.items() if given), None)
        if self.tensor_parallel_size > 1 and first is not None:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} isn't built together with "
                f"{first}. Leave one of them out."
            )


def guesses_by_layers(method: str | None) -> bool:
    """Whether guesses are made by the layers of the model itself, or by what they compute."""
    return method in _GUESSING
