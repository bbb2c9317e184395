import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import EOS, chosen, normal_logits, sequence
from transformers import RepetitionPenaltyLogitsProcessor

from penstock.sampling import Sampler
from penstock.sampling.penalties import gather_edits

V = 50


def edited(logits, rows):
    out = logits.clone()
    edits = gather_edits(rows, logits.shape[1], logits.device)
    if edits is not None:
        edits.apply_(out)
    return out


def naive(row, state, prompt, output):
    """The formulas, one token at a time, in float32 as the engine computes."""
    p = state.params
    f = torch.tensor
    out = []
    for token, logit in enumerate(row):
        x = logit
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            x = f(-torch.inf)
        if len(output) < p.min_tokens and token in {EOS, *p.stop_token_ids}:
            x = f(-torch.inf)
        x = x + f((p.logit_bias or {}).get(token, 0.0))
        if token in prompt or token in output:
            factor = f(p.repetition_penalty)
            x = x / factor if x > 0 else x * factor
        x = x - f(p.frequency_penalty) * f(float(output.count(token)))
        x = x - f(p.presence_penalty) * f(float(token in output))
        out.append(x)
    return torch.stack(out)


ids = st.lists(st.integers(0, V - 1), max_size=8)


@st.composite
def requests(draw):
    return (
        {
            "temperature": 0,
            "repetition_penalty": draw(st.sampled_from([1.0, 0.5, 1.3, 10.0])),
            "presence_penalty": draw(st.sampled_from([0.0, -2.0, 0.7])),
            "frequency_penalty": draw(st.sampled_from([0.0, -0.3, 2.0])),
            "logit_bias": draw(st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100))),
            "allowed_token_ids": draw(st.none() | ids.filter(bool)),
            "stop_token_ids": draw(ids),
            "min_tokens": draw(st.integers(0, 6)),
        },
        draw(ids),
        draw(ids),
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(requests(), min_size=1, max_size=4))
def test_every_edit_is_its_formula(batch):
    logits = normal_logits(len(batch), V)
    rows = [sequence(V, prompt=p, output=o, **kwargs) for kwargs, p, o in batch]
    got = edited(logits, rows)
    for i, (_, prompt, output) in enumerate(batch):
        assert torch.equal(got[i], naive(logits[i], rows[i], prompt, output))


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_is_that_of_transformers(penalty):
    logits = normal_logits(3, V)
    tokens = [[1, 2, 3, 2], [4, 4, 5, 9], [V - 1, 0, 7, 8]]
    rows = [sequence(V, prompt=t[:2], output=t[2:], repetition_penalty=penalty) for t in tokens]
    want = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor(tokens), logits.clone())
    assert torch.equal(edited(logits, rows), want)


def test_penalties_follow_the_output_from_step_to_step():
    logits = normal_logits(2, V)
    rows = [
        sequence(V, temperature=0, prompt=[1, 2], repetition_penalty=1.5, frequency_penalty=0.5),
        sequence(V, temperature=0, presence_penalty=1.0),
    ]
    sampler = Sampler(V)
    outputs = [[], []]
    for _ in range(30):
        want = [
            naive(logits[i], rows[i], [[1, 2], []][i], outputs[i]).argmax().item() for i in range(2)
        ]
        assert sampler(logits.clone(), rows).token_ids == want
        for row, token, output in zip(rows, want, outputs, strict=True):
            row.append(token)
            output.append(token)
    assert len(set(outputs[0])) > 5  # the penalties did move it


def test_a_batch_that_asks_for_nothing_is_left_alone():
    rows = [sequence(V), sequence(V, temperature=0, min_tokens=3, eos=frozenset())]
    assert gather_edits(rows, V, torch.device("cpu")) is None


def test_end_tokens_wait_for_the_minimum():
    logits = torch.zeros(1, V)
    logits[0, EOS], logits[0, 9], logits[0, 4] = 30.0, 20.0, 10.0
    row = sequence(V, temperature=0, min_tokens=2, stop_token_ids=[9], ignore_eos=False)
    sampler = Sampler(V)
    tokens = []
    for _ in range(4):
        tokens += sampler(logits.clone(), [row]).token_ids
        row.append(tokens[-1])
    assert tokens == [4, 4, EOS, EOS]


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_p": 0.9}, {"top_k": 40}])
def test_only_allowed_ids_are_chosen(params):
    logits = normal_logits(200, V)
    rows = [sequence(V, allowed_token_ids=[3, 17, 40], seed=i, **params) for i in range(200)]
    assert set(chosen(logits, rows)) == {3, 17, 40}


def test_bias_forbids_and_forces():
    logits = normal_logits(100, V)
    assert set(
        chosen(logits, [sequence(V, logit_bias={5: 100.0}, seed=i) for i in range(100)])
    ) == {5}
    best = logits.argmax(-1).tolist()
    rows = [sequence(V, logit_bias={best[i]: -100.0}, seed=i) for i in range(100)]
    assert all(a != b for a, b in zip(chosen(logits, rows), best, strict=True))
