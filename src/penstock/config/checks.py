"""Checks that several parts of a configuration share."""

from __future__ import annotations

import math

from penstock.errors import ConfigError, nearest


def positive(config: object, *names: str) -> None:
    """Raises ConfigError unless each is None or a positive integer."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a positive integer, not {value!r}.")


def flags(config: object, *names: str) -> None:
    """Raises ConfigError unless each is True or False."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, not {value!r}.")


def choices(config: object, *names: str) -> None:
    """Raises ConfigError unless each is True, False or None: 0 equals False, but isn't heeded."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} must be True, False or None, not {value!r}.")


def seconds(config: object, *names: str) -> None:
    """Raises ConfigError unless each is None or a positive number."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name} must be a positive number of seconds, not {value!r}.")


def one_of(config: object, name: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError for a value that isn't allowed, naming the nearest that is."""
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigError(
            f"{name}={value!r} isn't one of {', '.join(allowed)}.{nearest(str(value), allowed)}"
        )
