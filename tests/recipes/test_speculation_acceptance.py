"""Acceptance against drafts that are really made, one token after the other."""

from itertools import pairwise

import pytest
import torch
from recipes.speculation.acceptance import Acceptance, chains, measure, rank
from recipes.speculation.draft import Draft
from recipes.speculation.eagle import Eagle
from recipes.speculation.guesser import Guesser
from recipes.speculation.medusa import Medusa
from recipes.speculation.target import Target
from recipes.speculation.text import Row
from torch import Tensor

DEPTH = 3


def test_a_rank_is_a_place_in_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 6, (200, 12), generator=generator).float()  # many are equal
    order = logits.sort(descending=True, stable=True).indices
    for place in range(12):
        assert rank(logits, order[:, place]).eq(place).all()
    assert rank(logits, logits.argmax(-1)).eq(0).all()


def test_chains_end_at_the_first_guess_that_is_wrong() -> None:
    first = torch.tensor([[0, 0, 1, 0, 5]])
    second = torch.tensor([[0, 3, 0, 0]])
    weights = torch.ones(1, 6)
    found = chains([first, second], weights, (1, 2, 4))
    # four places have two guesses: (0, 0) (0, 3) (1, 0) (0, 0)
    assert found.places == 4
    assert found.chains == {1: [0.75, 0.5], 2: [1.0, 0.75], 4: [1.0, 1.0]}
    assert found.right == [0.75, 0.75]
    assert found.tokens() == 2.25
    assert found.conditional() == [0.75, 0.5 / 0.75]


def test_only_what_the_target_chose_counts() -> None:
    ranks = [torch.tensor([[0, 9, 9, 0, 0]])]
    weights = torch.tensor([[0.0, 0, 0, 1, 1, 1]])
    found = chains(ranks, weights, (1,))
    assert found.places == 2
    assert found.chains == {1: [1.0]}


def test_nothing_to_measure_is_zero_places() -> None:
    assert chains([torch.tensor([[0, 0]])], torch.zeros(1, 3), (1,)).places == 0


def own_texts(target: Target, length: int = 14) -> list[Row]:
    """What the target says, greedily, after different beginnings."""
    rows = []
    for start in ([0, 5], [0, 40, 41, 42], [0, 77]):
        tokens = torch.tensor([start])
        while tokens.shape[1] < length + start[1] % 3:
            tokens = torch.cat((tokens, target.look(tokens).logits[:, -1:].argmax(-1)), 1)
        rows.append(Row(tokens[0].tolist(), len(start)))
    return rows


def accepted(drafts: list[tuple[list[int], list[int]]]) -> list[float]:
    """Of drafts and what really came: the share whose first 1, 2, … guesses are right."""
    return [
        sum(draft[: d + 1] == came[: d + 1] for draft, came in drafts) / len(drafts)
        for d in range(DEPTH)
    ]


def made_drafts(
    guesser: Guesser, target: Target, rows: list[Row]
) -> list[tuple[list[int], list[int]]]:
    """At each place of a text, a draft of the guesser's likeliest tokens, each told the next."""
    drafts = []
    for row in rows:
        for place in range(row.given - 1, len(row.tokens) - 1 - DEPTH):
            told = row.tokens[: place + 2]
            for d in range(DEPTH):
                # a token that nobody knows yet stands where the guess belongs
                tokens = torch.tensor([[*told, 0]])
                *_, logits = guesser.guesses(cut(target, tokens, place, guesser), d + 1)
                told = [*told, int(logits[0, place].argmax())]
            drafts.append((told[place + 2 :], row.tokens[place + 2 : place + 2 + DEPTH]))
    return drafts


def cut(target: Target, tokens: Tensor, place: int, guesser: Guesser):  # type: ignore[no-untyped-def]
    """What the target has seen up to `place`; what comes after it is spoilt."""
    seen = target.look(tokens, guesser.stream_ids)
    seen.features[:, place + 1 :] = 7.0
    return seen


@pytest.mark.parametrize("kind", ["medusa", "eagle", "draft"])
@torch.no_grad()
def test_acceptance_is_that_of_drafts_made_one_by_one(target: Target, kind: str) -> None:
    torch.manual_seed(5)
    guesser = {
        "medusa": lambda: Medusa(target, DEPTH, 1),
        "eagle": lambda: Eagle(target),
        "draft": lambda: Draft(target, hidden_size=32, num_layers=4, intermediate_size=48),
    }[kind]()
    if isinstance(guesser, Draft):  # the target, a little changed: right now and then
        guesser.model.load_state_dict(target.model.state_dict())
        for weight in guesser.parameters():
            weight.add_(0.02 * torch.randn(weight.shape))
    rows = own_texts(target)
    drafts = made_drafts(guesser, target, rows)
    found = measure(guesser, target, rows, DEPTH, at_once=3)
    assert found.places == len(drafts)
    assert found.chains[1] == pytest.approx(accepted(drafts), abs=1e-6)
    if kind == "draft":
        assert 0.2 < found.chains[1][0] < 1.0
        assert found.chains[1][0] > found.chains[1][2] > 0
    wide = [found.chains[width] for width in (1, 2, 4, 8)]
    for narrow, wider in pairwise(wide):
        assert all(a <= b for a, b in zip(narrow, wider, strict=True))


def test_the_target_as_its_own_draft_is_accepted_whole(target: Target) -> None:
    draft = Draft(target, hidden_size=32, num_layers=4, intermediate_size=48)
    draft.model.load_state_dict(target.model.state_dict())
    found = measure(draft, target, own_texts(target), DEPTH)
    assert found.chains[1] == [1.0] * DEPTH
    assert found.tokens() == 1 + DEPTH


def test_texts_too_short_for_a_draft_count_nothing(target: Target) -> None:
    draft = Medusa(target, DEPTH)
    found = measure(draft, target, [Row([0, 1, 2], 1)], DEPTH)
    assert found == Acceptance({1: [], 2: [], 4: [], 8: []}, [], 0)
