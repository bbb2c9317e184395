"""Which tools may be called: `allowed_tools`, the older API's `functions`, and what is wrong."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from penstock.server.routes import tools as routes
from tests.server.conftest import Running
from tests.server.tools.test_chat import ASK, SHORT, F, G, is_f, said

OLDER: list[Any] = [
    {"name": "f", "parameters": SHORT},
    {"name": "g", "parameters": {"type": "object", "properties": {},
                                 "additionalProperties": False}},
]  # fmt: skip
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called(
    client: OpenAI, as_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_family("hermes")
    for _ in range(3):
        one = said(
            client, tools=[F, G], tool_choice=allowed("required", "g"), temperature=1.5,
            parallel_tool_calls=False,
        )  # fmt: skip
        assert [name for name, _ in one["calls"]] == ["g"]
    monkeypatch.setattr(routes, "_form", lambda how, asked, field: None)
    for name, calls in (("g", [("g", "{}")]), ("f", [])):
        text = CALL.format(name, "{}")
        found = said(
            client, tools=[F, G], tool_choice=allowed("auto", "g"),
            extra_body={"structured_outputs": {"choice": [text]}},
        )  # fmt: skip
        assert (found["calls"], found["content"]) == (calls, "" if calls else text)


def test_allowed_tools_leave_the_prompt_as_it_is(client: OpenAI) -> None:
    def prompt(choice: Any) -> Any:
        answer = client.chat.completions.create(
            model="stories", messages=ASK, tools=[F, G], tool_choice=choice, max_tokens=1,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        return answer.model_extra["prompt_token_ids"]

    assert prompt(allowed("auto", "g")) == prompt("auto")


def test_allowed_tools_of_a_response(client: OpenAI, as_family: Any) -> None:
    as_family("hermes")
    tools: list[Any] = [{"type": "function", "name": x["name"], "parameters": x["parameters"]}
                        for x in OLDER]  # fmt: skip
    choice: Any = {"type": "allowed_tools", "mode": "required",
                   "tools": [{"type": "function", "name": "g"}]}  # fmt: skip
    answer = client.responses.create(
        model="stories", input="Hi", tools=tools, tool_choice=choice, max_output_tokens=60,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert [item.name for item in answer.output if item.type == "function_call"] == ["g"]
    assert answer.tool_choice.model_dump() == choice


# ── the older words ──────────────────────────────────────────────────────────────────────────


def test_functions_are_answered_as_they_were(client: OpenAI, as_family: Any) -> None:
    as_family("hermes")
    asked: dict[str, Any] = {
        "model": "stories", "messages": ASK, "functions": OLDER, "seed": 5, "max_tokens": 100,
        "function_call": {"name": "f"},
    }  # fmt: skip
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "f"
    assert is_f(choice.message.function_call.arguments)
    names, arguments, reasons = [], "", []
    for chunk in client.chat.completions.create(**asked, stream=True):
        (piece,) = chunk.choices
        assert piece.delta.tool_calls is None
        reasons += [piece.finish_reason] if piece.finish_reason else []
        if piece.delta.function_call is not None:
            names += [piece.delta.function_call.name] if piece.delta.function_call.name else []
            arguments += piece.delta.function_call.arguments
    assert (names, arguments) == (["f"], choice.message.function_call.arguments)
    assert reasons == ["function_call"]


def test_an_older_conversation_reads_as_a_new_one(server: Running) -> None:
    called = {"name": "f", "arguments": '{"n": 1}'}
    older = [
        *ASK,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "f", "content": "rain"},
    ]
    newer = [
        *ASK,
        {"role": "assistant", "tool_calls": [
            {"id": "function0", "type": "function", "function": called}]},
        {"role": "tool", "name": "f", "content": "rain", "tool_call_id": "function0"},
    ]  # fmt: skip
    with server.client() as http:
        tokens = [http.post("/tokenize", json={"messages": x}).json() for x in (older, newer)]
    assert tokens[0]["tokens"] == tokens[1]["tokens"]


# ── what is wrong ────────────────────────────────────────────────────────────────────────────

WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [F], "tool_choice": allowed("auto", "h")}, "tool_choice.allowed_tools.tools",
     "names 'h', which isn't among the tools: f"),
    ({"tools": [F], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools",
     "allows no tool at all"),
    ({"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice", 'send \'none\', \'auto\', \'required\', {"type": "function", "function": '),
    ({"tools": [F], "tool_choice": {"name": "f"}}, "tool_choice", "an object of type None"),
    ({"tools": [F], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice",
     '{"type": "function", "function": {"name": …}}'),
    ({"tools": [F], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice",
     "an object of type 'custom' isn't a choice"),
    ({"tools": [F], "tool_choice": 3}, "tool_choice", "3 isn't a choice"),
    ({"functions": OLDER, "tools": [F]}, "tools", "the older words"),
    ({"functions": OLDER, "tool_choice": "auto"}, "tool_choice", "Send tools and tool_choice"),
    ({"function_call": "none", "tools": [F]}, "tools", "the older words"),
    ({"functions": OLDER, "function_call": {"name": "h"}}, "function_call.name",
     "isn't among the functions: f, g"),
    ({"function_call": {"name": "h"}}, "function_call.name", "there are no functions"),
    ({"functions": OLDER, "function_call": "any"}, "function_call", "'any' isn't a choice"),
    ({"functions": [{"name": "f", "parameters": {"type": "list"}}]},
     "functions[0].parameters.type", "must be 'object'"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{"}}]},
     "messages[0].tool_calls[0].function.arguments", "can't be read"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend",
     "Send 'auto', 'guidance' or 'llguidance', or leave it out."),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param", "words"), WRONG)
def test_what_is_wrong_says_the_forms(
    client: OpenAI, more: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "stories", "messages": ASK, "max_tokens": 1, **more}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body=body, cast_to=object)
    error = refused.value.body
    assert isinstance(error, dict)
    assert (error["param"], words in error["message"]) == (param, True), error


def test_the_backend_that_runs_may_be_named(client: OpenAI) -> None:
    for name in ("auto", "guidance", "llguidance"):
        answer = client.chat.completions.create(
            model="stories", messages=ASK, max_tokens=4,
            extra_body={"guided_regex": "[0-9]", "guided_decoding_backend": name},
        )  # fmt: skip
        assert json.loads(answer.choices[0].message.content or "") in range(10)
