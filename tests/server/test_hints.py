"""What clients send by themselves: heeded where the template reads it, else named and left."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from anthropic import Anthropic

from penstock.server.protocol.chat import ChatRequest
from penstock.server.protocol.messages import MessagesRequest
from tests.server.conftest import Running

CHAT = "/v1/chat/completions"
ANSWER = "/v1/responses"
MESSAGES = "/v1/messages"
ASK = [{"role": "user", "content": "Hello"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_tokens": 2},
    ANSWER: {"input": "Hello", "max_output_tokens": 2},
    MESSAGES: {"model": "stories", "messages": ASK, "max_tokens": 2},
}
HEADER = "x-penstock-unheeded"
TELLS = (
    "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}Don't think.{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ m.role }}: {{ m.content }}{% endfor %}"
)
FUNCTION: dict[str, Any] = {"type": "function", "name": "f", "parameters": None}
SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
}
INPUT: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
EDITS = {
    "edits": [
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "clear_tool_uses_20250919"},
    ]
}


def ask(server: Running, path: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json={**LEAST[path], **fields}, timeout=60)


@pytest.fixture
def written(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Any:
    """A function that gives a request's prompt as a template writes it."""

    def prompt(template: str, path: str, fields: dict[str, Any]) -> tuple[str, str]:
        config = replace(server.service.config, chat_template=template, log_prompts=True)
        monkeypatch.setattr(server.service, "config", config)
        caplog.clear()
        with caplog.at_level(logging.INFO, "penstock.server"):
            answer = ask(server, path, fields)
        assert answer.status_code == 200, answer.text
        said = [getattr(record, "fields", {}) for record in caplog.records]
        (text,) = [fields["prompt"] for fields in said if "prompt" in fields]
        return text, answer.headers.get(HEADER, "")

    return prompt


@pytest.mark.parametrize(
    ("path", "fields", "unheeded"),
    [
        (CHAT, {"verbosity": "low", "store": True}, "store, verbosity"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"reasoning_effort": "none", "verbosity": None, "store": False}, ""),
        (CHAT, {"metadata": {"run": "7"}, "session_id": "a"}, ""),
        (CHAT, {"thinking_token_budget": 0}, ""),
        (CHAT, {"thinking_token_budget": -1}, ""),
        (CHAT, {"thinking_token_budget": 512}, "thinking_token_budget"),
        (ANSWER, {"text": {"verbosity": "high"}}, "text.verbosity"),
        (
            ANSWER,
            {"reasoning": {"effort": "low", "summary": "auto"}},
            "reasoning.summary, reasoning.effort",
        ),
        (
            ANSWER,
            {
                "client_metadata": {"session": "1"},
                "store": False,
                "include": ["reasoning.encrypted_content"],
                "tools": [{"type": "web_search"}, FUNCTION, {"type": "web_search_preview"}],
            },
            "tools (web_search), tools (web_search_preview), include (reasoning.encrypted_content)",
        ),
        (MESSAGES, {"thinking": {"type": "disabled"}}, ""),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking"),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}},
            "thinking.budget_tokens, thinking.display, thinking",
        ),
        (MESSAGES, {"output_config": {"effort": "max"}}, "output_config.effort"),
        (
            MESSAGES,
            {"context_management": EDITS},
            "context_management.edits (clear_tool_uses_20250919)",
        ),
        (MESSAGES, {"tools": [{**INPUT, "eager_input_streaming": True}]}, ""),
    ],
)
def test_what_has_no_effect_is_named(
    server: Running, path: str, fields: dict[str, Any], unheeded: str
) -> None:
    answer = ask(server, path, fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(HEADER, "") == unheeded


def test_in_the_log(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.server"):
        ask(server, CHAT, {"verbosity": "low"})
    said = [getattr(record, "fields", {}) for record in caplog.records]
    assert [fields["unheeded"] for fields in said if "unheeded" in fields] == ["verbosity"]


@pytest.mark.parametrize(
    ("path", "fields", "begins", "unheeded"),
    [
        (CHAT, {"reasoning_effort": "low"}, "Reasoning: low<|im", ""),
        (CHAT, {"reasoning_effort": "none"}, "Don't think.<|im", ""),
        (CHAT, {"thinking_token_budget": 0}, "Don't think.<|im", ""),
        (
            CHAT,
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "Reasoning: high<|im",
            "",
        ),
        (ANSWER, {"reasoning": {"effort": "medium"}}, "Reasoning: medium<|im", ""),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "Don't think.<|im", ""),
        (MESSAGES, {"thinking": {"type": "enabled"}}, "<|im", ""),
        (MESSAGES, {"output_config": {"effort": "max"}}, "Reasoning: max<|im", ""),
        (MESSAGES, {"chat_template_kwargs": {"reasoning_effort": "x"}}, "Reasoning: x<|im", ""),
    ],
)
def test_templates_are_told(
    written: Any, path: str, fields: dict[str, Any], begins: str, unheeded: str
) -> None:
    text, named = written(TELLS, path, fields)
    assert text.startswith(begins)
    assert named == unheeded


@pytest.mark.parametrize(
    ("taken", "asked", "told"),
    [
        (["low"], "low", "low"),
        (["low"], "high", "low"),
        (["low", "medium", "high"], "max", "high"),
        (["low", "medium", "high"], "minimal", "low"),
        (["medium", "xhigh"], "high", "xhigh"),
        (["none", "default"], "high", None),
    ],
)
def test_values_that_a_template_refuses(
    written: Any, taken: list[str], asked: str, told: str | None
) -> None:
    """As Qwen3.8's does with "high", which Claude Code sends: the nearest, or none."""
    picky = f"{{% if reasoning_effort is defined and reasoning_effort not in {taken} %}}" \
        "{{ raise_exception('no') }}{% endif %}" + TELLS  # fmt: skip
    begin = "" if told is None else f"Reasoning: {told}"
    text, named = written(picky, MESSAGES, {"output_config": {"effort": asked}})
    assert text == f"{begin}<|im_start|>user: Hello"
    assert named == ("output_config.effort" if told is None else "")


def test_an_empty_result_is_empty() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": ""}]}
    body = MessagesRequest.model_validate(
        {**LEAST[MESSAGES], "messages": [{"role": "user", "content": [result]}]}
    )
    assert body.conversation().messages[-1].content == ""


def test_thinking_is_left_out_before_a_compaction() -> None:
    thought = {"type": "thinking", "thinking": "So."}
    compaction = {"type": "compaction", "content": "A summary."}
    for blocks in ([thought, compaction, {"type": "text", "text": "Yes."}], [thought, compaction]):
        turns = [
            *ASK,
            {"role": "assistant", "content": blocks},
            *ASK,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "No."}]},
            *ASK,
        ]
        edits = [{"type": "clear_thinking_20251015"}, {"type": "compact_20260112"}]
        body = MessagesRequest.model_validate(
            {**LEAST[MESSAGES], "messages": turns, "context_management": {"edits": edits}}
        )
        found = body.conversation()
        assert found.summary == "A summary."
        assert [m.reasoning_content for m in found.messages if m.role == "assistant"][-1] == "So."


def test_the_system_comes_first_where_it_must(written: Any) -> None:
    """Agents send their surroundings behind the user's message, or two developers' messages."""
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": "It rains."},
        {"role": "user", "content": "Well?"},
    ]
    text, _ = written(STRICT, MESSAGES, {"system": "Be brief.", "messages": turns})
    assert text.endswith(
        "<|im_start|>system: Be brief.\n\nIt rains.<|im_start|>user: Hello<|im_start|>user: Well?"
    )
    several = [{"role": "developer", "content": text} for text in "ab"]
    text, _ = written(STRICT, ANSWER, {"input": [*several, *ASK]})
    assert text.endswith("<|im_start|>system: a\n\nb<|im_start|>user: Hello")


def test_threads_are_refused_as_clients_know_it(server: Running) -> None:
    client = Anthropic(base_url=server.url, api_key="none")
    with client, pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**LEAST[MESSAGES], extra_body={"thread": {"type": "create"}})
    assert isinstance(error.value.body, dict)
    assert error.value.body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


@pytest.mark.parametrize(
    ("keep", "left"),
    [(None, 1), ("all", 3), ({"type": "all"}, 3), ({"type": "thinking_turns", "value": 2}, 2)],
)
def test_reasoning_of_earlier_turns_is_left_out(keep: Any, left: int) -> None:
    said = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": f"So {i}."},
                                          {"type": "text", "text": f"Yes {i}."}]}
        for i in range(3)
    ]  # fmt: skip
    turns = [turn for one in said for turn in (*ASK, one)]
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    body = MessagesRequest.model_validate(
        {**LEAST[MESSAGES], "messages": [*turns, *ASK], "context_management": {"edits": [edit]}}
    )
    found = [m.reasoning_content for m in body.conversation().messages if m.role == "assistant"]
    assert found == [*[None] * (3 - left), *[f"So {i}." for i in range(3 - left, 3)]]


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ([{"type": "compact_20260112"}] * 2, "compact_20260112 is there twice"),
        ([{"type": "clear_everything"}], "'clear_everything'"),
        ([{"type": i} for i in range(5000)], "has 5,000 entries; at most 16"),
        (
            [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns"}}],
            "thinking_turns, and nothing else, has a value",
        ),
    ],
)
def test_edits_that_cannot_be(server: Running, edits: list[Any], words: str) -> None:
    answer = ask(server, MESSAGES, {"context_management": {"edits": edits}})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_deferred_tools_are_told_of_when_they_are_found() -> None:
    """A client's own search of tools, as Claude Code has one."""
    tools = [INPUT, {**INPUT, "name": "g", "defer_loading": True}]
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "a",
             "content": [{"type": "tool_reference", "tool_name": "g"}]}  # fmt: skip
    turns = [*ASK, {"role": "assistant", "content": [called]}, {"role": "user", "content": [found]}]
    for messages, names in ((ASK, ["f"]), (turns, ["f", "g"])):
        body = MessagesRequest.model_validate({**LEAST[MESSAGES], "messages": messages,
                                               "tools": tools})  # fmt: skip
        assert [function.name for function in body.offer().callable] == names
    assert body.conversation().messages[-1].content == "The tool g can be called now."


def test_deferred_tools_that_cannot_be(server: Running) -> None:
    found = {"type": "tool_result", "tool_use_id": "a",
             "content": [{"type": "tool_reference", "tool_name": "nobody"}]}  # fmt: skip
    for fields, words in (
        ({"messages": [{"role": "user", "content": [found]}]}, "'nobody', which isn't among"),
        ({"tools": [{**INPUT, "name": "bad name!", "defer_loading": True}]}, "tools[0].name"),
    ):
        answer = ask(server, MESSAGES, {"tools": [INPUT], **fields})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
    named = {
        "tools": [{**INPUT, "defer_loading": True}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    assert ask(server, MESSAGES, {**named, "max_tokens": 30}).status_code == 200


def test_tools_keep_their_places(server: Running) -> None:
    tools = [{"type": "web_search"}, {**FUNCTION, "name": "bad name!"}]
    assert "tools[1].name" in ask(server, ANSWER, {"tools": tools}).text
    assert ask(server, ANSWER, {"tools": [None]}).status_code == 400
    kept = ask(server, ANSWER, {"tools": [{"type": "web_search"}, FUNCTION]}).json()["tools"]
    assert [tool["name"] for tool in kept] == ["f"]


def test_a_form_beside_a_call_that_must_be_made(server: Running) -> None:
    """The tool decides, as with vLLM."""
    tool = {"type": "function", "function": {"name": "f", "parameters": SMALL}}
    form = {"type": "json_schema", "json_schema": {"name": "o", "schema": {"type": "integer"}}}
    asked = {"tools": [tool], "tool_choice": "required", "response_format": form, "max_tokens": 60}
    answer = ask(server, CHAT, asked)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "response_format"
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"a"}


def test_forms_that_agree(server: Running) -> None:
    """Clients of several versions of vLLM send both."""
    grammar = 'start: "yes"'
    both = {"guided_grammar": grammar, "structured_outputs": {"grammar": grammar}}
    answer = ask(server, CHAT, both | {"max_tokens": 9})
    assert answer.json()["choices"][0]["message"]["content"] == "yes"
    assert ask(server, CHAT, both | {"guided_grammar": 'start: "no"'}).status_code == 400


def test_objects_are_closed_unless_a_request_opens_them() -> None:
    def form(**fields: Any) -> Any:
        asked, _ = ChatRequest.model_validate(LEAST[CHAT] | fields).structure()
        assert asked is not None
        return json.loads(asked.text)

    shut = {**SMALL, "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "o", "schema": SMALL}}
    assert form(response_format=named) == form(guided_json=SMALL) == shut
    assert form(structured_outputs={"json": SMALL}) == shut
    opened = {"json": SMALL, "disable_additional_properties": False}
    assert form(structured_outputs=opened) == SMALL


def test_a_prompt_is_counted_as_it_is_read(server: Running) -> None:
    asked = {"input": "Hello", "instructions": "Be brief.", "tools": [FUNCTION]}
    counted = httpx.post(f"{server.url}{ANSWER}/input_tokens", json=asked, timeout=60).json()
    read = ask(server, ANSWER, asked).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": read}


def test_what_is_too_long_is_said_in_the_apis_words(server: Running) -> None:
    """By which clients shorten a conversation, or ask another model."""
    long = {"messages": [{"role": "user", "content": "hello " * 3000}]}
    said = ask(server, CHAT, long).json()["error"]
    assert said["code"] == "context_length_exceeded"
    assert said["message"].startswith("This model's maximum context length is 1024 tokens.")
    message = ask(server, MESSAGES, long).json()["error"]["message"]
    assert re.search(r"prompt is too long: \d+ tokens > 1023 maximum\.", message)


def test_parts_that_come_back_whole(server: Running) -> None:
    """As OpenAI's agents send an earlier answer: its message within its part."""
    part = {"type": "text", "text": "Yes", "role": "assistant", "refusal": None,
            "reasoning": "So.", "tool_calls": []}  # fmt: skip
    turns = [*ASK, {"role": "assistant", "content": [part]}, *ASK]
    answer = ask(server, CHAT, {"messages": turns})
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


def test_references_say_the_way_out(server: Running) -> None:
    reference = [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "x"}]
    said = ask(server, ANSWER, {"input": reference}).json()["error"]["message"]
    assert "store: false" in said
