"""DRY against its definition, searched place by place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_cases import chosen, sequence

from penstock.errors import InvalidSamplingError
from penstock.sampling import SamplingParams
from penstock.sampling.samplers.dry import DryParams, DryState


def by_definition(params, text, breakers):
    """{token: what it loses}"""
    text = text if params.last_n < 0 else text[max(len(text) - params.last_n, 0) :]
    longest = {}
    for end in range(len(text) - 1):  # a repetition that ends there goes on with text[end + 1]
        n = 0
        while (
            n <= end and text[end - n] == text[len(text) - 1 - n] and text[end - n] not in breakers
        ):
            n += 1
        if n >= params.allowed_length:
            longest[text[end + 1]] = max(n, longest.get(text[end + 1], 0))
    return {
        t: params.multiplier * params.base ** (n - params.allowed_length)
        for t, n in longest.items()
    }


def penalties(state):
    ids, values = state.penalties()
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


TEXTS = st.lists(st.integers(0, 3), max_size=40)


@given(
    TEXTS,
    TEXTS,
    st.integers(1, 4),
    st.sampled_from([-1, 0, 1, 2, 7, 30]),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_penalties(prompt, output, allowed, last_n, breakers):
    params = DryParams(0.8, 1.75, allowed, last_n)
    state = DryState(params, prompt, breakers)
    assert penalties(state) == pytest.approx(by_definition(params, prompt, breakers))
    for i, token in enumerate(output):
        state.append(token)
        want = by_definition(params, prompt + output[: i + 1], breakers)
        assert penalties(state) == pytest.approx(want)


def test_more_tokens_than_its_first_arrays_hold():
    random = np.random.default_rng(0)
    text = random.integers(0, 5, 2000).tolist()
    params = DryParams(1.0, 1.1, 2)
    state = DryState(params, text[:500], {4})
    for token in text[500:]:
        state.append(token)
    assert penalties(state) == pytest.approx(by_definition(params, text, {4}))


def test_a_long_repetition_stays_finite():
    state = DryState(DryParams(2.0, 3.0, 2), [7] * 3000, set())
    assert np.isfinite(state.penalties()[1]).all()
    assert state.penalties()[1][0] > 1e29
    flat = DryState(DryParams(2.0, 1.0, 2), [7] * 3000, set())
    assert penalties(flat) == {7: 2.0}


def test_it_is_taken_off_the_logits():
    text = [1, 2, 3, 4, 1, 2, 3]
    logits = torch.zeros(2, 8)
    logits[:, 4] = 3.0  # what would go on with the repetition
    logits[:, 5] = 2.9
    dry = {"dry_multiplier": 1.0, "dry_base": 2.0}
    rows = [sequence(8, prompt=text, temperature=0.0, **more) for more in (dry, {})]
    assert chosen(logits, rows) == [5, 4]
    repeated = sequence(8, prompt=text[:4], output=text[4:], temperature=0.0, dry_multiplier=1.0)
    assert chosen(logits[:1], [repeated]) == [5]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"dry_multiplier": -1}, r"dry_multiplier is -1; it must be in \[0, 1000\]"),
        ({"dry_base": 0.5}, r"dry_base is 0.5; it must be in \[1, 1000\]"),
        ({"dry_allowed_length": 0}, r"dry_allowed_length is 0; it must be in \[1, 1073741824\]"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n is -2"),
        ({"dry_sequence_breakers": [1]}, r"dry_sequence_breakers\[0\] is 1, an int"),
    ],
)
def test_what_is_refused(params, words):
    with pytest.raises(InvalidSamplingError, match=words):
        SamplingParams(**params)
