"""Several processes that compute each step together."""

from penstock.parallel.ranks import Gather, Part, Ranks, Share

__all__ = ["Gather", "Part", "Ranks", "Share"]
