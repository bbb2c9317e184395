"""DRY's breakers are found in the vocabulary as one would look for them by hand."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from penstock.engine.async_llm import _takes_long
from penstock.engine.breakers import _KEPT, Breakers
from penstock.sampling import SamplingParams


class Pieces:
    """A vocabulary."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)

    def piece_table(self, *, skip_special_tokens: bool) -> dict[int, bytes]:
        assert not skip_special_tokens
        return dict(enumerate(self.pieces))


@pytest.mark.parametrize("seed", range(20))
def test_breakers_are_those_that_hold_a_text(seed: int) -> None:
    rng = random.Random(seed)

    def word(least: int) -> bytes:
        return bytes(rng.choices(b"aab\n\0", k=rng.randint(least, 5)))

    pieces = [word(0) for _ in range(rng.choice([0, 1, 60]))]
    texts = [word(1).decode() for _ in range(rng.randint(0, 3))]
    wanted = {i for i, x in enumerate(pieces) if any(text.encode() in x for text in texts)}
    assert Breakers(cast(Any, Pieces(pieces))).find(tuple(texts)) == wanted


def test_parts_of_characters_and_of_surrogate_pairs() -> None:
    breakers = Breakers(cast(Any, Pieces(["ä".encode(), b"\xc3", b"\xa4", b"a"])))
    assert breakers.find(("ä",)) == {0}  # not across two pieces
    assert breakers.find(("\ud800",)) == frozenset()


def test_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    breakers = Breakers(cast(Any, Pieces([b"a", b"b"])))
    first = breakers.find(("a",))
    assert breakers.find(("a",)) is first
    for i in range(_KEPT):
        breakers.find((f"{i}",))
    assert breakers.find(("a",)) is not first


def test_looking_for_them_is_done_beside() -> None:
    assert _takes_long(SamplingParams(dry_multiplier=1.0))
    assert not _takes_long(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[]))
    assert not _takes_long(SamplingParams())
