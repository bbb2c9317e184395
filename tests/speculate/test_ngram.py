from __future__ import annotations

import random
import weakref

import pytest

from penstock.errors import ConfigError
from penstock.speculate.ngram import TOKENS_PER_MATCHED, NgramProposer, continued
from tests.speculate.lookup_cases import Only, letters, places_of, wish


def rescanned(text: list[int], low: int, high: int, limit: int) -> list[int]:
    """The guess, by looking everywhere and copying token by token."""
    for length in range(min(high, len(text)), low - 1, -1):
        if places := places_of(text, text[len(text) - length :]):
            whole = list(text)
            for i in range(min(limit, TOKENS_PER_MATCHED * length)):
                whole.append(whole[places[0] + i])
            return whole[len(text) :]
    return []


class Key:
    """Of a sequence."""


@pytest.mark.parametrize("seed", range(25))
def test_guesses_are_those_of_a_search_of_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    alphabet, low = rng.choice([2, 3, 9, 40]), rng.randrange(1, 4)
    high, limit = low + rng.randrange(16), rng.randrange(1, 20)
    proposer = NgramProposer(low, high)
    key, tokens = Key(), letters(rng, alphabet, rng.randrange(1, 30))
    while len(tokens) < 60:
        (draft,) = proposer.propose([wish(tokens, 1, limit, key)])
        assert draft.tokens == rescanned(tokens, low, high, limit)
        draft.settle(limit)
        assert len(draft.states) == len(draft.tokens) + 1
        tokens += letters(rng, alphabet, rng.choice([1, 1, 1, 2, 4]))


def test_the_latest_of_equal_matches() -> None:
    tokens = [1, 2, 3, 1, 2, 4, 1, 2, 5, 6, 1, 2]
    assert NgramProposer(2, 4).guess(Key(), tokens, 2) == [5, 6]
    assert NgramProposer(2, 4).guess(Key(), tokens[:5], 2) == [3, 1]


def test_the_longest_match_goes_before_the_latest() -> None:
    tokens = [9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    assert NgramProposer(2, 4).guess(Key(), tokens, 1) == [3]
    assert NgramProposer(2, 2).guess(Key(), tokens, 1) == [4]


def test_periodic_text_goes_on() -> None:
    assert NgramProposer().guess(Key(), [5, 1, 2, 3] + [1, 2, 3] * 3, 14) == [1, 2, 3] * 4 + [1, 2]
    assert NgramProposer().guess(Key(), [7] * 9, 16) == [7] * 16
    assert continued([0, 4, 5], 1, 7) == [4, 5, 4, 5, 4, 5, 4]
    assert continued([0, 4, 5], 1, 1) == [4]


def test_a_short_match_makes_a_short_guess() -> None:
    tokens = [1, 2, *range(10, 40), 1, 2]
    assert NgramProposer().guess(Key(), tokens, 16) == list(range(10, 10 + 2 * TOKENS_PER_MATCHED))


def test_no_guess_where_nothing_stood_before() -> None:
    proposer = NgramProposer()
    drafts = proposer.propose([wish(list(range(n)), 1, 8, Key()) for n in (1, 2, 3, 100)])
    assert [draft.tokens for draft in drafts] == [[]] * 4


def test_many_sequences_side_by_side() -> None:
    rng = random.Random(0)
    proposer = NgramProposer()
    sequences = [(Key(), letters(rng, 5, rng.randrange(1, 40))) for _ in range(100)]
    for _ in range(5):
        drafts = proposer.propose([wish(tokens, 1, 16, key) for key, tokens in sequences])
        for (_, tokens), draft in zip(sequences, drafts, strict=True):
            assert draft.tokens == NgramProposer().guess(Key(), tokens, 16)
            tokens += draft.tokens[: rng.randrange(4)] + letters(rng, 5, 1)
        rng.shuffle(sequences)
    for key, _ in sequences:
        proposer.forget(key)
    assert proposer.nbytes == 0


def test_a_forgotten_sequence_leaves_nothing() -> None:
    proposer = NgramProposer()
    key = Key()
    proposer.guess(key, [1, 2, 3] * 10, 4)
    assert proposer.nbytes > 0
    left = weakref.ref(key)
    proposer.forget(key)
    proposer.forget(key)  # of which nothing is known
    del key
    assert left() is None
    assert proposer.nbytes == 0


def test_a_draft_ends_where_the_constraint_forbids() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 2
    constraint = Only(frozenset({1, 2, 3, 5}), left=9)
    (draft,) = NgramProposer().propose([wish(tokens, 8, 16, Key(), constraint=constraint)])
    draft.settle(16)
    assert draft.tokens == [1, 2, 3]
    assert len(draft.states) == 4
    assert constraint.left == 9
    states = [state.constraint for state in draft.states]
    assert [state.left for state in states if isinstance(state, Only)] == [9, 8, 7, 6]
    ended = Only(frozenset(range(9)), left=2)
    (draft,) = NgramProposer().propose([wish(tokens, 8, 16, Key(), constraint=ended)])
    draft.settle(16)
    assert draft.tokens == [1, 2]


def test_the_least_may_not_be_above_the_most() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_min=20 is above prompt_lookup_max=16"):
        NgramProposer(min_match=20)
