"""`bad_words`: token sequences that the output must not hold."""

from __future__ import annotations

import torch

from penstock import LLM
from penstock.sampling import Sampler, SamplingParams, SequenceSampling


def _row(*words: tuple[int, ...]) -> SequenceSampling:
    params = SamplingParams(temperature=0.0, bad_words=["x"])
    return SequenceSampling(params, [1], 6, 0, frozenset(), 0, words)


def test_only_what_would_complete_a_word_is_banned() -> None:
    row = _row((3,), (4, 5), (4, 1, 2))
    assert row.banned_ids.tolist() == [3]
    row.append(4)
    assert row.banned_ids.tolist() == [3, 5]
    row.append(1)
    assert row.banned_ids.tolist() == [2, 3]
    row.append(0)
    assert row.banned_ids.tolist() == [3]


def test_the_next_likely_token_is_taken_and_other_rows_keep_theirs() -> None:
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5]]).repeat(2, 1)
    free = SequenceSampling(SamplingParams(temperature=0.0), [1], 6, 0, frozenset())
    assert Sampler(6)(logits, [_row((5,)), free]).token_ids == [4, 5]


def test_a_models_text_lacks_them() -> None:
    llm = LLM()
    options = {"temperature": 0.0, "max_tokens": 60}
    free = llm.generate("Once upon a time", SamplingParams(**options))[0].outputs[0].text
    words = sorted({word for word in free.split() if word.isalpha()}, key=len)[-3:]
    bad = SamplingParams(**options, bad_words=words)
    text = llm.generate("Once upon a time", bad)[0].outputs[0].text
    assert text != free
    assert not set(words) & set(text.replace(".", " ").replace(",", " ").split())
