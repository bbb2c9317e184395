"""What a checkup holds a server against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Milliseconds that 99% are to keep: by default what a chat wants."""

    ttft_ms: float = 500.0
    itl_ms: float = 50.0


FEW = 5
"""Requests, fewer of which say nothing."""

FULL = 0.95
"""A share of the cache that is as good as all of it."""
