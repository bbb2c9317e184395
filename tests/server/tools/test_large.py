"""Large offers of tools: nobody else waits for them, and what is too large is refused at once."""

from __future__ import annotations

import threading
import time
import timeit
from typing import Any

import httpx2 as httpx
import pytest

from penstock.server.errors import ApiError
from penstock.server.protocol import tools as protocol
from penstock.server.routes import tools as routes
from penstock.server.tools.constraint import calls, check_size, text_or_calls
from penstock.server.tools.families import TOOL_PARSERS
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
from penstock.server.tools.schema import problem_of
from tests.server.conftest import Running

TEXTS = {"type": "string"}


def properties(count: int) -> dict[str, Any]:
    return {f"argument_{i}": TEXTS for i in range(count)}


def tools(count: int, each: int, **more: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": properties(each)}
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": schema, **more}}
        for i in range(count)
    ]


def offer(count: int, each: int, parallel: bool = True) -> Offer:
    schema = {"type": "object", "properties": properties(each)}
    functions = [Function(f"tools[{i}]", f"f{i}", None, schema, True) for i in range(count)]
    return offer_of(functions, Choice("auto"), parallel)


def test_tools_are_dealt_with_beside_the_event_loop(
    server: Running, as_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading an offer, choosing how it is told, and writing its form down."""
    as_family("hermes")
    threads: dict[str, set[str]] = {}

    def noted(place: Any, name: str) -> None:
        real = getattr(place, name)

        def call(*given: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return real(*given)

        monkeypatch.setattr(place, name, call)

    noted(server.service.tooling, "plan")
    noted(protocol, "offer_of")
    noted(routes, "check_size")
    noted(routes, "structured")
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools(4, 24),
            "tool_choice": "required", "max_tokens": 1}  # fmt: skip
    with server.client() as client:
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert threads.keys() == {"plan", "offer_of", "check_size", "structured"}
    assert all(x.startswith("penstock-prompts") for names in threads.values() for x in names)


@pytest.mark.alone
def test_others_are_served_meanwhile(server: Running) -> None:
    """One megabyte of tools, in three requests at once."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools(1000, 24)}
    answers: list[httpx.Response] = []

    def ask() -> None:
        with server.client() as client:
            answers.append(client.post("/v1/chat/completions", json=body))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    waits: list[float] = []
    with server.client() as client:
        for asker in askers:
            asker.start()
        while any(asker.is_alive() for asker in askers):
            start = time.perf_counter()
            assert client.get("/health").status_code == 200
            waits.append(time.perf_counter() - start)
        for asker in askers:
            asker.join()
    assert max(waits) < 1  # the clients write their bodies in this process, too
    assert {answer.status_code for answer in answers} == {400}


@pytest.mark.alone
@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic"])
def test_a_form_is_written_in_time_that_grows_with_it(family: str) -> None:
    """Names were looked up in lists: 8 times the arguments took 64 times as long, not 8."""
    form = TOOL_PARSERS[family].form

    def fastest(count: int) -> float:
        schema = {"type": "object", "properties": properties(count)}
        schema["required"] = list(schema["properties"])
        offered = offer_of([Function("tools[0]", "f", None, schema)], Choice("required"), False)
        return min(timeit.repeat(lambda: calls(form, offered), number=1, repeat=3))  # without gc

    assert fastest(16_000) < 24 * fastest(2_000)


@pytest.mark.alone
def test_tools_that_cant_fit_are_to_blame(server: Running) -> None:
    """The tools' field, how long they are, and what to do; at once."""
    for count, words in ((1000, "characters as JSON"), (20, "of which the tools are about")):
        body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools(count, 24)}
        start = time.perf_counter()
        with server.client() as client:
            error = client.post("/v1/chat/completions", json=body).json()["error"]
        assert time.perf_counter() - start < 5
        assert (error["param"], error["code"]) == ("tools", "context_length_exceeded")
        assert words in error["message"]
        assert "Send fewer tools" in error["message"]


@pytest.mark.alone
def test_forms_that_would_be_too_long_arent_written() -> None:
    """1,000 tools in Python's lists, each behind each other, took three minutes to say."""
    form = TOOL_PARSERS["pythonic"].form
    start = time.perf_counter()
    with pytest.raises(ApiError, match=r"1,000 tools .* parallel_tool_calls: false") as refused:
        check_size(form, offer(1000, 20))
    assert time.perf_counter() - start < 5
    assert refused.value.param == "tools"
    check_size(form, offer(1000, 2, parallel=False))
    with pytest.raises(ApiError, match=r"The longest is tools\[0\]"):
        check_size(form, offer(1, 1000))  # any of the arguments may be the first
    check_size(TOOL_PARSERS["hermes"].form, offer(1000, 20))
    small = offer(8, 8)
    check_size(form, small)
    assert len(text_or_calls(form, small)["tags"]) == 8


@pytest.mark.alone
def test_schemas_are_read_in_time_that_grows_with_them() -> None:
    long_name = {"properties": {"a" * 500_000: {"properties": properties(20_000)}}}
    kinds = {"properties": {"a": {"type": ["string"] * 50_000, "enum": [1] * 50_000}}}
    start = time.perf_counter()
    assert problem_of(long_name) is None
    found = problem_of(kinds)
    assert time.perf_counter() - start < 5
    assert found == (".properties.a.enum", "has no value of type string")
    wrong = {"properties": {"b" * 500: {"type": "text"}}}
    where, _ = problem_of(wrong) or ("", "")
    assert where == f".properties['{'b' * 60}'].type"
