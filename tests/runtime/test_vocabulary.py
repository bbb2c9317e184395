"""Logits of a reduced vocabulary, spread over all ids."""

from __future__ import annotations

import torch

from penstock.runtime.vocabulary import KEPT_ROWS, ReducedVocabulary
from penstock.tokenizer.vocab_map import VocabMap

KEPT = [1, 2, 5, 11, 12, 19]


def test_logits_stand_at_their_ids() -> None:
    """In memory that is used again, for more rows and fewer, whatever a sampler wrote there."""
    vocabulary = ReducedVocabulary(VocabMap.of(20, KEPT, {}))
    random = torch.Generator().manual_seed(0)
    for rows in (1, 3, 2, 64, 5, KEPT_ROWS, KEPT_ROWS + 1, 0, 4):
        logits = torch.randn(rows, len(KEPT), generator=random)
        wide = vocabulary.widen(logits)
        assert wide.shape == (rows, 20)
        expected = torch.full((rows, 20), -torch.inf)
        for column, token in enumerate(KEPT):
            expected[:, token] = logits[:, column]
        assert wide.equal(expected)
        with torch.inference_mode():
            wide[:, KEPT[0]] = -torch.inf  # as a sampler forbids a token
            wide -= 1.0
