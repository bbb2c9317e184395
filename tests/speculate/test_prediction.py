"""Where an output is in what was expected of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.speculate import Expected, Prediction, Proposer, Wish
from penstock.speculate.ngram import NgramProposer
from penstock.speculate.prediction import FIRM, KIND, LONGEST_WAIT
from penstock.speculate.suffix import SuffixProposer

from .lookup_cases import wish

PROMPT = [900, 901, 902]
TEXT = list(range(100, 200))


def after(output: list[int], text: list[int] = TEXT) -> tuple[int, list[int]]:
    """Tokens that match, and what is guessed, read one token at a time."""
    prediction = Prediction(Expected(text), len(PROMPT))
    tokens, length = list(PROMPT), 0
    for token in output:
        tokens.append(token)
        length = prediction.follow(tokens)
    return length, prediction.guess(1000) if length else []


def test_an_output_as_expected() -> None:
    assert after([100]) == (FIRM + 1, TEXT[1 : 1 + 2 * (FIRM + 1)])
    assert after(TEXT[:60]) == (FIRM + 60, TEXT[60:])
    assert after(TEXT) == (0, []) and after([*TEXT, 5]) == (0, [])


def test_no_guess_before_two_tokens_stand_in_it() -> None:
    assert after([7]) == (0, [])
    assert after([7, 8]) == (0, [])
    assert after([7, 150]) == (0, [])  # one is chance
    assert after([150, 151]) == (2, [152, 153, 154, 155])
    assert after([7, 150, 151, 152]) == (3, list(range(153, 159)))


def test_the_end_of_a_prompt_matches_nothing() -> None:
    """Only what the model says is held against what it should say."""
    assert after([5], [*PROMPT[1:], 5, 6, 7]) == (0, [])


def test_a_changed_word_and_a_line_more_or_less() -> None:
    changed = [*TEXT[:20], 7, 8, *TEXT[21:23]]
    assert after(changed) == (2, TEXT[23:27])
    assert after([*TEXT[:20], *TEXT[40:42]]) == (2, TEXT[42:46])
    assert after([*TEXT[:20], *TEXT[10:15]]) == (5, TEXT[15:25])


def test_the_place_that_most_tokens_lead_to_then_the_next_one() -> None:
    text = [1, 2, 50, 1, 2, 51, 9, 1, 2, 52, 1, 2, 53]
    assert after([7, 1, 2], text) == (2, text[2:6])  # nowhere yet: the first
    assert after([1, 2, 50, 1, 2, 51, 8, 1, 2], text)[1] == text[9:13]  # the next
    assert after([1, 2, 50, 1, 2, 51, 9, 1, 2, 8, 9, 1, 2], text) == (3, text[9:])
    assert after([*text[:12], 8, 1, 2], text) == (2, text[12:])
    assert after([*text, 8, 1, 2], text) == (2, text[12:])  # behind it: the last


def test_beginning_where_the_prediction_does() -> None:
    """A match can't go on before the first token."""
    assert after([7, 3, 3, 3], [3, 3, 3, 3]) == (3, [3])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.lists(st.integers(0, 3)))
def test_what_matches_does(text: list[int], output: list[int]) -> None:
    """However it came there: a guess stands in the text, after what the output ends with."""
    prediction, tokens = Prediction(Expected(text), 0), list[int]()
    for token in output:
        tokens.append(token)
        length = prediction.follow(tokens)
        if not length:
            continue
        assert prediction.follow(tokens) == length  # read once
        guess = prediction.guess(3)
        count = len(tokens) if tokens == text[: len(tokens)] else length
        assert any(
            text[at - count : at] == tokens[len(tokens) - count :]
            and text[at : at + len(guess)] == guess
            for at in range(count, len(text))
        )


@given(
    st.lists(st.integers(0, 2), max_size=80),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 90),
)
def test_where_two_tokens_stand(text: list[int], first: int, second: int, place: int) -> None:
    after = [at for at in range(2, len(text) + 1) if text[at - 2 : at] == [first, second]]
    wanted = [at for at in after if at >= place][:8] + [at for at in after if at < place][:-9:-1]
    assert list(Expected(text).near(first, second, place)) == wanted


def test_samples_share_where_tokens_stand() -> None:
    expected = Expected(TEXT)
    one, other = Prediction(expected, 0), Prediction(expected, 0)
    assert one.follow([7, 150, 151]) == 2 and other.follow([100]) == FIRM + 1
    assert one.guess(1) == [152] and other.guess(1) == [101]


def test_looks_that_didnt_pay_come_later_each_time() -> None:
    prediction, tokens = Prediction(Expected(TEXT), 0), [100]
    waits = []
    for _ in range(9):
        assert prediction.is_due(tokens)
        prediction.judge(pays=False)
        waits.append(0)
        while not prediction.is_due(tokens):
            waits[-1] += 1
    assert waits == [1, 2, 4, 8, 16, 32, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]
    prediction.judge(pays=True)
    assert prediction.is_due(tokens) and prediction.is_due(tokens)
    prediction.judge(pays=False)
    assert [prediction.is_due(tokens) for _ in range(2)] == [False, True]


@pytest.mark.parametrize("make", [NgramProposer, SuffixProposer])
def test_guessed_by_unless_something_matches_longer(make: type[Proposer]) -> None:
    proposer, key = make(), object()
    tokens = [*PROMPT, 1, 2, 3, 4, 5, 6, 1, 2, 3]

    def guessed(expected: Prediction | None, tokens: list[int]) -> tuple[list[int], int]:
        one = wish(tokens, len(PROMPT), 3, key)
        own = Wish(one.key, one.tokens, one.sampling, one.blocks, one.limit, None, expected)
        (draft,) = proposer.propose([own])
        return draft.tokens, draft.kind

    assert guessed(None, tokens)[0] == [4, 5, 6]
    short, long = (
        Prediction(Expected(text), len(PROMPT)) for text in ([9, 2, 3, 77], [1, 2, 3, 88])
    )
    assert guessed(short, tokens)[0] == [4, 5, 6]  # 1 2 3 says more than 2 3
    tokens_of_long, kind = guessed(long, tokens)
    assert tokens_of_long == [88] and kind == KIND + 2
