"""Logits of a reduced vocabulary, spread over all ids."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.runtime.vocabulary import KEPT_ROWS, ReducedVocabulary
from penstock.sampling import Sampler, SamplingParams, SequenceSampling
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


@pytest.mark.parametrize("cut", [{"top_k": 200}, {"typical_p": 0.9}])
def test_a_request_that_is_left_no_token_harms_none_after_it(cut: dict[str, Any]) -> None:
    """It is alone in its step, so that what it draws from is the memory that is used again."""
    vocabulary = ReducedVocabulary(VocabMap.of(300, list(range(280)), {}))
    sampler = Sampler(300)
    params = SamplingParams(
        allowed_token_ids=[5], min_tokens=1, stop_token_ids=[5], max_tokens=4, **cut
    )
    state = SequenceSampling(params, [1], 300, 0, frozenset())
    sampler(vocabulary.widen(torch.randn(1, 280)), [state])
    wide = vocabulary.widen(torch.zeros(1, 280))
    assert wide[0, 280:].isneginf().all()
    assert wide[0, :280].eq(0).all()
