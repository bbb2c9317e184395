"""Tools through the official `anthropic` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from penstock.server.routes import tools as routes
from tests.server.conftest import Running
from tests.server.tools.conftest import TERSE
from tests.server.tools.test_chat import SHORT, is_f

ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
F: Any = {"name": "f", "input_schema": SHORT}
G: Any = {"name": "g", "input_schema": {"type": "object", "additionalProperties": False}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"at": "Rome", "n": 3}}\n</tool_call>'


@pytest.fixture
def client(server: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def blocks(message: anthropic.types.Message) -> list[Any]:
    """Without ids, which are new each time."""
    return [block.model_dump(exclude={"id", "citations", "caller"}) for block in message.content]


def said(client: Anthropic, **options: Any) -> anthropic.types.Message:
    """A message, checked to be the same streamed."""
    asked: dict[str, Any] = {
        "model": "stories", "messages": ASK, "max_tokens": 120,
        "extra_body": {"temperature": 0}, **options
    }  # fmt: skip
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    assert blocks(streamed) == blocks(whole)
    assert streamed.stop_reason == whole.stop_reason
    return whole


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
def test_a_call_that_must_be_made_is_made(client: Anthropic, as_family: Any, choice: Any) -> None:
    as_family("hermes")
    message = said(client, tools=[F], tool_choice=choice | {"disable_parallel_tool_use": True}
                   if choice["type"] == "any" else choice)  # fmt: skip
    (block,) = message.content
    assert block.type == "tool_use"
    assert block.id.startswith("toolu_")
    assert block.name == "f"
    assert is_f(json.dumps(block.input))
    assert message.stop_reason == "tool_use"


def test_text_reasoning_and_calls(
    client: Anthropic, as_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model of the family has written."""
    as_family("hermes", chat_template=TERSE + "<think>", reasoning_parser="qwen3")
    text = f"Hm.\n</think>\n\nI'll look.\n{CALL}\n{CALL}"
    real = routes.sampling_of

    async def forced(*arguments: Any) -> dict[str, Any]:
        chosen = await real(*arguments)
        return {**chosen, "structured_outputs": {"choice": [text]}}

    monkeypatch.setattr("penstock.server.routes.messages.sampling_of", forced)
    message = said(client, tools=[F], max_tokens=400)
    call = {"type": "tool_use", "name": "f", "input": {"at": "Rome", "n": 3}}
    assert [{k: b[k] for k in b if k in ("type", "text", "thinking", "name", "input")}
            for b in blocks(message)] == [
        {"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I'll look."}, call, call,
    ]  # fmt: skip
    assert message.stop_reason == "tool_use"


def test_a_conversation_goes_on_behind_a_call(client: Anthropic, server: Running) -> None:
    """Blocks become the chat's messages."""
    history = [
        *ASK,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "So."},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"n": 3}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
            {"type": "text", "text": "And?"},
        ]},
    ]  # fmt: skip
    chat = [
        *ASK,
        {"role": "assistant", "content": "So.", "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"n": 3}}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "x"},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    counted = client.messages.count_tokens(model="stories", messages=history)
    with server.client() as plain:
        tokens = plain.post("/tokenize", json={"messages": chat}).json()["count"]
    assert counted.input_tokens == tokens
    more = client.messages.count_tokens(model="stories", messages=history, tools=[F])
    assert more.input_tokens > tokens
    assert client.messages.create(model="stories", messages=history, max_tokens=2).content


def test_tools_that_cant_fit_are_told_in_the_apis_words(client: Anthropic) -> None:
    """By which its clients know that a request is too long."""
    for count, unit in ((1000, "characters"), (20, "tokens")):
        large = [{**F, "name": f"f{i}", "description": "dog " * 60} for i in range(count)]
        asked: Any = {"model": "stories", "messages": ASK, "max_tokens": 1, "tools": large}
        said = rf"prompt is too long: \d+ {unit} > \d+ maximum.*Send fewer tools"
        with pytest.raises(anthropic.BadRequestError, match=said):
            client.messages.create(**asked)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{**F, "name": "a tool"}]}, r"tools\[0\].name"),
    ({"tools": [F, F]}, r"tools\[1\].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "text"}}]}, r"tools\[0\].input_schema.type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tools": [F], "tool_choice": {"type": "tool", "name": "h"}}, "isn't among the tools"),
    ({"tools": [F], "tool_choice": {"type": "tool"}}, "names one"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f",
                                                  "input": {}}]}]}, "has no tool_use"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "has no tool_use_id"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_bad_input_is_refused(client: Anthropic, options: dict[str, Any], words: str) -> None:
    asked = {"model": "stories", "messages": ASK, "max_tokens": 1, **options}
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.create(**asked)
