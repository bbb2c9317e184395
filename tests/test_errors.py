"""What error messages are made of."""

from __future__ import annotations

import pytest

from penstock.errors import listed


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, ""), (1, "a"), (3, "a, b, c"), (4, "a, b, c and 1 more"), (26, "a, b, c and 23 more")],
)
def test_lists_of_names_say_how_many_more(count: int, said: str) -> None:
    assert listed("abcdefghijklmnopqrstuvwxyz"[:count], 3) == said
