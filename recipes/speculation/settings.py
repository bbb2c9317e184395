"""What a run is made of, and whether its numbers can be: read before torch is loaded."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.errors import ConfigError

DEFAULT_LENGTH = 512  # tokens of a row


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of, beside its method's own options."""

    model: str
    data: Path | None
    texts: Path  # where the default text is made from
    output: Path
    work: Path
    length: int | None = None  # tokens of a row; None: 512, or as many as the target has positions
    self_distill: int = 0  # texts that the target writes first
    text_share: float = 0.3  # of the rows, where the target has written some
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.9)
    evaluate: int = 64  # held-out beginnings that acceptance is measured on
    sampled_at: float = 0.8
    depth: int = 6  # guesses of a draft, as acceptance is measured
    device: str | None = None  # None: a GPU if there is one

    def __post_init__(self) -> None:
        if (self.length or 16) < 16 or self.depth < 1 or self.evaluate < 1:
            raise ConfigError(
                f"--length must be at least 16 tokens, --depth and --evaluate at least 1, not "
                f"{self.length}, {self.depth} and {self.evaluate}."
            )
        if self.self_distill < 0:
            raise ConfigError(f"--self-distill must be 0 or more texts, not {self.self_distill}.")
        if not 0 <= self.text_share < 1:
            raise ConfigError(
                f"--text-share must be at least 0 and below 1, not {self.text_share}."
            )
        for name, values in (
            ("--temperatures", self.temperatures),
            ("--sampled-at", [self.sampled_at]),
        ):
            if not all(math.isfinite(value) and value >= 0 for value in values):
                raise ConfigError(f"{name} must be 0 or more, not {', '.join(map(str, values))}.")

    def for_positions(self, positions: int) -> "Settings":
        """With the tokens of a row that a target of so many positions is given."""
        if self.length is None:
            return replace(self, length=min(DEFAULT_LENGTH, positions))
        if self.length > positions:
            raise ConfigError(
                f"--length {self.length} is more than the {positions} positions that {self.model} "
                f"was made for: give at most {positions}."
            )
        return self
