"""Whom a request goes to."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.fleet.ask import Ask
from penstock.fleet.choosing import ByPrefix, Chooser, chooser_of
from penstock.fleet.link import Link
from penstock.fleet.worker import Worker
from penstock.server.errors import ApiError
from penstock.server.keys import Limits
from penstock.server.sse import dumps


def workers(count: int = 3) -> list[Worker]:
    found = [Worker(f"m/{i}", "m", Link("unix:/x"), lambda: None) for i in range(count)]
    for one in found:
        one.capacity = 8
    return found


def ask(path: str = "/v1/chat/completions", **data: Any) -> Ask:
    return Ask.of(path, dumps(data).encode(), ())


def chat(*texts: str, **fields: Any) -> Ask:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": x} for i, x in enumerate(texts)]
    return ask(messages=messages, **fields)


def names(chooser: Chooser, there: list[Worker], *asks: Ask) -> list[str]:
    return [chooser.choose(there, one).name for one in asks]


def test_round_robin() -> None:
    assert names(chooser_of("round_robin"), workers(), *[chat("x")] * 4) == [
        "m/0", "m/1", "m/2", "m/0",
    ]  # fmt: skip


def test_least() -> None:
    there = workers()
    there[0].outstanding, there[1].outstanding, there[2].outstanding = 3, 2, 4
    there[2].capacity = 32
    assert names(chooser_of("least"), there, chat("x")) == ["m/2"]


def test_no_policy() -> None:
    with pytest.raises(ConfigError, match="no policy 'best'"):
        chooser_of("best")


class TestByPrefix:
    def test_a_conversation_stays_where_it_is(self) -> None:
        chooser, there = ByPrefix(), workers()
        first = [chat(f"{i} " + "Tell me more of it. " * 20) for i in range(3)]
        places = names(chooser, there, *first)
        assert sorted(places) == ["m/0", "m/1", "m/2"]  # what nobody knows goes to who knows least
        later = [chat(f"{i} " + "Tell me more of it. " * 20, "Well.", "And?") for i in range(3)]
        assert names(chooser, there, *later) == places
        assert names(chooser, there, *reversed(later)) == places[::-1]
        assert chooser.hits > 0

    def test_tools_come_first(self) -> None:
        chooser, there = ByPrefix(), workers()
        tools = [{"type": "function", "function": {"name": "f" * 300}}]
        (place,) = names(chooser, there, chat("a", tools=tools))
        assert names(chooser, there, chat("another", tools=tools)) == [place]

    def test_salts_and_prompts(self) -> None:
        chooser, there = ByPrefix(), workers()
        text = "Once upon a time " * 30
        (place,) = names(chooser, there, ask("/v1/completions", prompt=text))
        assert names(chooser, there, ask("/v1/completions", prompt=text + "x")) == [place]
        salted = ask("/v1/completions", prompt=text, cache_salt="x")
        assert names(chooser, there, salted) != [place]

    def test_a_far_busier_one_is_spared(self) -> None:
        chooser, there = ByPrefix(), workers(2)
        request = chat("Tell me more of it. " * 20)
        (place,) = names(chooser, there, request)
        busy = next(x for x in there if x.name == place)
        busy.outstanding = 4
        assert names(chooser, there, request) == [place]
        busy.outstanding = 5
        assert names(chooser, there, request) != [place]

    def test_a_new_process_knows_nothing(self) -> None:
        chooser, there = ByPrefix(), workers(2)
        request = chat("Tell me more of it. " * 20)
        (place,) = names(chooser, there, request)
        chooser.forget(next(x for x in there if x.name == place))
        other = next(x for x in there if x.name != place)
        other.outstanding = 0
        names(chooser, [other], request)
        assert names(chooser, there, request) == [other.name]

    def test_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.fleet.choosing._KEPT_CHUNKS", 16)
        chooser, there = ByPrefix(), workers(1)
        for i in range(10):
            names(chooser, there, chat(f"{i} " + "x" * 5000))
        assert len(chooser._known["m/0"]) == 16
        before = chooser.hits
        names(chooser, there, chat("9 " + "x" * 5000))
        assert chooser.hits > before  # beginnings are forgotten last


class TestAsk:
    def test_pictures_are_hashed(self) -> None:
        pictures = [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            for url in (f"data:image/png;base64,{c * 200_000}" for c in "ab")
        ]
        first, second = (ask(messages=[one]).prefix for one in pictures)
        assert first != second
        assert len(first) < 1000
        assert ask(messages=[pictures[0]]).prefix == first

    def test_seeds(self) -> None:
        one = chat("a", stream=True)
        one.settle_seed()
        assert one.data["seed"] == Ask.of("/", one.body, ()).data["seed"]
        assert one.data == Ask.of("/", one.body, ()).data
        for fields in ({"seed": 3}, {"temperature": 0}, {"stream": False}):
            other = chat("a", **{"stream": True, **fields})
            body = other.body
            other.settle_seed()
            assert other.body == body
        nothing = chat("a", stream=True, seed=None)
        nothing.settle_seed()
        assert Ask.of("/", nothing.body, ()).data == nothing.data
        assert isinstance(nothing.data["seed"], int)

    def test_wishes(self) -> None:
        limits = Limits(priority=3, ttft_slo_ms=5)
        one = chat("a")
        one.wish(limits, None)
        assert Ask.of("/", one.body, ()).data == one.data
        assert (one.data["priority"], one.data["ttft_slo_ms"]) == (3, 5)
        own = chat("a", priority=1)
        own.wish(limits, None)
        assert own.data["priority"] == 1
        tokens = ask("/tokenize", prompt="a")
        tokens.wish(limits, None)
        assert "priority" not in tokens.data
        for policy, heeded in (
            ("fcfs", set()),
            ("priority", {"priority"}),
            ("edf", {"ttft_slo_ms"}),
        ):
            plain = chat("a")
            plain.wish(limits, policy)
            assert plain.data.keys() - {"messages"} == heeded

    def test_sizes(self) -> None:
        assert ask(prompt=["a", "b"], n=3).sequences == 6
        assert ask(prompt=[1, 2, 3]).sequences == 1
        assert ask(prompt=[[1, 2], [3]]).sequences == 2
        assert ask(messages=[], n="x").sequences == 1

    @pytest.mark.parametrize("body", [b"[]", b"3", b"{", b'{"a": 1, "a": 2}', b"\xff"])
    def test_what_is_no_object(self, body: bytes) -> None:
        with pytest.raises(ApiError) as error:
            Ask.of("/", body, ())
        assert error.value.code == "invalid_json"

    def test_a_model_that_is_no_text(self) -> None:
        with pytest.raises(ApiError, match="model must be a text"):
            _ = ask(model=3).model
