"""Beam search beside transformers', beside all sequences there are, and beside its paper."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from beam_cases import VOCABULARY, Checkpoint
from sampling_cases import normal_logits
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from penstock.errors import ConfigError, InvalidSamplingError, RequestError
from penstock.sampling import (
    BeamSearch,
    BeamSearchParams,
    Continuation,
    Hypothesis,
    log_probabilities,
)

FAMILIES = {"llama": 2, "qwen3": 2, "gemma2": 2, "gpt2": 1, "phi3": 3}  # and how many end tokens
WIDTHS, PENALTIES, STOPPING = (2, 4, 8), (0.0, 1.0, 2.0, -0.5), (True, False, "never")
MAX_TOKENS = 9


@pytest.fixture(scope="module")
def checkpoint() -> Callable[[str], Checkpoint]:
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in made:
            made[name] = Checkpoint(name, FAMILIES[name])
        return made[name]

    return get


def compare(ours: list[Hypothesis], tokens: list[list[int]], scores: list[float]) -> None:
    assert [one.tokens for one in ours] == tokens
    assert [one.score for one in ours] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_and_scores_are_those_of_transformers(family, checkpoint):
    case = checkpoint(family)
    reasons: Counter[str | None] = Counter()
    differ: set[object] = set()
    for width, penalty in itertools.product(WIDTHS, PENALTIES):
        found = {}
        for stopping in STOPPING:
            params = BeamSearchParams(
                width, MAX_TOKENS, length_penalty=penalty, early_stopping=stopping
            )
            tokens, scores = case.theirs(params, case.ends)
            for i, prompt in enumerate(case.prompts):
                part = slice(i * width, (i + 1) * width)
                ours = case.ours(prompt, params, case.ends)
                compare(ours, tokens[part], scores[part])
                for one in ours:
                    assert (one.tokens[-1] in case.ends) == (one.finish_reason == "stop")
                    reasons[one.finish_reason] += 1
            found[stopping] = tokens
        differ |= {other for other in (True, "never") if found[other] != found[False]}
    # Or half of it would go unseen.
    assert set(reasons) == {"stop", "length"}
    assert differ == ({True, "never"} if family in {"llama", "qwen3"} else {True})


def test_fewer_are_returned_than_are_searched(checkpoint):
    case = checkpoint("llama")
    params = BeamSearchParams(4, MAX_TOKENS, n=2)
    tokens, scores = case.theirs(params, case.ends)
    for i, prompt in enumerate(case.prompts):
        part = slice(i * 2, (i + 1) * 2)
        compare(case.ours(prompt, params, case.ends), tokens[part], scores[part])


def test_end_tokens_that_are_ignored(checkpoint):
    case = checkpoint("gpt2")
    params = BeamSearchParams(3, MAX_TOKENS, ignore_eos=True)
    tokens, scores = case.theirs(params, [])
    assert any(case.ends[0] in one for one in tokens)
    for i, prompt in enumerate(case.prompts):
        ours = case.ours(prompt, params, case.ends)
        compare(ours, tokens[3 * i : 3 * i + 3], scores[3 * i : 3 * i + 3])
        assert {one.finish_reason for one in ours} == {"length"}


def test_end_tokens_of_the_request_are_like_the_models(checkpoint):
    case = checkpoint("qwen3")
    eos, asked = case.ends
    params = BeamSearchParams(4, MAX_TOKENS, stop_token_ids=[asked])
    tokens, scores = case.theirs(params, case.ends)
    reasons = set()
    for i, prompt in enumerate(case.prompts):
        ours = case.ours(prompt, params, [eos])
        compare(ours, tokens[4 * i : 4 * i + 4], scores[4 * i : 4 * i + 4])
        for one in ours:
            expected = {eos: ("stop", None), asked: ("stop", asked)}
            reason = expected.get(one.tokens[-1], ("length", None))
            assert (one.finish_reason, one.stop_reason) == reason
            reasons.add(reason)
    assert ("stop", asked) in reasons


def test_masked_tokens_are_left_out_without_making_others_likelier(checkpoint):
    """As transformers' processors do: they see log-probabilities."""

    def allowed(length: int) -> Tensor:
        return torch.arange(VOCABULARY) % 3 != length % 3

    class Ban(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.masked_fill(~allowed(input_ids.shape[1] - longest), -math.inf)

    def mask(sequence: list[int], row: Tensor) -> None:
        row[~allowed(len(sequence) - len(prompt))] = -math.inf

    case = checkpoint("phi3")
    longest = max(map(len, case.prompts))
    params = BeamSearchParams(4, MAX_TOKENS)
    tokens, scores = case.theirs(params, case.ends, logits_processor=[Ban()])
    for i, prompt in enumerate(case.prompts):
        ours = case.ours(prompt, params, case.ends, mask)
        compare(ours, tokens[4 * i : 4 * i + 4], scores[4 * i : 4 * i + 4])


def test_texts_that_hold_a_stop_string_end(checkpoint):
    class Stop(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
            return input_ids[:, -1] == end

    case = checkpoint("gpt2")
    (end,) = case.ends
    params = BeamSearchParams(4, MAX_TOKENS, stop="end")
    tokens, scores = case.theirs(params, [], stopping_criteria=[Stop()])
    stopped = 0
    for i, prompt in enumerate(case.prompts):
        ours = case.ours(prompt, params, [], stop=lambda token: "end" if token == end else None)
        for one, row, score in zip(ours, tokens[4 * i :], scores[4 * i :], strict=False):
            assert row[: len(one.tokens)] == one.tokens
            assert one.score == pytest.approx(score, abs=1e-4)
            assert (one.stop_reason == "end") == (one.tokens[-1] == end)
            stopped += one.stop_reason == "end"
    assert stopped


# A model of four tokens whose next one depends on the last one and on the position.
SMALL, END = 4, 3


def chain(seed: int, size: int = SMALL, steps: int = 8) -> Tensor:
    """Log-probabilities [position, last, next]; where nothing came before, `last` is `size`."""
    return normal_logits(steps * (size + 1), size, seed).log_softmax(-1).view(steps, -1, size)


def total(table: Tensor, tokens: Sequence[int]) -> float:
    steps = itertools.pairwise([table.shape[2], *tokens])
    return sum(float(table[position, a, b]) for position, (a, b) in enumerate(steps))


def run(
    search: BeamSearch, table: Tensor, steps: int | None = None
) -> tuple[list[Hypothesis], list[list[int]]]:
    """The search over a chain, and the beams that are alive where it stands."""
    alive: list[list[int]] = [[]]
    while not search.is_done and search.num_generated != steps:
        last = [tokens[-1] if tokens else -1 for tokens in alive]
        found = search.advance(table[search.num_generated, last])
        alive = [[*alive[one.parent], one.token] for one in found]
    return search.best(), alive


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -0.5])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_as_wide_as_the_tree_finds_every_sequence_in_order(penalty, seed):
    table, length = chain(seed), 4
    everything = []
    for count in range(1, length + 1):
        for tokens in itertools.product(range(SMALL), repeat=count):
            if END in tokens[:-1] or (count < length and tokens[-1] != END):
                continue
            everything.append((total(table, tokens) / count**penalty, list(tokens)))
    everything.sort(key=lambda one: -one[0])
    params = BeamSearchParams(SMALL**length, length, length_penalty=penalty)
    found, _ = run(BeamSearch(params, [END], SMALL), table)
    assert [one.tokens for one in found] == [tokens for _, tokens in everything]
    assert [one.score for one in found] == pytest.approx([score for score, _ in everything])


def test_one_beam_is_greedy():
    table = chain(1)
    (found,), _ = run(BeamSearch(BeamSearchParams(1, 6), [], SMALL), table)
    tokens = [SMALL]
    for position in range(6):
        tokens.append(int(table[position, tokens[-1]].argmax()))
    assert found.tokens == tokens[1:]
    assert found.score == found.logprob / 6


def test_equal_scores_are_ordered_by_beam_then_by_token():
    search = BeamSearch(BeamSearchParams(3, 2), [], 8)
    even = torch.full((1, 8), -1.0)
    assert search.advance(even) == [Continuation(0, token) for token in range(3)]
    search.advance(even.expand(3, 8))
    assert [one.tokens for one in search.best()] == [[0, 0], [0, 1], [0, 2]]


def test_while_it_goes_on_the_live_beams_come_after_what_has_ended():
    table = torch.tensor([[0.5, 0.2, 0.3]]).log().expand(4, 3)
    search = BeamSearch(BeamSearchParams(2, 5, early_stopping="never"), [2], 3)
    search.advance(table[:1])
    found = search.best()
    assert [(one.tokens, one.finish_reason) for one in found] == [([2], "stop"), ([0], None)]
    assert [one.score for one in found] == pytest.approx([math.log(0.3), math.log(0.5)])
    assert not search.is_done


def test_a_beam_whose_tokens_are_all_masked_dies_alone():
    search = BeamSearch(BeamSearchParams(3, 4), [], 5)
    first = torch.full((1, 5), -math.inf)
    first[0, [1, 4]] = torch.tensor([-1.0, -2.0])
    assert search.advance(first) == [Continuation(0, 1), Continuation(0, 4)]
    assert search.num_rows == 2
    second = torch.full((2, 5), -math.inf)
    second[1] = -1.0
    assert search.advance(second) == [Continuation(1, token) for token in range(3)]


def test_a_grammar_that_only_lets_it_end_ends_it():
    search = BeamSearch(BeamSearchParams(4, 9), [2], 5)
    only_end = torch.full((1, 5), -math.inf)
    only_end[0, 2] = -0.25
    assert search.advance(only_end) == []
    assert search.is_done
    (found,) = search.best()
    assert (found.tokens, found.score, found.finish_reason) == ([2], -0.25, "stop")
    assert search.num_rows == 0
    with pytest.raises(ConfigError, match="done"):
        search.advance(only_end)


def test_the_context_may_leave_fewer_tokens():
    search = BeamSearch(BeamSearchParams(2, 100, early_stopping="never"), [], SMALL, max_tokens=3)
    found, _ = run(search, chain(0))
    assert [len(one.tokens) for one in found] == [3, 3]
    assert BeamSearch(BeamSearchParams(2, 5), [], SMALL, max_tokens=100).max_tokens == 5
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        BeamSearch(BeamSearchParams(2, 5), [], SMALL, max_tokens=0)


@pytest.mark.parametrize(
    ("value", "says"),
    [(math.nan, "hold a NaN"), (math.inf, r"hold a \+infinity"), (-math.inf, "Every token is mas")],
)
def test_what_no_token_can_be_chosen_from(value, says):
    search = BeamSearch(BeamSearchParams(2, 5), [], 6)
    logprobs = torch.full((1, 6), -1.0)
    if value == -math.inf:
        logprobs[:] = value
    else:
        logprobs[0, 3] = value
    with pytest.raises(RequestError, match=says):
        search.advance(logprobs)


def test_a_wrong_call_is_refused():
    search = BeamSearch(BeamSearchParams(2, 5, stop="."), [], 6)
    with pytest.raises(ConfigError, match=r"shape \[2, 6\] for 1 beams and a vocabulary of 6"):
        search.advance(torch.zeros(2, 6))
    with pytest.raises(ConfigError, match="1 stop strings"):
        search.advance(torch.zeros(1, 6))
    with pytest.raises(InvalidSamplingError, match="token id 6, but the vocabulary ends at 5"):
        BeamSearch(BeamSearchParams(2, 5, stop_token_ids=[6]), [], 6)


def test_an_end_token_that_the_vocabulary_lacks_is_no_error():
    found, _ = run(BeamSearch(BeamSearchParams(2, 3), [SMALL + 90], SMALL), chain(0))
    assert {one.finish_reason for one in found} == {"length"}


def test_log_probabilities_are_listed_with_every_token():
    table, width = chain(2), 3
    params = BeamSearchParams(width, 4, logprobs=2)
    found, _ = run(BeamSearch(params, [END], SMALL), table)
    for one in found:
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.tokens)
        entries = zip([SMALL, *one.tokens], one.tokens, one.logprobs, strict=False)
        for position, (last, token, entry) in enumerate(entries):
            best = table[position, last].topk(2)
            assert next(iter(entry)) == token
            assert entry[token].logprob == float(table[position, last, token])
            assert {i: entry[i].logprob for i in best.indices.tolist()} == dict(
                zip(best.indices.tolist(), best.values.tolist(), strict=True)
            )
        assert sum(e[t].logprob for t, e in zip(one.tokens, one.logprobs, strict=True)) == (
            pytest.approx(one.logprob)
        )
    plain, _ = run(BeamSearch(BeamSearchParams(width, 4), [END], SMALL), table)
    assert [one.tokens for one in plain] == [one.tokens for one in found]
    assert plain[0].logprobs is None


def test_a_temperature_divides_logits_and_none_leaves_them():
    logits = normal_logits(2, 9)
    for temperature, divided in ((0.0, logits), (1.0, logits), (2.5, logits / 2.5)):
        params = BeamSearchParams(2, 3, temperature=temperature)
        assert torch.equal(log_probabilities(logits, params), divided.log_softmax(-1))


def test_a_rows_log_probabilities_are_its_own():
    """To the bit, whatever rows are beside it: so is the search, then."""
    params, logits = BeamSearchParams(2, 3), normal_logits(5, 4099)
    together = log_probabilities(logits, params)
    assert torch.equal(together[3:4], log_probabilities(logits[3:4], params))
    assert not together.is_inference()  # it can be masked in place


# Diverse groups, against the paper's algorithm written out over the whole vocabulary.


def diverse_by_the_paper(
    table: Tensor, groups: int, width: int, strength: float, steps: int
) -> list[list[tuple[float, list[int]]]]:
    """Every group's beams after all steps, without end tokens: (augmented score, tokens)."""
    beams: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(groups)]
    for position in range(steps):
        chosen: list[int] = []  # by the groups before this one, at this step
        for group in range(groups):
            wider = []
            for score, tokens in beams[group]:
                for token in range(table.shape[2]):
                    value = float(table[position, tokens[-1] if tokens else -1, token])
                    same = sum(other == token for other in chosen)
                    wider.append((score + value - strength * same, [*tokens, token]))
            wider.sort(key=lambda one: -one[0])
            beams[group] = wider[:width]
            chosen += [tokens[-1] for _, tokens in beams[group]]
    return beams


@pytest.mark.parametrize(("groups", "width"), [(2, 1), (3, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("strength", [0.3, 1.5])
def test_groups_are_those_of_the_paper(groups, width, strength):
    table = chain(groups, 30)
    expected = diverse_by_the_paper(table, groups, width, strength, steps=6)
    params = BeamSearchParams(
        groups * width, 6, length_penalty=0.0, num_beam_groups=groups, diversity_penalty=strength
    )
    found, _ = run(BeamSearch(params, [], 30), table)
    for group in range(groups):
        mine = [one for one in found if one.group == group]
        assert [one.tokens for one in mine] == [tokens for _, tokens in expected[group]]
        assert [one.score for one in mine] == pytest.approx([s for s, _ in expected[group]])
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    for one in found:
        assert one.logprob == pytest.approx(total(table, one.tokens))


def test_the_first_group_is_a_search_of_its_own(checkpoint):
    case = checkpoint("qwen3")
    alone = BeamSearchParams(3, MAX_TOKENS)
    params = BeamSearchParams(9, MAX_TOKENS, num_beam_groups=3, diversity_penalty=0.7)
    tokens, scores = case.theirs(alone, case.ends)
    others = 0
    for i, prompt in enumerate(case.prompts):
        ours = case.ours(prompt, params, case.ends)
        assert len(ours) == 9
        first = [one for one in ours if one.group == 0]
        compare(first, tokens[3 * i : 3 * i + 3], scores[3 * i : 3 * i + 3])
        others += sum(one.tokens not in tokens for one in ours)
    assert others  # the other groups found something else


def test_groups_that_must_differ_do():
    table = chain(0, 30)
    params = BeamSearchParams(5, 8, num_beam_groups=5, diversity_penalty=1000.0)
    found, _ = run(BeamSearch(params, [], 30), table)
    for column in zip(*(one.tokens for one in found), strict=True):
        assert len(set(column)) == 5
