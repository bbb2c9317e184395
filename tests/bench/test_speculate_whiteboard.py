"""The picture of a draft."""

from __future__ import annotations

from xml.etree import ElementTree

from penstock.bench.speculate.whiteboard import Whiteboard, draw
from penstock.speculate import Draft

TEXTS = {1: "Once", 5: " upon", 6: "<b>", 7: "\n", 8: " a very long token", 9: "end"}


def text_of(ids: list[int]) -> str:
    return "".join(TEXTS[i] for i in ids)


def tree(tokens: list[int], parents: list[int]) -> Draft:
    draft = Draft(None)  # type: ignore[arg-type]  # nothing is forked here
    draft.branch(tokens, parents, [0.5, 0.25, 0.125][: len(tokens)])
    return draft


def test_the_one_that_most_came_of_is_kept() -> None:
    board = Whiteboard()
    board.see([1], tree([5, 6, 7], [-1, -1, 0]), [0, 2], [5, 7, 1, 9])
    board.see([1], tree([5, 6, 7], [-1, -1, 0]), [1], [6, 0, 9, 1])
    board.see([1], tree([5], [-1]), [], [9, 1])
    best = board.best
    assert best is not None and best.right == [0, 2] and best.then == 9 and best.worth == (2, 3)


def test_the_picture_has_a_box_for_each_token_and_the_way_that_came() -> None:
    board = Whiteboard()
    board.see([1], tree([5, 6, 8], [-1, -1, 0]), [0], [5, 9, 1, 1])
    assert board.best is not None
    page = ElementTree.fromstring(draw(board.best, text_of))  # our own
    space = "{http://www.w3.org/2000/svg}"
    kinds = [one.get("class") for one in page.iter(f"{space}rect")]
    assert sorted(kinds[1:]) == ["box", "box", "came", "came", "next"]
    assert [one.get("class") for one in page.iter(f"{space}path")].count("way") == 2
    words = [one.text for one in page.iter(f"{space}text")]
    assert {"Once", "·upon", "<b>", "·a·very·lon…", "end", "50%", "drawn after"} <= set(words)
    assert "3 guesses verified in one step: 1 came, 2 tokens" in words
    boxes = [(one.get("x"), one.get("y")) for one in page.iter(f"{space}rect")][1:]
    assert len(set(boxes)) == len(boxes)


def test_a_chain_from_which_nothing_came() -> None:
    board = Whiteboard()
    draft = Draft(None)  # type: ignore[arg-type]
    draft.extend([5, 7])
    board.see([1], draft, [], [9, 1, 1])
    assert board.best is not None and board.best.parents == [-1, 0]
    assert "0 came, 1 tokens" in draw(board.best, text_of)
