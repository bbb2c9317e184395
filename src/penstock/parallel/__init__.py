"""Several processes that compute each step together, or one after another."""

from penstock.parallel.member import member
from penstock.parallel.ranks import Gather, Part, Ranks, Share
from penstock.parallel.ring import Ring
from penstock.parallel.stages import Stage

__all__ = ["Gather", "Part", "Ranks", "Ring", "Share", "Stage", "member"]
