import itertools
import random
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import chosen, normal_logits, sequence

from penstock.errors import ConfigError
from penstock.ops.draw import draw_from_vocab
from penstock.sampling import NO_TOKEN, Sampled, Sampler

KINDS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0, "logprobs": 5},
    {},
    {"temperature": 0.7, "logprobs": 20},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.7},
    {"top_k": 40},
    {"top_k": 40, "top_p": 0.8, "presence_penalty": 0.5},
    {"top_k": 300, "temperature": 1.2},
    {"top_k": 300, "top_p": 0.97},
    {"min_p": 0.05, "logprobs": 0},
    {"min_p": 0.0001, "temperature": 3.0},
    {"allowed_token_ids": [5, 9, 77], "temperature": 1.5},
    {"logit_bias": {7: 5.0, 8: -100.0}, "top_p": 0.95},
    {"min_tokens": 3, "stop_token_ids": [11], "repetition_penalty": 0.7},
    {"min_p": 0.1, "top_k": 20, "top_p": 0.7, "temperature": 2.0},
]


def run(order, logits, vocab_size, steps=4):
    """Tokens and log-probabilities of KINDS in the given order; by kind."""
    rows = {k: sequence(vocab_size, prompt=[k, 3], seed=k, **KINDS[k]) for k in order}
    sampler = Sampler(vocab_size)
    got = {k: [] for k in order}
    for step in range(steps):
        batch = torch.stack([logits[step][k] for k in order])
        sampled = sampler(batch, list(rows.values()))
        assert sampled.errors == {}
        for k, token, logprobs in zip(order, sampled.token_ids, sampled.logprobs, strict=True):
            got[k].append((token, logprobs))
            rows[k].append(token)
    return got


@pytest.mark.parametrize("vocab_size", [97, 1031])
@pytest.mark.parametrize("tie", [False, True])
def test_a_row_is_the_same_alone_in_a_batch_and_in_any_order(vocab_size, tie):
    logits = [normal_logits(len(KINDS), vocab_size, seed) for seed in range(4)]
    if tie:  # as bfloat16 weights give
        logits = [one.to(torch.bfloat16).to(torch.float32) for one in logits]
    everyone = list(range(len(KINDS)))
    together = run(everyone, logits, vocab_size)
    for k in everyone:
        assert run([k], logits, vocab_size)[k] == together[k], KINDS[k]
    shuffler = random.Random(0)
    for size in (2, 5, 17, 17):
        order = shuffler.sample(everyone, size)
        got = run(order, logits, vocab_size)
        assert got == {k: together[k] for k in order}


@pytest.mark.parametrize("vocab_size", [32_000, 32_001, 50_257])
@pytest.mark.parametrize("spread", [0.3, 3.0])  # beyond and within the narrow path
def test_a_row_is_the_same_at_real_vocabulary_sizes(vocab_size, spread):
    logits = normal_logits(len(KINDS), vocab_size, spread=spread)
    rows = [sequence(vocab_size, seed=k, **kind) for k, kind in enumerate(KINDS)]
    together = chosen(logits, rows)
    assert [chosen(logits[k : k + 1], [row])[0] for k, row in enumerate(rows)] == together


@pytest.mark.parametrize("vocab_size", [5, 127, 128, 1000, 32_000, 32_001])
def test_the_sums_of_one_row_are_the_same_bits_in_any_batch(vocab_size):
    """What the draw is built on, compared as numbers rather than through the tokens they pick."""
    logits = normal_logits(33, vocab_size)
    temperature = torch.full((33, 1), 0.7)

    def sums(x, t):
        p = ((x - x.amax(-1, keepdim=True)) / t).softmax(-1)
        whole = vocab_size // 128
        ordered = p.topk(min(128, vocab_size)).values
        return (
            p,
            p[:, : whole * 128].unflatten(-1, (whole, 128)).sum(-1),
            p[:, whole * 128 :].sum(-1),
            ordered.cumsum(-1),
            ordered.softmax(-1),
            p.cumsum(-1, dtype=torch.float64),
            x.log_softmax(-1),
        )

    together = sums(logits, temperature)
    for i in (0, 1, 17, 32):
        for a, b in zip(sums(logits[i : i + 1], temperature[:1]), together, strict=True):
            assert torch.equal(a[0], b[i])
    u = torch.rand(33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = draw_from_vocab(together[0], u)
    alone = [draw_from_vocab(together[0][i : i + 1], u[i : i + 1]).item() for i in range(33)]
    assert drawn.tolist() == alone


def test_threads_do_not_matter():
    logits = [normal_logits(len(KINDS), 32_000, seed) for seed in range(2)]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run(list(range(len(KINDS))), logits, 32_000, steps=2))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def test_seeds_and_samples_differ_and_repeat():
    logits = torch.zeros(1, 1000)

    def tokens(seed, sample):
        row = sequence(1000, seed=seed, sample_index=sample)
        out = []
        for _ in range(8):
            out.append(chosen(logits, [row])[0])
            row.append(out[-1])
        return tuple(out)

    at = list(itertools.product([0, 1, 2**63], [0, 1, 2]))
    assert len({tokens(*one) for one in at}) == len(at)
    assert [tokens(*one) for one in at] == [tokens(*one) for one in at]
    assert len(set(tokens(0, 0))) == 8


def test_greedy_is_argmax_and_the_lowest_id_wins_ties():
    logits = normal_logits(32, 5000)
    assert chosen(logits, [sequence(5000, temperature=0)] * 32) == logits.argmax(-1).tolist()
    tied = torch.zeros(3, 5000)
    tied[1, [4000, 70, 4999]] = 2.0
    tied[2] = -torch.inf
    tied[2, [4999, 4998]] = -5.0
    rows = [sequence(5000, temperature=0) for _ in range(3)]
    assert chosen(tied, rows) == [0, 70, 4998]
    assert chosen(tied, [*rows[:2], sequence(5000)])[:2] == [0, 70]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_broken_row_harms_no_other(bad, everywhere):
    vocab_size = 1031
    logits = normal_logits(len(KINDS), vocab_size)
    rows = [sequence(vocab_size, seed=k, **kind) for k, kind in enumerate(KINDS)]
    want = Sampler(vocab_size)(logits.clone(), rows)
    assert want.errors == {}
    for k in range(len(KINDS)):
        if KINDS[k].get("allowed_token_ids") and not everywhere:
            continue  # what is wrong with a forbidden token doesn't matter
        broken = logits.clone()
        broken[k, slice(None) if everywhere or bad == -torch.inf else 500] = bad
        got = Sampler(vocab_size)(broken, rows)
        assert list(got.errors) == [k], KINDS[k]
        assert got.token_ids[k] == NO_TOKEN
        assert got.logprobs[k] is None
        says = "Every token is masked" if bad == -torch.inf else "The model's logits hold a"
        assert says in got.errors[k]
        for i in range(len(KINDS)):
            if i != k:
                assert got.token_ids[i] == want.token_ids[i]
                assert got.logprobs[i] == want.logprobs[i]


def test_a_whole_batch_may_be_broken():
    rows = [sequence(300, **kind) for kind in KINDS]
    sampled = Sampler(300)(torch.full((len(rows), 300), torch.nan), rows)
    assert sorted(sampled.errors) == list(range(len(rows)))
    assert sampled.token_ids == [NO_TOKEN] * len(rows)


def test_masks_that_leave_nothing_are_reported():
    row = sequence(20, allowed_token_ids=[2], min_tokens=1)  # 2 is the end token
    sampled = Sampler(20)(torch.zeros(1, 20), [row])
    assert "min_tokens" in sampled.errors[0]


def test_an_empty_batch_has_no_tokens():
    assert Sampler(9)(torch.empty(0, 9), []) == Sampled([], [], {})


@pytest.mark.parametrize("shape", [(2, 9), (1, 8), (9,)])
def test_logits_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(ConfigError, match="vocabulary of 9"):
        Sampler(9)(torch.zeros(shape), [sequence(9)])


def test_changed_batches_are_planned_anew():
    sampler = Sampler(300)
    logits = normal_logits(3, 300)
    a, b, c = (sequence(300, seed=i, **KINDS[k]) for i, k in enumerate((0, 5, 7)))
    want = [sampler(logits[i : i + 1].clone(), [r]).token_ids[0] for i, r in enumerate((a, b, c))]
    assert sampler(logits.clone(), [a, b, c]).token_ids == want
    plan = sampler._plan
    assert sampler(logits.clone(), (a, b, c)).token_ids == want
    assert sampler._plan is plan
    order = [2, 0, 1]
    assert sampler(logits[order], [c, a, b]).token_ids == [want[i] for i in order]
    assert sampler._plan is not plan
    assert sampler(logits[:2].clone(), [a, b]).token_ids == want[:2]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_drafts_of_a_sequence_are_sampled_by_one_plan(kind):
    """Guesses' states are new objects in every step; each row is drawn as it is alone."""
    sampler, state, other = Sampler(300), sequence(300, seed=4, **kind), sequence(300, seed=5)
    plans = []
    for step in range(4):
        guesses = [state]
        for token in (7, 7, 9)[: 2 + step % 2]:
            guesses.append(guesses[-1].fork(token + step))
        rows = [*guesses, other]
        logits = normal_logits(len(rows), 300, seed=step)
        want = [Sampler(300)(logits[i : i + 1].clone(), [row]) for i, row in enumerate(rows)]
        found = sampler(logits.clone(), rows)
        assert found.token_ids == [one.token_ids[0] for one in want]
        assert found.logprobs == [one.logprobs[0] for one in want]
        plans.append(sampler._plan)
        state.append(found.token_ids[0])
    assert plans[0] is not plans[1]
    if "allowed_token_ids" not in kind:  # whose flags are kept for the last batch only
        assert plans[0] is plans[2] and plans[1] is plans[3]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_was_sampled_is_let_go(kind):
    sampler, rows = Sampler(300), [sequence(300, seed=i, **kind) for i in range(40)]
    states = [weakref.ref(row) for row in rows]
    while rows:
        sampler(torch.zeros(1, 300), [rows.pop()])
    assert not any(state() for state in states)
    assert len(sampler._plans) < 25


def test_flags_for_whole_vocabularies_are_kept_once():
    sampler = Sampler(9)
    for seed in range(10):
        sampler(torch.zeros(1, 9), [sequence(9, seed=seed, allowed_token_ids=[3, 4])])
        sampler(torch.zeros(1, 9), [sequence(9, seed=seed)])
    assert len(sampler._plans) == 2


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_other_dtypes_and_strides_are_taken(kind):
    logits = normal_logits(2, 300).to(torch.bfloat16)
    rows = [sequence(300, seed=i, **kind) for i in range(2)]
    want = Sampler(300)(logits.float(), rows)
    assert Sampler(300)(logits.clone(), rows) == want
    strided = torch.zeros(300, 2)
    strided.copy_(logits.T)
    assert Sampler(300)(strided.T, rows) == want
    with torch.inference_mode():
        inside = logits.float()
    assert Sampler(300)(inside, rows) == want
    learning = logits.float().requires_grad_()
    assert Sampler(300)(learning * 1.0, rows) == want


@settings(max_examples=30, deadline=None)
@given(
    kinds=st.lists(st.sampled_from(range(len(KINDS))), min_size=1, max_size=12),
    seed=st.integers(0, 2**64 - 1),
    broken=st.integers(0, 40),
)
def test_any_mixture_equals_its_rows_alone(kinds, seed, broken):
    vocab_size = 261
    logits = normal_logits(len(kinds), vocab_size, seed % 1000)
    if broken < len(kinds):
        logits[broken] = torch.nan
    rows = [
        sequence(vocab_size, seed=seed, sample_index=i, **KINDS[k]) for i, k in enumerate(kinds)
    ]
    together = Sampler(vocab_size)(logits.clone(), rows)
    for i, row in enumerate(rows):
        alone = Sampler(vocab_size)(logits[i : i + 1].clone(), [row])
        assert alone.token_ids == [together.token_ids[i]]
        assert alone.logprobs == [together.logprobs[i]]
        assert alone.errors.get(0) == together.errors.get(i)
    assert np.all(np.array(together.token_ids) < vocab_size)
