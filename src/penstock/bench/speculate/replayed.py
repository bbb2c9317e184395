"""Outputs that are known beforehand, said by any weights.

How often a lookup guesses right depends on what a model says, how fast that is on its shape. So a
workload may bring the outputs that somebody once wrote or a real model gave: each step computes and
chooses as always, and then says what they say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.sampling import Sampled, Sampler, SequenceSampling


class ReplayingSampler(Sampler):
    """Says what is known of a request, and what it chooses itself of others."""

    def __init__(self, vocab_size: int, gather: bool, known: Mapping[int, Sequence[int]]) -> None:
        """known: outputs by the seeds of their requests, each long enough."""
        super().__init__(vocab_size, gather)
        self._known = known

    def takes_largest(self, rows: Sequence[SequenceSampling]) -> bool:
        """Never: what is said goes through `__call__`."""
        return False

    def __call__(self, logits: Tensor, rows: Sequence[SequenceSampling]) -> Sampled:
        """As of any sampler; rows of guesses say what follows them as if they were right."""
        sampled = super().__call__(logits, rows)
        for at, row in enumerate(rows):
            said = self._known.get(row.seed, ())
            if row.num_generated < len(said) and at not in sampled.errors:
                sampled.token_ids[at] = said[row.num_generated]
        return sampled
