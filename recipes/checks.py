"""What is looked at before anything heavy is imported."""

import math

from penstock.errors import ConfigError


def check_run(steps: int | None, minutes: float | None, learning_rate: float) -> None:
    """Refuse what would divide by zero, never end, or not learn."""
    for name, value in (("--minutes", minutes), ("--learning-rate", learning_rate)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be a number above 0, not {value:g}.")
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps must be at least 1, not {steps}.")
    if steps is not None and minutes is not None:
        raise ConfigError(
            f"A run is as long as --steps or --minutes says, not both: {steps} and {minutes:g}."
        )
