from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import sequence

from penstock.errors import InvalidSamplingError


@given(
    prompt=st.lists(st.integers(0, 199), max_size=150),
    output=st.lists(st.integers(0, 199), max_size=300),
)
def test_counts_are_those_of_a_recount(prompt, output):
    state = sequence(200, prompt=prompt, output=output, repetition_penalty=1.2)
    counts = dict(zip(state.seen_tokens.tolist(), state.seen_counts.tolist(), strict=True))
    assert counts == dict.fromkeys(prompt, 0) | dict(Counter(output))
    assert len(state.seen_tokens) == len(counts)
    assert state.num_generated == len(output)


def test_the_prompt_counts_for_repetition_only():
    assert sequence(9, prompt=[1, 2], output=[3], presence_penalty=1.0).seen_tokens.tolist() == [3]
    seen = sequence(9, prompt=[2, 1, 2], output=[3, 3], repetition_penalty=2.0)
    assert seen.seen_tokens.tolist() == [1, 2, 3]
    assert seen.seen_counts.tolist() == [0, 0, 2]


def test_without_penalties_only_the_length_is_kept():
    state = sequence(9, prompt=[1, 2], output=[3, 4])
    assert state.num_generated == 2
    assert len(state.seen_tokens) == 0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"logit_bias": {10: 1.0}},
        {"allowed_token_ids": [1, 10]},
        {"stop_token_ids": [10]},
        {"prompt": [10], "repetition_penalty": 2.0},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(kwargs):
    with pytest.raises(InvalidSamplingError, match="holds token id 10, but the vocabulary ends at"):
        sequence(10, **kwargs)


def test_an_end_token_that_the_model_lacks_is_no_error():
    state = sequence(10, eos=frozenset({3, 50}), stop_token_ids=[3, 4], min_tokens=1)
    assert state.end_ids.tolist() == [3, 4]


def test_the_minimum_is_over_once_reached():
    state = sequence(10, min_tokens=2)
    below = []
    for _ in range(3):
        below.append((state.is_below_minimum(), state.is_below_minimum(1)))
        state.append(5)
    assert below == [(True, True), (True, False), (False, False)]
