"""What keeps responses: how many, how long, for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.server.protocol.earlier import response_of
from penstock.server.stored import Stored, StoredResponses, UnknownResponse

SIZE = 2048
"""Of each of these, with what it takes beside its texts."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def one(name: str, previous: str | None = None, owner: str = "a", size: int = SIZE) -> Stored:
    return Stored(name, owner, b"{}", b"[]", b" " * (size - 1024 - 4), 1, previous)


def kept(room: int = 4, keep_s: float = 100.0) -> tuple[StoredResponses, Clock]:
    clock = Clock()
    return StoredResponses(room * SIZE, keep_s, clock), clock


def names(of: list[Stored]) -> list[str]:
    return [x.id for x in of]


def absent(what: Callable[..., Any], *given: str) -> str:
    with pytest.raises(UnknownResponse) as raised:
        what(*given)
    return raised.value.name


def test_the_size_is_what_they_hold() -> None:
    stored, _ = kept()
    assert (stored.count, stored.size) == (0, 0)
    for i in range(3):
        assert stored.put(one(f"r{i}"))
        assert (stored.count, stored.size) == (i + 1, (i + 1) * SIZE)
    stored.delete("a", "r1")
    assert (stored.count, stored.size) == (2, 2 * SIZE)
    assert absent(stored.get, "a", "r1") == "r1"
    assert absent(stored.delete, "a", "r1") == "r1"


def test_conversations_go_from_their_ends() -> None:
    """Whoever reads the last answer of one uses all of it."""
    stored, _ = kept(4)
    for name, before in (("a", None), ("b", "a"), ("c", "b"), ("x", None)):
        stored.put(one(name, before))
    assert stored.get("a", "c").id == "c"
    stored.put(one("y"))
    assert absent(stored.get, "a", "x") == "x"
    stored.put(one("z"))
    assert absent(stored.get, "a", "c") == "c"
    assert names(stored.chain("a", "b")) == ["a", "b"]


def test_what_was_used_longest_ago_goes_first() -> None:
    stored, _ = kept(3)
    for name in "abc":
        stored.put(one(name))
    stored.get("a", "a")
    stored.put(one("d"))
    assert absent(stored.get, "a", "b") == "b"
    assert stored.put(one("e", size=2 * SIZE))
    assert absent(stored.get, "a", "c") == "c"
    assert absent(stored.get, "a", "a") == "a"
    assert (stored.count, stored.size) == (2, 3 * SIZE)


def test_one_that_is_larger_than_all_may_be_drives_none_out() -> None:
    stored, _ = kept(2)
    stored.put(one("a"))
    assert not stored.put(one("b", size=2 * SIZE + 1))
    assert stored.put(one("c", size=SIZE))
    assert stored.count == 2


def test_an_id_is_given_once() -> None:
    stored, _ = kept()
    stored.put(one("a", owner="a"))
    assert not stored.put(one("a", owner="b"))
    assert stored.get("a", "a").owner == "a"
    assert stored.size == SIZE


def test_nothing_stays_long_unused() -> None:
    stored, clock = kept(keep_s=10)
    stored.put(one("a"))
    clock.now = 6
    stored.put(one("b"))
    stored.get("a", "a")
    clock.now = 15.9
    assert stored.count == 2
    clock.now = 16
    assert (stored.count, stored.size) == (0, 0)
    assert absent(stored.get, "a", "a") == "a"


def test_a_chain_begins_with_the_first() -> None:
    stored, clock = kept(keep_s=10)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "a")):
        stored.put(one(name, previous))
    assert names(stored.chain("a", "c")) == ["a", "b", "c"]
    assert names(stored.chain("a", "d")) == ["a", "d"]
    assert names(stored.chain("a", "a")) == ["a"]
    clock.now = 9  # to use the last is to use all
    stored.chain("a", "c")
    clock.now = 12
    assert names(stored.chain("a", "c")) == ["a", "b", "c"]
    assert absent(stored.get, "a", "d") == "d"


def test_conversations_are_forgotten_from_their_ends() -> None:
    stored, _ = kept(3)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        stored.put(one(name, previous))
    stored.chain("a", "c")
    stored.put(one("x"))
    assert absent(stored.chain, "a", "c") == "c"
    assert names(stored.chain("a", "b")) == ["a", "b"]


def test_a_chain_that_is_broken_says_where() -> None:
    stored, _ = kept()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        stored.put(one(name, previous))
    stored.delete("a", "b")
    assert absent(stored.chain, "a", "c") == "b"
    assert absent(stored.chain, "a", "x") == "x"


def test_a_ring_ends() -> None:
    """No request can make one, for a response goes on from one that was there before it."""
    stored, _ = kept()
    stored.put(one("a", "b"))
    stored.put(one("b", "a"))
    stored.put(one("c", "c"))
    assert absent(stored.chain, "a", "a")
    assert absent(stored.chain, "a", "c") == "c"


def test_each_owner_has_its_own() -> None:
    stored, _ = kept()
    stored.put(one("a", owner="one"))
    stored.put(one("b", "a", owner="other"))
    for what in (stored.get, stored.chain, stored.delete):
        assert absent(what, "other", "a") == "a"
    assert absent(stored.chain, "other", "b") == "a"
    assert stored.get("one", "a").id == "a"


@pytest.mark.parametrize(
    ("item", "response"),
    [
        ("msg_abc-0123456789abcdef", "resp_abc-0123456789abcdef"),
        ("fc_abc-0123456789abcdef_12", "resp_abc-0123456789abcdef"),
        ("rs_a_b-0123456789abcdef_1", "resp_a_b-0123456789abcdef"),
        ("msg_a_b-0123456789abcdef_i3", "resp_a_b-0123456789abcdef"),
        ("", ""),
        ("msg_", ""),
        ("m" * 10_000, ""),
        ("msg_" + "m" * 10_000, ""),
    ],
)
def test_an_items_id_says_its_response(item: str, response: str) -> None:
    assert response_of(item) == response
