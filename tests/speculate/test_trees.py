"""Drafts that are trees."""

from __future__ import annotations

import random

import pytest

from penstock.errors import RequestError
from penstock.speculate import ROOT, Draft, followed


class State:
    """A sampler's state that some tokens can't follow."""

    def __init__(self, forbidden: tuple[int, ...] = (), tokens: tuple[int, ...] = ()) -> None:
        self.forbidden = forbidden
        self.tokens = tokens

    def fork(self, token: int) -> State:
        if token in self.forbidden:
            raise RequestError("forbidden")
        return State(self.forbidden, (*self.tokens, token))


def tree(tokens: list[int], parents: list[int], forbidden: tuple[int, ...] = ()) -> Draft:
    draft = Draft(State(forbidden))  # type: ignore[arg-type]
    draft.branch(tokens, parents, [0.5] * len(tokens))
    return draft


def texts(draft: Draft) -> list[tuple[int, ...]]:
    """The way to each token, by its parents and by its state: the same."""
    found: list[tuple[int, ...]] = []
    assert draft.parents is not None
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    assert [state.tokens for state in draft.states[1:]] == found  # type: ignore[attr-defined]
    return found


def random_tree(rng: random.Random, count: int) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < count:
        pair = rng.randrange(10), rng.randint(ROOT, len(tokens) - 1)
        if pair not in zip(tokens, parents, strict=True):
            tokens.append(pair[0])
            parents.append(pair[1])
    return tokens, parents


@pytest.mark.parametrize("seed", range(30))
def test_what_is_kept_is_the_tree_without_what_cannot_be(seed: int) -> None:
    rng = random.Random(seed)
    tokens, parents = random_tree(rng, rng.randint(1, 20))
    whole = tree(tokens, parents)
    whole.settle(len(whole))
    all_ways = texts(whole)
    forbidden = tuple(rng.sample(range(10), 3))
    draft, lengths = tree(tokens, parents, forbidden), sorted(rng.choices(range(21), k=3))[::-1]
    for length in lengths:  # again, and shorter
        draft.settle(length)
        if length == lengths[0]:
            want = [way for way in all_ways[:length] if not set(way) & set(forbidden)]
        else:
            want = want[:length]
        assert texts(draft) == want


@pytest.mark.parametrize("seed", range(30))
def test_ways_and_their_order(seed: int) -> None:
    rng = random.Random(seed)
    draft = tree(*random_tree(rng, rng.randint(1, 20)))
    draft.settle(20)
    before = texts(draft)
    leaves = {way for way in before if not any(w[:-1] == way for w in before)}
    draft.arrange()
    after = texts(draft)
    assert sorted(after) == sorted(before)
    assert {after[way[-1]] for way in draft.ways} == leaves
    known = 0
    for way in draft.ways:  # each goes on where it parts from those before
        new = [at for at in way if at >= known]
        assert way[len(way) - len(new) :] == new == list(range(known, known + len(new)))
        known += len(new)
    assert known == len(draft) and draft.depth == max(map(len, leaves))
    again = list(draft.tokens)
    draft.arrange()
    assert draft.tokens == again


def test_the_first_way_is_the_likeliest() -> None:
    draft = tree([5, 6, 7, 8, 9], [ROOT, ROOT, 1, 0, 2])
    draft.settle(5)
    draft.arrange()
    assert draft.tokens == [5, 8, 6, 7, 9] and draft.ways == [[0, 1], [2, 3, 4]]


def test_what_came_true() -> None:
    tokens, parents = [5, 6, 7, 8, 9], [ROOT, ROOT, 1, 0, 2]
    for came, want in (([6, 7, 9, 1], [1, 2, 4]), ([5, 7], [0]), ([1], []), ([6, 7], [1, 2])):
        got = followed(tokens, parents, lambda _, n, came=came: came[n] if n < len(came) else -1)
        assert got == want
    by_row = {ROOT: 6, 1: 7, 2: 3}
    assert followed(tokens, parents, lambda at, _: by_row[at]) == [1, 2]
    assert followed([4, 4, 4], None, lambda at, _: 4 if at < 1 else 0) == [0, 1]


def test_nothing_is_a_tree_too() -> None:
    draft = tree([], [])
    draft.settle(3)
    draft.arrange()
    assert not draft.ways and draft.depth == 0 and len(draft.states) == 1
