"""Drafts by Medusa heads: trees against all ways there are, and whose state is looked at."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.sampling import SamplingParams, SequenceSampling
from penstock.speculate import ROOT, Computed, Draft, StateReader, Wish
from penstock.speculate.medusa import GREEDY as GREEDY_TEMPERATURE
from penstock.speculate.medusa import MedusaProposer, TreeLimits, likeliest

GREEDY = SamplingParams(temperature=0.0)
D, V, K = 6, 12, 4
MATRICES = torch.randn(K, V, D, generator=torch.Generator().manual_seed(3))


class Heads:
    """K matrices."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, states: Tensor) -> Tensor:
        self.calls.append(len(states))
        return torch.einsum("kvd,rd->rkv", MATRICES, states)


class Text:
    """A sequence as an engine keeps it."""

    def __init__(self, length: int, params: SamplingParams = GREEDY) -> None:
        self.tokens = list(range(length))
        self.params = params

    def wish(self, limit: int = K) -> Wish:
        state = SequenceSampling(self.params, self.tokens[:1], V, 5, frozenset())
        return Wish(self, self.tokens, state, [], limit)

    def computed(self, rows: Sequence[int]) -> Computed:
        """Of all but its last token, the last ones."""
        return Computed(self, self.tokens, [], len(self.tokens) - 1 - len(rows), list(rows))


def made(
    width: int = 3, most: int = 8, depth: int = K, ids: np.ndarray | None = None
) -> tuple[MedusaProposer, Tensor, Heads]:
    store = torch.randn(16, D, generator=torch.Generator().manual_seed(4))
    heads = Heads()
    return MedusaProposer(heads, store, TreeLimits(depth, width, most), ids), store, heads


def probabilities(state: Tensor, temperature: float = GREEDY_TEMPERATURE) -> np.ndarray:
    """Of each head, [K, V]."""
    logits = (MATRICES.double() @ state.double()).numpy() / temperature
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def ways(chances: np.ndarray, depth: int, width: int) -> dict[tuple[int, ...], float]:
    """Every way of likely tokens, and its probability."""
    likely = np.argsort(-chances, axis=-1, kind="stable")[:, :width]
    found = {}
    for length in range(1, depth + 1):
        for way in itertools.product(*likely[:length].tolist()):
            found[way] = math.prod(chances[level, token] for level, token in enumerate(way))
    return found


def ways_of(draft: Draft) -> list[tuple[int, ...]]:
    """The way to each of its tokens, in their order."""
    parents = draft.parents or []
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, parents, strict=True):
        assert ROOT <= parent < len(found)
        found.append(((*found[parent],) if parent != ROOT else ()) + (token,))
    return found


# ── trees ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("most", [1, 4, 8, 16, 200])
@pytest.mark.parametrize(("limit", "depth"), [(4, 4), (1, 4), (2, 4), (9, 4), (4, 3)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_the_likeliest_ways_of_all(
    width: int, most: int, limit: int, depth: int, temperature: float
) -> None:
    proposer, store, _ = made(width, most, depth)
    text = Text(7, SamplingParams(temperature=temperature))
    proposer.saw([text.computed([2, 9])])
    [draft] = proposer.propose([text.wish(limit)])
    chances = probabilities(store[9], temperature or GREEDY_TEMPERATURE)
    all_ways = ways(chances, min(limit, depth, K), width)
    found = ways_of(draft)
    assert len(set(found)) == len(found) == min(most, len(all_ways))
    ranked = sorted(all_ways.values(), reverse=True)[:most]
    assert [all_ways[way] for way in found] == pytest.approx(ranked, rel=1e-4)
    assert draft.chances == pytest.approx(ranked, rel=1e-4)


def test_any_first_part_of_a_tree_is_the_smaller_tree() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        chances = -np.sort(-rng.dirichlet(np.ones(5), 4).astype(np.float32), axis=-1)
        whole = likeliest(chances, 60)
        for most in range(60):
            assert likeliest(chances, most) == tuple(part[:most] for part in whole)


def test_nothing_that_cannot_be() -> None:
    """Guesses of no probability are left out, and what would come after them."""
    certain = np.array([[1.0, 0.0], [0.75, 0.25], [0.0, 0.0]], dtype=np.float32)
    assert likeliest(certain, 16) == ([ROOT, 0, 0], [0, 1, 1], [0, 0, 1], [1.0, 0.75, 0.25])
    for width in (1, 3):
        proposer, _, _ = made(width)
        text = Text(3)
        proposer.saw([text.computed([1])])
        proposer._heads = lambda states: torch.full((len(states), K, V), math.nan)
        assert [len(draft) for draft in proposer.propose([text.wish()])] == [0]


def test_a_chain_is_each_heads_likeliest() -> None:
    proposer, store, _ = made(width=1, most=4)
    text = Text(5)
    proposer.saw([text.computed([3])])
    for limit in (1, 3, 4, 7):
        [draft] = proposer.propose([text.wish(limit)])
        assert draft.parents is None
        assert draft.tokens == probabilities(store[3]).argmax(-1)[:limit].tolist()
        sure = probabilities(store[3]).max(-1)[:limit].cumprod()
        assert draft.chances == pytest.approx(sure.tolist(), rel=1e-4)


def test_columns_that_stand_for_other_ids() -> None:
    ids = np.arange(V)[::-1] * 100
    one, two = made()[0], made(ids=ids)[0]
    text = Text(5)
    drafts = []
    for proposer in (one, two):
        proposer.saw([text.computed([3])])
        drafts += proposer.propose([text.wish()])
    assert drafts[1].tokens == ids[drafts[0].tokens].tolist()
    assert drafts[1].parents == drafts[0].parents


# ── whose state is looked at ─────────────────────────────────────────────────────────────────────


def test_a_batch_is_each_of_its_sequences() -> None:
    """In one call of the heads, each with its own state and temperature."""
    texts = [Text(4 + i, SamplingParams(temperature=t)) for i, t in enumerate((0, 1.5, 0.4))]
    alone = []
    for i, text in enumerate(texts):
        proposer, _, _ = made()
        proposer.saw([text.computed([0] * i + [5 + i])])
        alone += proposer.propose([text.wish(4 - i)])
    proposer, _, heads = made()
    proposer.saw([text.computed([0] * i + [5 + i]) for i, text in enumerate(texts)])
    together = proposer.propose([text.wish(4 - i) for i, text in enumerate(texts)])
    assert heads.calls == [3]
    for one, other in zip(alone, together, strict=True):
        assert (one.tokens, one.parents) == (other.tokens, other.parents)
    assert len({tuple(draft.tokens) for draft in together}) == 3


def test_the_last_steps_states_are_looked_at() -> None:
    """As they are by the time of the wish, in whatever order; of who sat out that step, none."""
    proposer, store, heads = made()
    still, going, new = Text(4), Text(6), Text(9)
    want = {}
    for text, row in ((going, 9), (new, 2)):
        fresh = made()[0]
        fresh.saw([text.computed([row])])
        want[text] = fresh.propose([text.wish()])[0].tokens
    proposer.saw([still.computed([1]), going.computed([7])])
    store[[9, 2]] = store[[2, 9]]
    proposer.saw([going.computed([2]), new.computed([0, 0, 9])])
    found = proposer.propose([text.wish() for text in (still, new, going)])
    assert [draft.tokens for draft in found] == [[], want[new], want[going]]
    assert heads.calls == [2]
    assert isinstance(proposer, StateReader) and proposer.last_caught_up == 0


def test_without_the_state_of_the_token_before_the_last() -> None:
    """Sequences that were never seen, have more tokens by now, or have ended."""
    proposer, _, heads = made()
    never, ahead, ended, there = (Text(5) for _ in range(4))
    wrong = Computed(never, never.tokens, [], 0, [])  # rows of wrong guesses only
    proposer.saw([wrong, *(text.computed([2]) for text in (ahead, ended, there))])
    ahead.tokens += [1, 2]  # forced by a grammar
    proposer.forget(ended)
    proposer.forget(ended)
    found = proposer.propose([text.wish() for text in (never, ahead, ended, there)])
    assert [bool(draft) for draft in found] == [False, False, False, True]
    assert heads.calls == [1]
    assert proposer.propose([]) == [] and heads.calls == [1]
    proposer.forget(there)
    proposer.forget(ahead)
    assert [one.key for one in proposer._seen] == [never]


def test_keys_that_are_equal_are_not_the_same() -> None:
    proposer, _, _ = made()
    keys = [[], []]  # type: ignore[var-annotated]
    tokens = [1, 2, 3]
    proposer.saw(
        [Computed(key, tokens, [], 1, [row]) for key, row in zip(keys, (2, 8), strict=True)]
    )
    gc.collect()
    state = SequenceSampling(GREEDY, tokens, V, 5, frozenset())
    drafts = proposer.propose([Wish(key, tokens, state, [], 4) for key in keys])
    assert drafts[0].tokens != drafts[1].tokens
