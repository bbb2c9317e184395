"""Leave out layers, neurons and dimensions of keys and values that a text hardly needs, and win
back what that lost.
"""

from penstock.pipeline.prune.prune import PruneOptions, Pruning, prune_model

__all__ = ["PruneOptions", "Pruning", "prune_model"]
