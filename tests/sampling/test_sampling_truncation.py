"""The distribution drawn from: its support against transformers, its shape by chi-square."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import normal_logits, sequence
from scipy import stats
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from penstock.ops.draw import draw_from_vocab, invert
from penstock.sampling import Sampler
from penstock.sampling.pipeline import _draw_for, _make_group
from penstock.sampling.truncation import NARROW


def draws(logits, u, **params):
    """The tokens that numbers u [N] pick from one row of logits [V], by the sampler's own path."""
    rows = [sequence(len(logits), **params)] * len(u)
    at = list(range(len(u)))
    draw = _draw_for(rows[0].params, len(logits))
    group = _make_group(draw, rows, at, len(logits), torch.device("cpu"))
    u = torch.from_numpy(np.ascontiguousarray(u))
    return draw(logits.repeat(len(u), 1), group.cuts, u)[0].tolist()


def by_transformers(logits, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """Probabilities [V] by transformers' warpers, in this pipeline's order."""
    ids, scores = torch.zeros(1, 1, dtype=torch.int64), logits[None] / temperature
    if min_p:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    return scores[0].double().softmax(-1).numpy()


CUTS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 0.7},
    {"top_p": 0.99, "temperature": 2.0},
    {"top_p": 0.001},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 127},
    {"top_k": 128},
    {"top_k": 200, "temperature": 1.5},
    {"top_k": 10_000},
    {"min_p": 0.1},
    {"min_p": 0.001, "temperature": 2.0},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 180, "top_p": 0.9},
    {"top_k": 180, "top_p": 0.99, "temperature": 3.0},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    {"top_p": 0.9, "min_p": 0.0001, "temperature": 2.5},
    {"top_k": 190, "top_p": 0.95, "min_p": 0.00001, "temperature": 2.5},
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 128, 129, 700])
def test_every_number_picks_the_token_that_transformers_distribution_puts_there(cuts, vocab_size):
    logits = normal_logits(1, vocab_size, seed=vocab_size)[0]
    probabilities = by_transformers(
        logits, **{**cuts, "top_k": min(cuts.get("top_k", 0), vocab_size)}
    )
    edges = np.concatenate(([0.0], np.cumsum(probabilities)))
    # Just inside both ends of every surviving token's stretch: a survivor too many or too few
    # with more mass than the margin would shift one of them.
    margin = 2e-6
    tokens = np.flatnonzero(probabilities > 3 * margin)
    u = np.concatenate((edges[tokens] + margin, edges[tokens + 1] - margin))
    assert draws(logits, u, **cuts) == tokens.tolist() * 2


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_drawn_tokens_follow_the_analytic_distribution(cuts):
    vocab_size, batch, steps = 300, 1000, 20
    logits = normal_logits(1, vocab_size, seed=5)[0]
    rows = [sequence(vocab_size, seed=i, **cuts) for i in range(batch)]
    sampler = Sampler(vocab_size)
    counts = np.zeros(vocab_size)
    for _ in range(steps):
        tokens = sampler(logits.repeat(batch, 1), rows).token_ids
        counts += np.bincount(tokens, minlength=vocab_size)
        for row, token in zip(rows, tokens, strict=True):
            row.append(token)
    expected = by_transformers(logits, **cuts | {"top_k": min(cuts.get("top_k", 0), vocab_size)})
    expected *= batch * steps
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    if often.sum() < 2:
        assert counts[often].sum() == counts.sum() == batch * steps
        return
    seen, want = list(counts[often]), list(expected[often])
    if expected[~often].sum() > 0:
        seen.append(counts[~often].sum())
        want.append(expected[~often].sum())
    assert stats.chisquare(seen, np.array(want) * sum(seen) / sum(want)).pvalue > 1e-3


def test_the_deep_tail_is_drawn_as_often_as_it_should():
    # 30,000 tokens of 1e-9 each, far below float32's resolution of a sum near 1.
    weights = torch.full((1, 30_001), 1e-9)
    weights[0, 0] = 1 - 30_000 * 1e-9
    at = [1, 2, 29_999, 30_000]
    total = weights.double().sum().item()
    low = (weights[0, 0].double().item() + (np.array(at) - 1) * 1e-9) / total
    u = torch.from_numpy(low + 0.5e-9)
    assert draw_from_vocab(weights.expand(len(at), -1), u).tolist() == at


def test_a_top_p_of_one_keeps_what_rounding_would_drop():
    logits = torch.tensor([0.0, -25.0])  # the second holds 1.4e-11: 1 + it is 1 in float32
    assert draws(logits, [0.5, 1 - 5e-12], top_k=2) == [0, 1]
    assert draws(logits, [0.5, 1 - 5e-12], min_p=1e-12) == [0, 1]
    assert draws(logits, [0.5, 1 - 5e-12], top_p=0.9999) == [0, 0]


def test_a_fraction_rounded_up_to_one_stays_on_a_token_with_weight():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    place, rest = invert(weights, torch.ones(1, 1, dtype=torch.float64))
    assert place.tolist() == [[3]]
    assert 0.99 < rest.item() <= 1.0


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 64, 128, 300, 5000])
def test_the_ends_of_the_range_pick_tokens_with_weight(cuts, vocab_size):
    logits = normal_logits(1, vocab_size)[0]
    logits[::3] = -torch.inf
    logits[-1] = 0.0
    tokens = draws(logits, [0.0, 5e-324, 1 - 2**-53], **cuts)
    assert all(torch.isfinite(logits[tokens]))
    if not {"top_k", "top_p", "min_p"} & set(cuts):
        assert tokens == [1 % vocab_size, 1 % vocab_size, vocab_size - 1]


@pytest.mark.parametrize("cuts", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 200}])
@pytest.mark.parametrize("vocab_size", [20, 1000])
def test_equal_logits_stay_or_go_together(cuts, vocab_size):
    logits = torch.full((vocab_size,), -60.0)  # e^-64 of the mass each
    logits[[3, 5, 7, 9, 11]] = 4.0
    if cuts.get("top_k") == 200:
        logits[:] = 4.0  # all are tied for the last place
    survivors = {i for i, x in enumerate(logits.tolist()) if x == 4.0}
    u = (np.arange(2000) + 0.5) / 2000
    assert set(draws(logits, u, **cuts)) == survivors


def test_a_nucleus_wider_than_what_is_fetched():
    logits = normal_logits(1, 4000, spread=0.1)[0]  # nearly flat
    probabilities = by_transformers(logits, top_p=0.9)
    tokens = np.flatnonzero(probabilities)
    assert len(tokens) > 20 * NARROW
    edges = np.concatenate(([0.0], np.cumsum(probabilities)))
    middle = (edges[tokens] + edges[tokens + 1]) / 2
    some = slice(None, None, 17)
    assert draws(logits, middle[some], top_p=0.9) == tokens[some].tolist()


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1.0, 1e4])
def test_no_temperature_overflows(temperature):
    logits = torch.tensor([3e38, -3e38, 1.0, -torch.inf, 2.9e38])
    for cuts in ({}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.5}):
        assert draws(logits, [0.5], temperature=temperature, **cuts) == [0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    vocab_size=st.sampled_from([3, 130, 400]),
    step=st.sampled_from([0.25, 1.0, 5.0]),
    top_k=st.integers(0, 400),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.05, 20.0),
)
def test_with_many_ties_whole_groups_survive(
    seed, vocab_size, step, top_k, top_p, min_p, temperature
):
    logits = (normal_logits(1, vocab_size, seed) / step).round() * step
    values = logits[0].double().numpy()
    cuts = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    drawn = {values[i] for i in draws(logits[0], (np.arange(500) + 0.5) / 500, **cuts)}
    floor = -np.inf
    if 0 < top_k < vocab_size:
        floor = np.sort(values)[-top_k]
    # The slack allows for rounding right at min_p's threshold.
    if min_p:
        floor = max(floor, values.max() + temperature * np.log(min_p) - 1e-5 * temperature)
    assert min(drawn) >= floor
    weights = np.exp((values - values.max()) / temperature) * (values >= floor)
    above = weights[values > min(drawn)].sum() / weights.sum()
    assert above < top_p + 1e-5
