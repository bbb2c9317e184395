"""Functions in namespaces, as Codex declares those of MCP servers."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import openai
import pytest
from openai import OpenAI

from penstock.server.protocol.items import InputItem
from penstock.server.protocol.response_tools import functions_of
from penstock.server.protocol.responses import InputTokensRequest, ResponsesRequest
from tests.server.conftest import Running
from tests.server.tools.test_chat import SHORT, is_f
from tests.server.tools.test_responses import F, said

SHELL: Any = {"type": "function", "name": "shell", "parameters": SHORT, "strict": False}
MCP: Any = {"type": "namespace", "name": "mcp__x", "description": "A server.", "tools": [F, SHELL]}
FREE: Any = {"type": "custom", "name": "patch", "format": {"type": "text"}}
LEAST: Any = {"model": "stories", "input": "Weather?", "max_output_tokens": 2}
CHOICE: Any = {"type": "function", "name": "f", "namespace": "mcp__x"}


def named(*tools: Any) -> dict[str, str | None]:
    """What a model is told: names and descriptions."""
    body = ResponsesRequest.model_validate({**LEAST, "tools": list(tools)})
    return {x.name: x.description for x in functions_of(body.tools or ())}


@pytest.mark.parametrize(
    ("namespace", "name"),
    [("mcp__x", "mcp__x__f"), ("mcp__x__", "mcp__x__f"), ("a", "a__f"), ("functions", "f")],
)
def test_a_model_knows_functions_by_one_name(namespace: str, name: str) -> None:
    assert list(named({**MCP, "name": namespace, "tools": [F]})) == [name]
    item = InputItem.model_validate(
        {"type": "function_call", "call_id": "a", "name": "f", "namespace": namespace,
         "arguments": "{}"}
    )  # fmt: skip
    (call,) = item.message().tool_calls or ()
    assert call.function.name == name


def test_a_namespace_is_described_once() -> None:
    described = {**SHELL, "description": "Runs it."}
    assert named({**MCP, "tools": [FREE, described, F]}) == {
        "mcp__x__shell": "A server.\n\nRuns it.", "mcp__x__f": None,
    }  # fmt: skip
    assert named(MCP) == {"mcp__x__f": "A server.", "mcp__x__shell": None}
    assert named({**MCP, "description": ""}) == {"mcp__x__f": None, "mcp__x__shell": None}


@pytest.mark.parametrize("namespace", ["mcp__x", "mcp__x__"])
def test_a_call_has_name_and_namespace(client: OpenAI, as_family: Any, namespace: str) -> None:
    as_family("hermes")
    tools = [SHELL, {**MCP, "name": namespace}]
    choice = {**CHOICE, "namespace": namespace}
    answer = said(client, tools=tools, tool_choice=choice)
    (call,) = answer.output
    assert (call.type, call.name, call.namespace) == ("function_call", "f", namespace)
    assert is_f(call.arguments)
    shown = answer.tools[1].model_dump(exclude_none=True)
    assert shown == {**MCP, "name": namespace}
    assert answer.model_dump()["tool_choice"]["namespace"] == namespace
    only = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    (call,) = said(client, tools=tools, tool_choice=only, parallel_tool_calls=False).output
    assert (call.name, call.namespace) == ("f", namespace)


def test_every_event_of_a_call_has_both(server: Running, as_family: Any) -> None:
    as_family("hermes")
    asked = {**LEAST, "max_output_tokens": 120, "stream": True, "temperature": 0,
             "tools": [MCP], "tool_choice": CHOICE}  # fmt: skip
    text = httpx.post(f"{server.v1}/responses", json=asked, timeout=60).text
    events = [json.loads(x[6:]) for x in text.splitlines() if x.startswith("data: {")]
    found = {event["type"].removeprefix("response."): event for event in events}
    for name in ("output_item.added", "output_item.done"):
        assert (found[name]["item"]["name"], found[name]["item"]["namespace"]) == ("f", "mcp__x")
    done = found["function_call_arguments.done"]
    assert (done["name"], done["namespace"]) == ("f", "mcp__x")
    assert found["completed"]["response"]["output"][0]["namespace"] == "mcp__x"


def test_functions_is_no_namespace(server: Running, as_family: Any) -> None:
    """Codex takes a call without a namespace for one of these."""
    as_family("hermes")
    asked = {**LEAST, "max_output_tokens": 120, "tool_choice": "required", "temperature": 0,
             "tools": [{**MCP, "name": "functions", "tools": [F]}]}  # fmt: skip
    for choice in ("required", {**CHOICE, "namespace": "functions"}, {**F, "parameters": None}):
        if isinstance(choice, dict):
            choice = {key: choice[key] for key in choice if key in CHOICE}
        given = {**asked, "tool_choice": choice}
        answer = httpx.post(f"{server.v1}/responses", json=given, timeout=60).json()
        assert answer["output"][0]["name"] == "f"
        assert "namespace" not in answer["output"][0]


def test_custom_tools_in_a_namespace_are_a_hint(server: Running) -> None:
    asked = {**LEAST, "tools": [{**MCP, "tools": [FREE, F]}, {"type": "web_search"}]}
    answer = httpx.post(f"{server.v1}/responses", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-penstock-unheeded"] == "tools (web_search), tools (custom)"
    (shown,) = answer.json()["tools"]
    assert [tool["name"] for tool in shown["tools"]] == ["f"]
    only = {**asked, "tools": [{**MCP, "tools": [FREE]}]}
    assert httpx.post(f"{server.v1}/responses", json=only, timeout=60).status_code == 200


def test_calls_go_back_as_they_came(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages %}{{ m.tool_calls or m.content }}{% endfor %}"
    config = replace(server.service.config, chat_template=template, log_prompts=True)
    monkeypatch.setattr(server.service, "config", config)
    items = [
        {"role": "user", "content": "Weather?"},
        {"type": "function_call", "call_id": "a", "name": "f", "namespace": "mcp__x",
         "arguments": '{"n": 1}', "id": "fc_1", "status": "completed"},
        {"type": "function_call_output", "call_id": "a", "output": "rain", "name": "f",
         "namespace": "mcp__x"},
    ]  # fmt: skip
    with caplog.at_level(logging.INFO, "penstock.server"):
        answer = httpx.post(f"{server.v1}/responses", json={**LEAST, "input": items}, timeout=60)
    assert answer.status_code == 200, answer.text
    (text,) = [x.fields["prompt"] for x in caplog.records if "prompt" in getattr(x, "fields", {})]
    assert "mcp__x__f" in text


def test_they_count_as_tokens_of_the_input(server: Running) -> None:
    def counted(**more: Any) -> int:
        asked = {"input": "Weather?", **more}
        InputTokensRequest.model_validate(asked)
        path = f"{server.v1}/responses/input_tokens"
        tokens: int = httpx.post(path, json=asked, timeout=60).json()["input_tokens"]
        return tokens

    flat = [
        {**F, "name": "mcp__x__f", "description": "A server."},
        {**SHELL, "name": "mcp__x__shell"},
    ]
    assert counted() < counted(tools=[MCP]) == counted(tools=flat)


def test_a_long_name_has_room_beside_its_namespace() -> None:
    long = {**MCP, "name": "n" * 64, "tools": [{**F, "name": "f" * 64}]}
    body = ResponsesRequest.model_validate({**LEAST, "tools": [long]})
    (function,) = body.offer().functions
    assert function.name == "n" * 64 + "__" + "f" * 64
    assert body.offer().apart(function.name) == {"name": "f" * 64, "namespace": "n" * 64}


INNER = {**F, "name": "a b"}
WRONG: list[tuple[Any, str, str]] = [
    ({"tools": [{**MCP, "tools": [INNER]}]}, "tools[0].tools[0].name", "is 'a b'; a name has 1"),
    ({"tools": [{**MCP, "tools": [{**F, "name": "f" * 65}]}]}, "tools[0].tools[0].name", "1 to 64"),
    ({"tools": [{**MCP, "name": "a.b"}]}, "tools[0].name", "'a.b'"),
    ({"tools": [{**MCP, "name": ""}]}, "tools[0].name", "''"),
    ({"tools": [{**MCP, "name": None}]}, "tools[0].name", "null"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools", "is missing"),
    ({"tools": [{**MCP, "tools": {}}]}, "tools[0].tools", "must be a list"),
    ({"tools": [{**MCP, "tools": [None]}]}, "tools[0].tools", "[0] is null"),
    ({"tools": [{**MCP, "tools": ["f"]}]}, "tools[0].tools[0]", "must be an object"),
    ({"tools": [{**MCP, "tools": [MCP]}]}, "tools[0].tools", "type 'namespace'"),
    ({"tools": [{**MCP, "more": 1}]}, "tools[0].more", "isn't a field"),
    ({"tools": [F, F | {"type": "custom"}]}, "tools", "type 'custom'"),
    ({"tools": [{**MCP, "tools": [F, F]}]}, "tools[0].tools[1].name",
     "is 'mcp__x__f', as tools[0].tools[0].name is"),
    ({"tools": [{**F, "name": "mcp__x__f"}, MCP]}, "tools[1].tools[0].name", "tools[0].name is"),
    ({"tools": [MCP, {**MCP, "name": "mcp__x__"}]}, "tools[1].tools[0].name", "'mcp__x__f'"),
    ({"tools": [{**MCP, "tools": [{**F, "parameters": {"type": "array"}}]}]},
     "tools[0].tools[0].parameters.type", "'object'"),
    ({"tools": [{**MCP, "tools": [{**F, "name": f"f{i}"} for i in range(600)]},
                {**MCP, "name": "n", "tools": [{**F, "name": f"f{i}"} for i in range(600)]}]},
     "tools", "at most 1,024"),
    ({"tools": [MCP], "tool_choice": {**CHOICE, "namespace": None}}, "tool_choice.name",
     "names 'f', which isn't among the tools: mcp__x__f"),
    ({"tools": [MCP], "tool_choice": {**CHOICE, "namespace": 7}}, "tool_choice", "namespace"),
    ({"tools": [MCP], "tool_choice": {**CHOICE, "namespace": "y"}}, "tool_choice.name", "'y__f'"),
    ({"tools": [{**MCP, "tools": []}], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"input": [{"role": "user", "content": "x", "namespace": "n"}]}, "input[0].namespace",
     "isn't supported"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "param", "words"), WRONG)
def test_bad_input_is_refused(client: OpenAI, options: Any, param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{**LEAST, **options})
    assert refused.value.param == param
    assert words in refused.value.message
