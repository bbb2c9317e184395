from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from penstock.speculate.matches import MOST_PLACES, Runs
from tests.speculate.lookup_cases import letters, places_of


def longest(text: list[int], low: int, high: int) -> tuple[int, list[int]]:
    """By looking everywhere."""
    for length in range(min(high, len(text)), low - 1, -1):
        if found := places_of(text, text[len(text) - length :]):
            return length, found
    return 0, []


@pytest.mark.parametrize("seed", range(40))
def test_the_longest_match_is_found_as_the_text_grows(seed: int) -> None:
    rng = random.Random(seed)
    alphabet, low = rng.randrange(2, 9), rng.randrange(1, 4)
    high = low + rng.randrange(20)
    text: list[int] = []
    runs = Runs(low, high, rng.choice([1, 500]))
    while len(text) < MOST_PLACES:  # so that no chain is longer than what is looked at
        text += letters(rng, alphabet, rng.choice([1, 1, 1, 2, 5]))
        del text[MOST_PLACES:]
        runs.read(text)
        expected = longest(text, low, high)
        tail = text[-high:]
        assert runs.find(text, tail, runs.hashes) == expected
        length, places = runs.find(text, tail, runs.hashes, first=True)
        assert (length, places[:1]) == (expected[0], expected[1][:1])


@pytest.mark.parametrize("seed", range(10))
def test_long_texts_with_few_repetitions(seed: int) -> None:
    rng = random.Random(seed)
    text = letters(rng, 400, 200)
    runs = Runs(2, 16, 20)  # its tables grow on the way
    for _ in range(80):
        if rng.random() < 0.5:
            at = rng.randrange(len(text))
            text += text[at : at + rng.randrange(1, 30)]
        else:
            text += letters(rng, 400, rng.choice([1, 3, 60]))
        runs.read(text)
        assert runs.find(text, text[-16:], runs.hashes) == longest(text, 2, 16)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 24), (2, 16), (3, 5), (3, 13)])
def test_reading_at_once_is_reading_token_by_token(sizes: tuple[int, int]) -> None:
    text = letters(random.Random(0), 7, 700)
    one, many = Runs(*sizes, room=700), Runs(*sizes, room=700)
    for end in range(1, len(text) + 1):
        one.read(text, end)
    for end in (1, 2, 60, 61, 400, 700):
        many.read(text, end)
    assert one.hashes == many.hashes
    assert one.sizes == many.sizes
    for left, right in zip(one._levels, many._levels, strict=True):
        assert left.previous == right.previous
        assert left.heads == right.heads


def test_a_new_document_goes_on_from_nothing() -> None:
    rng = random.Random(1)
    documents = [letters(rng, 4, length) for length in (3, 70, 1, 12, 100, 2)]
    text = array("q")
    runs = Runs(2, 9, 400)
    for document in documents:
        runs.begin(len(text))
        text.extend(document)
        runs.read(text)
        text.append(-1)
    tail = letters(rng, 4, 9)
    other = Runs(2, 9, 1)
    other.read(tail)
    for length in range(9, 1, -1):
        run = array("q", tail[-length:])
        found = [
            at for at in range(len(text) - 1, length, -1)
            if text[at - length : at] == run and text[at] != -1
        ]  # fmt: skip
        if found:
            break
    assert found
    assert runs.find(text, array("q", tail), other.hashes) == (length, found[:MOST_PLACES])


def test_salted_hashes_are_those_of_salted_tokens() -> None:
    rng = random.Random(2)
    tokens = letters(rng, 100_000, 30)
    salt = 5 << 32
    plain, salted = Runs(1, 24, 1), Runs(1, 24, 1)
    plain.read(tokens)
    salted.read([salt | token for token in tokens])
    assert plain.salted(plain.hashes, salt) == salted.hashes
    assert plain.salted(plain.hashes, 0) == plain.hashes != salted.hashes


@pytest.mark.parametrize(("others", "length"), [(MOST_PLACES - 1, 3), (MOST_PLACES, 2)])
def test_so_many_places_are_looked_at(others: int, length: int) -> None:
    text = [7, 8, 9]
    for i in range(others):
        text += [100 + i, 8, 9]
    text += [7, 8, 9]
    runs = Runs(2, 3, 100_000)
    runs.read(text)
    assert runs.find(text, text[-3:], runs.hashes, first=True)[0] == length


def test_a_token_costs_little() -> None:
    tokens = np.random.default_rng(0).integers(0, 3000, 30_000).tolist()
    runs = Runs(2, 16, 2 * len(tokens))
    runs.read(tokens)
    assert len(runs.sizes) == 4
    assert runs.nbytes <= len(tokens) * 4 * (4 + 16)
    start = Runs(2, 16, 2)
    for end in range(100, 30_100, 100):
        start.read(tokens, end)
    assert start.nbytes <= len(tokens) * 4 * (4 + 16)
