"""Tools through the official client's Responses."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from penstock.server.protocol.items import InputItem, joined
from penstock.server.routes import tools as routes
from tests.server.tools.conftest import TERSE
from tests.server.tools.test_chat import SHORT, is_f

F: Any = {"type": "function", "name": "f", "parameters": SHORT, "strict": True}
CALL = '<tool_call>\n{"name": "f", "arguments": {"at": "Rome", "n": 3}}\n</tool_call>'


def plain(response: Any) -> list[dict[str, Any]]:
    """The output without ids, which are new each time."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True)
            for item in response.output]  # fmt: skip


def said(client: OpenAI, **options: Any) -> Any:
    """A response, checked to be the same streamed, and its events to build it."""
    asked: dict[str, Any] = {
        "model": "stories",
        "input": "Weather?",
        "max_output_tokens": 120,
        "temperature": 0,
        **options,
    }
    whole = client.responses.create(**asked)
    deltas: dict[int, str] = {}
    added: list[str] = []
    final: Any = None
    for number, event in enumerate(client.responses.create(**asked, stream=True)):
        assert event.sequence_number == number
        if event.type == "response.output_item.added":
            assert event.output_index == len(added)
            added.append(event.item.type)
        elif event.type.endswith(".delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
        elif event.type == "response.function_call_arguments.done":
            assert deltas.get(event.output_index, "") == event.arguments
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert plain(final) == plain(whole)
    assert added == [item.type for item in whole.output]
    assert final.status == whole.status
    return whole


def test_a_call_that_must_be_made_is_made(client: OpenAI, as_family: Any) -> None:
    as_family("hermes")
    for choice in ("required", {"type": "function", "name": "f"}):
        answer = said(client, tools=[F], tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer.output
        assert (call.type, call.name, call.status) == ("function_call", "f", "completed")
        assert call.call_id.startswith("call_")
        assert is_f(call.arguments)
    assert answer.tool_choice.name == "f"
    assert answer.tools[0].name == "f"
    assert answer.parallel_tool_calls is False


def test_reasoning_text_and_calls(
    client: OpenAI, as_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_family("hermes", chat_template=TERSE + "<think>", reasoning_parser="qwen3")
    text = f"Hm.\n</think>\n\nI'll look.\n{CALL}\n{CALL}"
    real = routes.sampling_of

    async def forced(*arguments: Any) -> dict[str, Any]:
        return {**await real(*arguments), "structured_outputs": {"choice": [text]}}

    monkeypatch.setattr("penstock.server.routes.responses.sampling_of", forced)
    answer = said(client, tools=[{**F, "strict": False}], max_output_tokens=400)
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "Hm."
    assert answer.output_text == "I'll look."
    assert json.loads(answer.output[3].arguments) == {"at": "Rome", "n": 3}
    assert len({item.id for item in answer.output}) == 4
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    events = client.responses.create(
        model="stories", input="Hello", max_output_tokens=400, stream=True
    )
    first = [event for event in events if getattr(event, "output_index", None) == 0]
    names = [event.type.removeprefix("response.") for event in first]
    begins, ends = names[:2], names[-3:]
    assert begins == ["output_item.added", "content_part.added"]
    assert set(names[2:-3]) == {"reasoning_text.delta"}
    assert ends == ["reasoning_text.done", "content_part.done", "output_item.done"]
    parts = [event.part for event in first if hasattr(event, "part")]
    assert [(part.type, part.text) for part in parts] == [
        ("reasoning_text", ""), ("reasoning_text", "Hm."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "broken", ['{"at": "Ro', '{"at": "\\ud83d"}', '{"at": "Rome", "n": 1e999}'], ids=str
)
def test_a_broken_call_is_content(
    client: OpenAI, as_family: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Cut off, half a surrogate pair, a number beyond all: nobody gets it as a call."""
    as_family("hermes", chat_template=TERSE)
    text = f'<tool_call>\n{{"name": "f", "arguments": {broken}}}\n</tool_call>'
    real = routes.sampling_of

    async def forced(*arguments: Any) -> dict[str, Any]:
        return {**await real(*arguments), "structured_outputs": {"choice": [text]}}

    monkeypatch.setattr("penstock.server.routes.responses.sampling_of", forced)
    asked: dict[str, Any] = {
        "model": "stories", "input": "Weather?", "max_output_tokens": 200, "temperature": 0,
        "tools": [{**F, "strict": False}],
    }  # fmt: skip
    answer = client.responses.create(**asked)
    assert [item.type for item in answer.output] == ["message"]
    assert broken in answer.output_text
    items = [
        event.item for event in client.responses.create(**asked, stream=True)
        if event.type == "response.output_item.done"
    ]  # fmt: skip
    assert {item.status for item in items if item.type == "function_call"} <= {"incomplete"}


def test_two_thoughts_in_a_row_are_one() -> None:
    items = [
        {"role": "user", "content": "Weather?"},
        *({"type": "reasoning", "id": f"rs_{text}", "summary": [],
           "content": [{"type": "reasoning_text", "text": text}]} for text in "AB"),
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "So."}]},
    ]  # fmt: skip
    turns = joined([InputItem.model_validate(item).message() for item in items])
    assert [(turn.role, turn.reasoning_content) for turn in turns] == [
        ("user", None), ("assistant", "A\nB"),
    ]  # fmt: skip


def test_items_become_turns(client: OpenAI) -> None:
    """An answer's items are sent back as they came."""
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant",
         "content": [{"type": "output_text", "text": "So."}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"n": 1}'},
        {"type": "function_call", "call_id": "b", "name": "f", "arguments": '{"n": 2}'},
        {"type": "function_call_output", "call_id": "a", "output": "rain"},
        {"type": "function_call_output", "call_id": "b", "output": "sun"},
    ]  # fmt: skip
    turns = joined([InputItem.model_validate(item).message() for item in items])
    assert [turn.role for turn in turns] == ["user", "assistant", "tool", "tool"]
    assert turns[1].reasoning_content == "Hm."
    assert [call.id for call in turns[1].tool_calls or ()] == ["a", "b"]
    assert turns[3].tool_call_id == "b"
    options: Any = {"model": "stories", "input": items, "max_output_tokens": 2}
    assert client.responses.create(**options).output


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{**F, "name": "a tool"}]}, "tools[0].name", "1 to 64"),
    ({"tools": [{**F, "parameters": {"type": "array"}}]}, "tools[0].parameters.type", "'object'"),
    ({"tools": [{"type": "code_interpreter"}]}, "tools", "'code_interpreter'"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0]", "arguments"),
]


@pytest.mark.parametrize(("options", "param", "words"), WRONG)
def test_bad_input_is_refused(
    client: OpenAI, options: dict[str, Any], param: str, words: str
) -> None:
    asked = {"model": "stories", "input": "x", "max_output_tokens": 1, **options}
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked)
    assert refused.value.param == param
    assert words in refused.value.message
