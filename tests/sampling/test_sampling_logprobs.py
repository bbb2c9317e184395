import pytest
import torch
from sampling_cases import normal_logits, sequence

from penstock.errors import ConfigError
from penstock.sampling import Logprob, Sampler, prompt_logprobs


def in_order(values):
    """Ids by value, then id: Python's sort is stable."""
    return sorted(range(len(values)), key=lambda i: -values[i])


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 65, 1000])
@pytest.mark.parametrize("k", [0, 1, 5, 20, -1])
@pytest.mark.parametrize("step", [0.0, 0.5, 4.0])  # coarser logits have more ties
def test_prompt_logprobs_are_log_softmax_in_order(vocab_size, k, step):
    logits = normal_logits(7, vocab_size)
    if step:
        logits = (logits / step).round() * step
    next_ids = torch.randint(vocab_size, (7,), generator=torch.Generator().manual_seed(1))
    want = torch.log_softmax(logits, -1).tolist()
    got = prompt_logprobs(logits, next_ids, k)
    assert len(got) == 7
    for row, token, entry in zip(want, next_ids.tolist(), got, strict=True):
        order = in_order(row)
        top = order if k < 0 else order[:k]
        assert list(entry) == [token] + [i for i in top if i != token]
        assert {i: one.rank for i, one in entry.items()} == {i: order.index(i) + 1 for i in entry}
        assert {i: one.logprob for i, one in entry.items()} == {i: row[i] for i in entry}
        assert all(one.decoded_token is None for one in entry.values())


def test_prompt_logprobs_of_nothing():
    assert prompt_logprobs(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 3) == []


def test_prompt_logprobs_of_the_wrong_shape():
    with pytest.raises(ConfigError, match=r"\[3, 9\] and \[2\]"):
        prompt_logprobs(torch.zeros(3, 9), torch.zeros(2, dtype=torch.int64), 1)


def test_prompt_logprobs_in_bfloat16_are_summed_in_float32():
    logits = normal_logits(4, 500).to(torch.bfloat16)
    ids = torch.arange(4)
    assert prompt_logprobs(logits, ids, 5) == prompt_logprobs(logits.float(), ids, 5)


def test_a_rows_answer_does_not_depend_on_the_others():
    logits = (normal_logits(9, 3000) / 0.5).round() * 0.5  # many ties at the cut
    ids = torch.arange(9) * 100
    together = prompt_logprobs(logits, ids, 20)
    for i in range(9):
        assert prompt_logprobs(logits[i : i + 1], ids[i : i + 1], 20) == [together[i]]


def test_the_sampler_reports_the_models_own_distribution():
    logits = normal_logits(4, 300)
    want = torch.log_softmax(logits, -1)
    rows = [
        sequence(300, temperature=0, logprobs=2, logit_bias={7: 100.0}),  # forces token 7
        sequence(300, temperature=0),
        sequence(300, temperature=0.1, top_k=1, logprobs=0, output=[1], repetition_penalty=3.0),
        sequence(300, seed=5, temperature=1.5, logprobs=-1),
    ]
    sampled = Sampler(300)(logits.clone(), rows)
    biased, none, alone, everything = sampled.logprobs
    assert sampled.token_ids[0] == 7
    top = want[0].topk(2).indices.tolist()
    assert list(biased) == [7, *top]
    assert biased[7] == Logprob(want[0, 7].item(), int((want[0] > want[0, 7]).sum()) + 1)
    assert [biased[i].rank for i in top] == [1, 2]
    assert none is None
    assert list(alone) == [sampled.token_ids[2]]
    assert len(everything) == 300
    assert next(iter(everything)) == sampled.token_ids[3]
    assert {i: one.logprob for i, one in everything.items()} == dict(enumerate(want[3].tolist()))


def test_the_rank_of_a_token_tied_with_the_last_one_fetched():
    found = prompt_logprobs(torch.zeros(4, 200), torch.tensor([0, 63, 64, 199]), 0)
    assert [next(iter(entry.values())).rank for entry in found] == [1, 64, 65, 200]


def test_tokens_that_cannot_come_are_not_listed() -> None:
    """Those without a logit, as a reduced vocabulary leaves them."""
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    (entry,) = prompt_logprobs(logits, torch.tensor([0]), -1)
    assert list(entry) == [0, 2]
    assert [one.rank for one in entry.values()] == [2, 1]
    (entry,) = prompt_logprobs(logits, torch.tensor([0]), 3)
    assert list(entry) == [0, 2]
