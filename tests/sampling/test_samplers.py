"""What each further sampler keeps, by transformers' warpers or a closed form; its draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_cases import chosen, normal_logits, sequence
from scipy import stats
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from penstock import LLM, SamplingParams
from penstock.sampling import Sampler
from penstock.sampling.chain import Chain
from penstock.sampling.philox import uniforms
from penstock.sampling.pipeline import _draw_chain, _make_group
from penstock.sampling.samplers.mirostat import _count, _slope
from penstock.sampling.samplers.rows import entropies, totals

NONE = torch.zeros(1, 1, dtype=torch.int64)


def kept(logits, **params):
    """Probabilities [V] that one row is drawn from."""
    rows = [sequence(len(logits), **params)]
    group = _make_group(_draw_chain, rows, [0], len(logits), torch.device("cpu"))
    weights, _ = group.draw.weights(logits[None].clone(), group.cuts)
    return weights[0].double().numpy()


def warped(logits, *warpers):
    scores = logits[None]
    for warper in warpers:
        scores = warper(NONE, scores)
    return scores[0].double().softmax(-1).numpy()


SIZES = [7, 128, 700]


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("p", [0.05, 0.2, 0.5, 0.9, 0.99])
def test_typical(vocab_size, p):
    logits = normal_logits(1, vocab_size, seed=vocab_size)[0]
    want = warped(logits, TypicalLogitsWarper(mass=p))
    assert np.allclose(kept(logits, typical_p=p), want, atol=1e-6)


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("value", [1e-5, 3e-4, 0.01, 0.3, 0.99])
def test_cutoffs(vocab_size, value):
    logits = normal_logits(1, vocab_size, seed=vocab_size)[0]
    want = warped(logits, EpsilonLogitsWarper(epsilon=value))
    assert np.allclose(kept(logits, epsilon_cutoff=value), want, atol=1e-6)
    want = warped(logits, EtaLogitsWarper(epsilon=value))
    assert np.allclose(kept(logits, eta_cutoff=value), want, atol=1e-6)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_order_of_stages(vocab_size):
    logits = normal_logits(1, vocab_size, seed=vocab_size)[0]
    want = warped(
        logits / 1.5,
        TypicalLogitsWarper(mass=0.9),
        TopPLogitsWarper(0.8),
        EpsilonLogitsWarper(0.01),
    )
    got = kept(logits, temperature=1.5, typical_p=0.9, top_p=0.8, epsilon_cutoff=0.01)
    assert np.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("n", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_top_n_sigma(n, temperature):
    logits = normal_logits(1, 700)[0]
    logits[::3] = -torch.inf  # impossible ones count for nothing
    some = logits[logits != -torch.inf].double()
    floor = some.max() - n * some.std(correction=0)
    want = (logits.double() / temperature).masked_fill(logits < floor, -torch.inf).softmax(-1)
    got = kept(logits, top_n_sigma=n, temperature=temperature)
    assert np.allclose(got, want.numpy(), atol=1e-6)


def test_dynamic_temperature():
    logits = normal_logits(1, 700)[0]
    p = logits.double().softmax(-1)
    share = float(-(p * p.log()).sum()) / math.log(700)
    want = (logits.double() / (0.2 + 1.6 * share**2)).softmax(-1).numpy()
    got = kept(logits, temperature=1.0, dynatemp_range=0.8, dynatemp_exponent=2.0)
    assert np.allclose(got, want, atol=1e-6)
    flat = kept(torch.zeros(64), temperature=0.5, dynatemp_range=5.0)
    assert np.allclose(flat, 1 / 64)
    sure = torch.zeros(64)
    sure[5] = 500.0
    assert kept(sure, temperature=0.5, dynatemp_range=5.0)[5] == 1.0


def test_exclude_top_choices():
    p = np.array([0.3, 0.25, 0.2, 0.15, 0.05, 0.05])
    logits = torch.tensor(np.log(p), dtype=torch.float32)
    left = np.array([0, 0, 0, 0.15, 0.05, 0.05]) / 0.25
    always = {"xtc_probability": 1.0}
    assert np.allclose(kept(logits, **always, xtc_threshold=0.1), left, atol=1e-6)
    assert np.allclose(kept(logits, **always, xtc_threshold=0.28), p, atol=1e-6)  # only one
    assert np.allclose(kept(logits, **always, xtc_threshold=0.4), p, atol=1e-6)  # none
    low = kept(logits, **always, xtc_threshold=0.0)
    assert np.allclose(low, [0, 0, 0, 0, 0.5, 0.5], atol=1e-6)
    # what can't be chosen isn't the least likely choice, whatever the threshold
    some = kept(logits, **always, xtc_threshold=0.0, top_k=4)
    assert np.allclose(some, [0, 0, 0, 1, 0, 0], atol=1e-6)
    some = kept(logits, **always, xtc_threshold=1e-60, top_k=2)
    assert np.allclose(some, [0, 1, 0, 0, 0, 0], atol=1e-6)


def test_exclude_top_choices_happens_as_often_as_it_should():
    p = np.array([0.6, 0.3, 0.1])
    rows = [sequence(3, seed=i, xtc_probability=0.25, xtc_threshold=0.2) for i in range(20_000)]
    logits = torch.tensor(np.log(p), dtype=torch.float32).repeat(len(rows), 1)
    counts = np.bincount(chosen(logits, rows), minlength=3)
    want = 0.75 * p + 0.25 * np.array([0, 0.75, 0.25])
    assert stats.chisquare(counts, want * len(rows)).pvalue > 0.01


def test_the_coin_of_xtc_is_not_the_number_of_the_draw():
    seeds = np.arange(1000, dtype=np.uint64)
    zeros = np.zeros_like(seeds)
    one, other = (uniforms(seeds, zeros, zeros.astype(np.int64), use) for use in (0, 1))
    assert abs(stats.pearsonr(one, other).statistic) < 0.1


SAMPLERS = [
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.05},
    {"top_n_sigma": 2.5},
    {"dynatemp_range": 0.5, "temperature": 0.9},
    {"mirostat": 2, "mirostat_tau": 2.0},
    {"mirostat": 1, "mirostat_tau": 1.5},
    {"typical_p": 0.9, "top_k": 12, "min_p": 0.01, "top_p": 0.9},
]


@pytest.mark.parametrize("count", [20_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("params", SAMPLERS, ids=str)
def test_draws_follow_what_is_kept(params, count):
    """Against the distribution that the closed forms above have been checked for."""
    logits = normal_logits(1, 20, seed=3, spread=1.5)[0]
    want = kept(logits, **params)
    counts = np.zeros(20)
    for first in range(0, count, 10_000):
        rows = [sequence(20, seed=first + i, **params) for i in range(10_000)]
        counts += np.bincount(chosen(logits.repeat(len(rows), 1), rows), minlength=20)
    assert counts[want == 0].sum() == 0
    some = want > 0
    expected = want[some] / want[some].sum() * counts.sum()
    assert some.sum() > 1 and stats.chisquare(counts[some], expected).pvalue > 0.01


@pytest.mark.parametrize("vocab_size", [20, 500, 5000])
def test_batch_mates_change_nothing(vocab_size):
    mixed = [*SAMPLERS, {"xtc_probability": 0.5}, {"temperature": 0.0}, {"top_p": 0.5}, {}]
    rows = [sequence(vocab_size, seed=7, **p) for p in mixed * 6]
    logits = normal_logits(len(rows), vocab_size, spread=3.0)
    together = chosen(logits, rows)
    alone = [chosen(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    assert together == [token for [token] in alone]


def test_sums_of_rows_do_not_depend_on_how_many_there_are():
    x = normal_logits(16, 3001)
    assert torch.equal(totals(x), torch.cat([totals(row[None]) for row in x]))
    log_p = x.log_softmax(-1)
    want = torch.distributions.Categorical(logits=x.double()).entropy()[:, None]
    assert torch.allclose(entropies(log_p).double(), want, atol=1e-5)


# ── mirostat ─────────────────────────────────────────────────────────────────────────────────────


def test_mirostat_2_drops_what_surprises_more_than_the_bound():
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    logits = torch.tensor(np.log(p), dtype=torch.float32)
    got = kept(logits, mirostat=2, mirostat_tau=1.25)  # the bound begins at twice that: 2.5 bits
    assert np.allclose(got, [2 / 3, 1 / 3, 0, 0, 0], atol=1e-6)
    assert np.allclose(kept(logits, mirostat=2, mirostat_tau=0.001), [1, 0, 0, 0, 0])


def test_zipf_s_exponent_and_the_count_it_gives():
    ranks = np.arange(1, 101)
    assert _slope(-1.3 * np.log(ranks)) == pytest.approx(1.3)
    # the surprise of rank k among N under Zipf's law, put back into k
    for slope in (0.7, 1.0, 1.4):
        total = sum(np.arange(1, 5001) ** -slope)
        for k in (3, 40, 900):
            surprise = math.log2(k**slope * total)
            assert _count(slope, surprise, 5000) == pytest.approx(k, rel=0.6)
    assert _count(1.0, -5.0, 100) == 1
    assert _count(1.2, 500.0, 100) == 100
    assert _count(0.0, 3.0, 100) == 100
    assert _count(math.inf, 3.0, 100) == 1


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [3.5, 5.0])
def test_mirostat_holds_its_target(version, tau):
    """On text of a Zipf-like source; the surprise is measured by the source itself."""
    random = np.random.default_rng(5)
    row = sequence(2000, mirostat=version, mirostat_tau=tau, seed=3)
    sampler, surprises = Sampler(2000), []
    for _ in range(600):
        logits = -random.uniform(0.9, 1.3) * np.log(np.arange(1, 2001))
        logits = torch.from_numpy(logits[random.permutation(2000)]).float()[None]
        [token] = sampler(logits.clone(), [row]).token_ids
        surprises.append(-float(logits[0].double().log_softmax(-1)[token]) / math.log(2))
        row.append(token)
    assert np.mean(surprises[100:]) == pytest.approx(tau, rel=0.1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [1.5, 2.0])  # drawn freely, the model's text has 2.6 bits
def test_mirostat_holds_its_target_on_the_embedded_model(version, tau):
    llm = LLM("stories", num_gpu_blocks_override=200)
    params = SamplingParams(
        mirostat=version, mirostat_tau=tau, max_tokens=500, ignore_eos=True, logprobs=0, seed=3
    )
    [sample] = llm.generate(["Once upon a time"], params)[0].outputs
    surprises = [
        -known[token].logprob / math.log(2)
        for token, known in zip(sample.token_ids, sample.logprobs, strict=True)
    ]
    assert len(surprises) == 500
    assert np.mean(surprises) == pytest.approx(tau, rel=0.1)


def test_a_step_that_is_taken_again_moves_nothing():
    row = sequence(50, mirostat=2, seed=1)
    logits = normal_logits(1, 50)
    before = row.mu
    assert chosen(logits, [row]) == chosen(logits, [row])
    assert row.mu == before
    row.append(chosen(logits, [row])[0])
    assert row.mu != before


# ── broken rows ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("params", SAMPLERS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_row_fails_alone(params, bad):
    rows = [sequence(300, seed=i, **params) for i in range(3)]
    logits = normal_logits(3, 300)
    want = chosen(logits, rows)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 17] = bad
    found = Sampler(300)(logits, rows)
    assert list(found.errors) == [1]
    assert [found.token_ids[i] for i in (0, 2)] == [want[0], want[2]]


def test_one_possible_token():
    logits = torch.full((1, 40), -torch.inf)
    logits[0, 9] = 1.0
    for params in [*SAMPLERS, {"xtc_probability": 1.0}]:
        assert chosen(logits, [sequence(40, **params)]) == [9]


def test_a_chain_is_of_its_rows():
    rows = [sequence(10, typical_p=0.5), sequence(10, eta_cutoff=0.1)]
    chain = Chain(rows, torch.device("cpu"))
    assert chain._typical.rows == [0] and chain._eta.rows == [1] and chain._xtc.rows == []
