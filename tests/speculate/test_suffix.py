from __future__ import annotations

import random
import weakref

import pytest

from penstock.errors import ConfigError
from penstock.speculate.matches import MOST_PLACES
from penstock.speculate.suffix import (
    LEAST_TOKENS,
    MIN_MATCH,
    MIN_PROBABILITY,
    PARTS,
    TOKENS_PER_MATCHED,
    SuffixProposer,
)
from tests.speculate.lookup_cases import Only, letters, places_of, wish


class Key:
    """Of a sequence."""


def counted(own: list[int], past: list[list[int]], depth: int, limit: int) -> list[int]:
    """The guess, by looking everywhere and counting in a dictionary; past: the newest last."""
    for length in range(min(depth, len(own)), MIN_MATCH - 1, -1):
        run = own[len(own) - length :]
        texts = [("own", own)] + [("past", output) for output in reversed(past)]
        branches = [(kind, text, at) for kind, text in texts for at in places_of(text, run)]
        if branches:
            break
    else:
        return []
    assert len(branches) <= MOST_PLACES  # or what is looked at would decide
    guess: list[int] = []
    probability = 1.0
    for i in range(min(limit, TOKENS_PER_MATCHED * length)):
        counts: dict[int | None, list[int]] = {}
        for number, (kind, text, at) in enumerate(branches):
            whole = text + guess if kind == "own" else text
            token = whole[at + i] if at + i < len(whole) else None
            counts.setdefault(token, []).append(number)
        token = max(counts, key=lambda one: len(counts[one]))
        probability *= len(counts[token]) / len(branches)
        if token is None or probability < MIN_PROBABILITY:
            break
        guess.append(token)
        branches = [branches[number] for number in counts[token]]
    return guess


@pytest.mark.parametrize("seed", range(40))
def test_guesses_are_those_of_counting_everything(seed: int) -> None:
    rng = random.Random(seed)
    alphabet, depth, limit = (
        rng.choice([8, 12, 30]),
        rng.choice([1, 2, 5, 24]),
        rng.randrange(1, 20),
    )
    proposer = SuffixProposer(depth)
    past: list[list[int]] = []
    for _ in range(5):
        key, prompt = Key(), rng.randrange(1, 15)
        tokens = letters(rng, alphabet, prompt + 1)
        for _ in range(20):
            guess = proposer.guess(key, tokens, prompt, limit)
            assert guess == counted(tokens, past, depth, limit)
            tokens += guess[: rng.randrange(3)] + letters(rng, alphabet, rng.choice([1, 1, 2]))
            del tokens[45:]
        proposer.forget(key)
        past.append(tokens[prompt:])


def finish(
    proposer: SuffixProposer, prompt: list[int], output: list[int], salt: str | None = None
) -> None:
    key = Key()
    proposer.propose([wish(prompt + output, len(prompt), 1, key, salt)])
    proposer.forget(key)


def test_the_most_frequent_continuation_of_past_outputs() -> None:
    proposer = SuffixProposer()
    for last in ([4, 5, 6], [4, 5, 7], [4, 5, 7], [8, 8, 8], [4, 9, 9]):
        finish(proposer, [50], [1, 2, 3, *last])
    tokens = [60, 1, 2, 3]
    assert proposer.guess(Key(), tokens, 1, 16) == [4, 5, 7]
    assert proposer.guess(Key(), tokens, 1, 2) == [4, 5]


def test_an_unlikely_guess_ends() -> None:
    proposer = SuffixProposer()
    for i in range(11):  # each followed by another token
        finish(proposer, [50], [1, 2, 3, 100 + i, 200])
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 16) == []
    proposer = SuffixProposer()
    for i in range(9):
        finish(proposer, [50], [1, 2, 3, 100 + i, 200])
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 16) == [108, 200]  # the latest; then an end


def test_the_least_share_of_a_guess() -> None:
    """Of three places that go one way and one that goes another."""
    for least, guess in ((0.75, [4, 5]), (0.76, [])):
        proposer = SuffixProposer(least=least)
        for following in (4, 4, 4, 9):
            finish(proposer, [50], [1, 2, 3, following, 5])
        assert proposer.guess(Key(), [60, 1, 2, 3], 1, 2) == guess


@pytest.mark.parametrize(("factor", "length"), [(0.5, 1), (1, 3), (1.5, 4), (2.0, 6), (9, 8)])
def test_the_length_for_each_token_that_matches(factor: float, length: int) -> None:
    proposer = SuffixProposer(factor=factor)
    finish(proposer, [50], [1, 2, 3, *range(10, 30)])
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 8) == list(range(10, 10 + length))


@pytest.mark.parametrize("most", [0, 1, 2, 3, 4, 10, 100])
def test_outputs_are_counted(most: int) -> None:
    """The last ones are known, of which at least three quarters of the number, and no more."""
    proposer = SuffixProposer(max_outputs=most)
    outputs = [[1000 + i, 2000 + i, 3000 + i] for i in range(60)]
    for output in outputs:
        finish(proposer, [50], output)
        assert proposer.past.num_outputs <= most
    known = [proposer.guess(Key(), [60, *one[:2]], 1, 1) == one[2:] for one in outputs]
    kept = sum(known)
    assert known == [False] * (60 - kept) + [True] * kept
    assert kept == proposer.past.num_outputs
    assert min(most, 60) * 0.5 <= kept <= most
    own = [7, 8, 9, 7, 8]
    assert proposer.guess(Key(), own, 1, 1) == [9]  # its own text counts all the same


def test_a_longer_match_goes_before_more_frequent_ones() -> None:
    proposer = SuffixProposer()
    for _ in range(5):
        finish(proposer, [50], [2, 3, 10])
    finish(proposer, [50], [1, 2, 3, 11])
    assert proposer.guess(Key(), [60, 2, 3], 1, 1) == [10]
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 1) == [11]


def test_prompts_of_others_are_not_looked_at() -> None:
    proposer = SuffixProposer()
    finish(proposer, [1, 2, 3, 4], [9, 9])
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 4) == []


def test_periodic_text_goes_on() -> None:
    assert SuffixProposer().guess(Key(), [1, 2, 3] * 4, 1, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_outputs_are_seen_by_those_of_the_same_salt_only() -> None:
    proposer = SuffixProposer()
    output = list(range(10, 40))
    finish(proposer, [50], output, "mine")
    finish(proposer, [50], output[:-9] + [99] * 9, "yours")
    start = [60, *output[:12]]
    for salt in (None, "theirs"):
        assert proposer.guess(Key(), start, 1, 16, salt) == []
    drafts = proposer.propose([wish(start, 1, 16, Key(), salt) for salt in ("mine", "yours", None)])
    assert [draft.tokens for draft in drafts] == [
        output[12:24], output[12:21] + [99] * 3, []
    ]  # fmt: skip


def test_past_outputs_are_bounded_and_the_oldest_go_first() -> None:
    rng = random.Random(0)
    most = 4000
    proposer = SuffixProposer(max_tokens=most)
    outputs = [[1000 + i, *letters(rng, 900, 58), 5000 + i] for i in range(300)]
    for output in outputs:
        finish(proposer, [50], output)
        assert proposer.past.num_tokens <= most
    known = [
        proposer.guess(Key(), [60, output[0], output[1]], 1, 1) == [output[2]] for output in outputs
    ]
    kept = sum(known)
    assert known == [False] * (300 - kept) + [True] * kept
    assert kept * 61 > most * (PARTS - 1) / PARTS - 61 * PARTS
    assert proposer.past.nbytes < 100 * most


def test_all_parts_count_together() -> None:
    proposer = SuffixProposer(max_tokens=24)  # an output a part
    for last in (9, 8, 9, 7):
        finish(proposer, [50], [1, 2, 3, last])
    assert len(proposer.past._parts) == PARTS
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 1) == [9]
    finish(proposer, [50], [1, 2, 3, 7])  # the first 9 is forgotten
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 1) == [7]
    finish(proposer, [50], [1, 2, 3, 4, 5])  # and 8, of which nothing is seen behind a longer one
    assert proposer.guess(Key(), [60, 1, 2, 3, 4], 1, 1) == [5]


def test_of_many_places_the_own_and_the_latest_count() -> None:
    own: list[int] = []
    for i in range(MOST_PLACES // 2 + 1):
        own += [100 + i, 1, 2, 3, 9]
    proposer = SuffixProposer(max_depth=3)
    for _ in range(MOST_PLACES - 4):
        finish(proposer, [50], [1, 2, 3, 8])
    assert proposer.guess(Key(), [60, 1, 2, 3], 1, 1) == [8]
    assert proposer.guess(Key(), [*own, 1, 2, 3], 1, 1) == [9]


def test_an_output_longer_than_a_part_leaves_its_end() -> None:
    proposer = SuffixProposer(max_tokens=40)
    finish(proposer, [50], list(range(100, 200)))
    assert proposer.past.num_tokens == 40 // PARTS
    assert proposer.guess(Key(), [60, 195, 196], 1, 9) == [197, 198]
    assert proposer.guess(Key(), [60, 180, 181], 1, 9) == []
    least = SuffixProposer(max_tokens=LEAST_TOKENS)
    finish(least, [50], [1, 2, 3, 4, 5])
    assert least.guess(Key(), [60, 4], 1, 9) == [5]
    with pytest.raises(ConfigError, match=f"cached_tokens={LEAST_TOKENS - 1} .* {LEAST_TOKENS}"):
        SuffixProposer(max_tokens=LEAST_TOKENS - 1)


def test_a_full_part_takes_fewer_than_fifty_bytes_a_token() -> None:
    proposer = SuffixProposer(max_tokens=1 << 16)
    rng = random.Random(0)
    for _ in range(64):
        finish(proposer, [50], letters(rng, 900, 1023))
    assert proposer.past.num_tokens == 1 << 16
    assert proposer.nbytes < 50 << 16


def test_a_forgotten_sequence_leaves_its_output_only() -> None:
    proposer = SuffixProposer()
    key = Key()
    proposer.guess(key, [1, 2, 3, 4, 5, 6], 2, 4)
    left = weakref.ref(key)
    proposer.forget(key)
    proposer.forget(key)  # of which nothing is known
    del key
    assert left() is None
    assert proposer.nbytes == proposer.past.nbytes
    assert proposer.past.num_tokens == 5  # and an end
    empty = SuffixProposer()
    empty.forget(Key())
    assert empty.nbytes == 0


def test_what_nobody_asked_guesses_for_is_kept_too() -> None:
    """As while drafts are off; and once only where somebody did."""
    proposer = SuffixProposer()
    for key, asked in ((Key(), False), (Key(), True)):
        tokens = [50, 1, 2, 3, 4, 5]
        if asked:
            proposer.guess(key, tokens, 1, 4)
        proposer.ended(key, tokens, 1, None)
        proposer.forget(key)
    assert proposer.past.num_outputs == 2
    assert proposer.guess(Key(), [60, 2, 3], 1, 4) == [4, 5]


def test_what_came_after_the_last_guess_is_kept_too() -> None:
    proposer = SuffixProposer()
    key, tokens = Key(), [50, 1, 2, 3]
    proposer.guess(key, tokens, 1, 4)
    tokens += [4, 5, 6]  # the engine's own list
    proposer.forget(key)
    assert proposer.guess(Key(), [60, 3, 4], 1, 4) == [5, 6]


def test_a_draft_ends_where_the_constraint_forbids() -> None:
    proposer = SuffixProposer()
    finish(proposer, [50], list(range(10, 30)))
    tokens = [60, *range(10, 18)]
    constraint = Only(frozenset({18, 19, 21}), left=9)
    (draft,) = proposer.propose([wish(tokens, 1, 16, Key(), constraint=constraint)])
    draft.settle(16)
    assert draft.tokens == [18, 19]
    assert len(draft.states) == 3
    assert constraint.left == 9


def test_many_sequences_side_by_side() -> None:
    rng = random.Random(3)
    past = [letters(rng, 6, 30) for _ in range(2)]
    together = SuffixProposer()
    for output in past:
        finish(together, [50], output)
    sequences = [(Key(), letters(rng, 6, rng.randrange(2, 30))) for _ in range(60)]
    for _ in range(3):
        drafts = together.propose([wish(tokens, 1, 16, key) for key, tokens in sequences])
        for (_, tokens), draft in zip(sequences, drafts, strict=True):
            assert draft.tokens == counted(tokens, past, 24, 16)
            tokens += letters(rng, 6, rng.randrange(1, 4))
