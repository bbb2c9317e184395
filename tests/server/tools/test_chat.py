"""Tools through the official `openai` client: whole and streamed, forced and recorded."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
import pytest
from openai import OpenAI

from penstock.server.routes import tools as routes
from penstock.server.tools import constraint
from penstock.server.tools.families import TOOL_PARSERS
from tests.server.conftest import Running
from tests.server.tools.conftest import TERSE
from tests.server.tools.recorded import RECORDED, SCHEMAS

ASK = [{"role": "user", "content": "Weather?"}]


def tool(name: str, schema: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


SHORT = {
    "type": "object",
    "properties": {
        "at": {"enum": ["Rome", "Oslo"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["at", "n"],
    "additionalProperties": False,
}
F, G = (
    tool("f", SHORT),
    tool("g", {"type": "object", "properties": {}, "additionalProperties": False}),
)


def is_f(arguments: str) -> bool:
    found = json.loads(arguments)
    return (
        found.keys() == {"at", "n"}
        and found["at"] in ("Rome", "Oslo")
        and isinstance(found["n"], int)
        and 0 <= found["n"] <= 99
    )


def is_broken(arguments: str) -> bool:
    try:
        return not isinstance(json.loads(arguments), dict)
    except ValueError:
        return True


def said(client: OpenAI, **options: Any) -> dict[str, Any]:
    """A chat's answer, checked to be the same streamed."""
    asked = {"model": "stories", "messages": ASK, "max_tokens": 150, "seed": 5} | options
    (choice,) = client.chat.completions.create(**asked).choices
    message = choice.message
    whole = {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "calls": [(x.function.name, x.function.arguments) for x in message.tool_calls or []],
        "reason": choice.finish_reason,
    }
    ids = [call.id for call in message.tool_calls or []]
    content, reasoning, reason, calls = "", "", None, dict[int, list[str]]()
    for chunk in client.chat.completions.create(**asked, stream=True):
        (piece,) = chunk.choices
        content += piece.delta.content or ""
        reasoning += getattr(piece.delta, "reasoning_content", None) or ""
        reason = piece.finish_reason or reason
        for call in piece.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                assert call.type == "function"
                calls[call.index] = [call.function.name, ""]
                ids.append(call.id)
            calls[call.index][1] += call.function.arguments
    assert len(set(ids)) == len(ids)
    # What was sent of a call that breaks off can't be taken back; it is in the content too.
    streamed = [tuple(x) for x in calls.values() if not (content and is_broken(x[1]))]
    assert streamed == whole["calls"]
    assert {"content": content, "reasoning": reasoning, "reason": reason} == {
        name: whole[name] for name in ("content", "reasoning", "reason")
    }
    return whole


# Harmony's reasoning, which may come first, has no end of its own with the embedded model.
@pytest.mark.parametrize("family", sorted(TOOL_PARSERS.keys() - {"openai"}))
def test_a_call_that_must_be_made_is_made(client: OpenAI, as_family: Any, family: str) -> None:
    """The embedded model, held to each family's form."""
    as_family(family)
    named = said(client, tools=[F], tool_choice={"type": "function", "function": {"name": "f"}})
    ((name, arguments),) = named["calls"]
    assert name == "f"
    assert is_f(arguments)
    assert (named["content"], named["reason"]) == ("", "tool_calls")
    one = said(client, tools=[G], tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = one["calls"]
    assert (name, json.loads(arguments)) == ("g", {})


def test_calls_in_parallel(client: OpenAI, as_family: Any) -> None:
    as_family("hermes")
    found = said(client, tools=[F, G], tool_choice="required", temperature=1.5, max_tokens=300)
    for name, arguments in found["calls"]:
        assert is_f(arguments) if name == "f" else json.loads(arguments) == {}
    options = {"tools": [F, G], "tool_choice": "required", "n": 3, "seed": 1, "max_tokens": 200}
    counts = []
    for several in (True, False):
        more = {"min_tokens": 80} if several else {}  # no call alone has as many characters
        answer = client.chat.completions.create(
            model="stories", messages=ASK, parallel_tool_calls=several, extra_body=more, **options
        )
        counts.append([len(choice.message.tool_calls or []) for choice in answer.choices])
    assert counts[1] == [1, 1, 1]
    assert min(counts[0]) > 1


@pytest.mark.parametrize("family", sorted(RECORDED))
def test_recorded_outputs(
    client: OpenAI, as_family: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The engine is made to write what a model of the family has written."""
    as_family(family)
    monkeypatch.setattr(routes, "_form", lambda how, asked, field: None)
    tools = [tool(name, schema) for name, schema in SCHEMAS.items()]
    for what, text, content, calls in RECORDED[family]:
        found = said(
            client,
            tools=tools,
            max_tokens=None,
            extra_body={"structured_outputs": {"choice": [text]}},
        )
        assert [(n, json.loads(a)) for n, a in found["calls"]] == calls, what
        assert found["content"] == content, what
        assert found["reason"] == ("tool_calls" if calls else "stop"), what


# ── what is wrong ────────────────────────────────────────────────────────────────────────────

HUGE = {
    "type": "object",
    "properties": {"a": {"enum": [f"a city, {i:012}" for i in range(200_000)]}},
}
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("a space", {"tools": [F, tool("a tool", SHORT)]}, "tools[1].function.name", "a-z A-Z 0-9 _ -"),
    ("a long name", {"tools": [tool("x" * 65, SHORT)]}, "tools[0].function.name", "1 to 64"),
    ("twice", {"tools": [F, G, F]}, "tools[2].function.name", "as tools[0].function.name is"),
    ("5 MB", {"tools": [tool("f", HUGE)]}, "tools[0].function", "at most 1,048,576"),
    (
        "no type of JSON",
        {"tools": [tool("f", {"type": "object", "properties": {"a": {"type": "text"}}})]},
        "tools[0].function.parameters.properties.a.type",
        "must be one of array, boolean",
    ),
    (
        "properties that are a list",
        {"tools": [tool("f", {"properties": ["a"]})]},
        "tools[0].function.parameters.properties",
        "an object of schemas",
    ),
    (
        "not an object's",
        {"tools": [tool("f", {"type": "string"})]},
        "tools[0].function.parameters.type",
        "must be 'object'",
    ),
    (
        "a contradiction",
        {"tools": [tool("f", {"properties": {"a b": {"minimum": 5, "maximum": 3}}})]},
        "tools[0].function.parameters.properties['a b'].minimum",
        "is 5, but maximum is 3",
    ),
    (
        "required and forbidden",
        {"tools": [tool("f", {**SHORT, "required": ["x"]})]},
        "tools[0].function.parameters.required",
        "names 'x', which properties doesn't allow",
    ),
    (
        "a reference to nothing",
        {"tools": [tool("f", {"anyOf": [{"$ref": "#/$defs/x"}]})]},
        "tools[0].function.parameters.anyOf[0].$ref",
        "there is nothing",
    ),
    (
        "an enum of another type",
        {"tools": [tool("f", {"properties": {"a": {"type": "string", "enum": [1]}}})]},
        "tools[0].function.parameters.properties.a.enum",
        "no value of type string",
    ),
    (
        "strict, and not to be followed",
        {
            "tools": [
                tool("f", {"properties": {"a": {"type": "string", "pattern": "(a"}}}, strict=True)
            ]
        },
        "tools[0].function.parameters",
        "tools[0].function.parameters",
    ),
    ("no tools", {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    (
        "another's name",
        {"tools": [F], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        "isn't among the tools: f",
    ),
    ("a choice that isn't one", {"tools": [F], "tool_choice": "any"}, "tool_choice", "required"),
    ("another kind", {"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
    (
        "a form beside them",
        {"tools": [F], "extra_body": {"structured_outputs": {"choice": ["a"]}}},
        "structured_outputs",
        "no room for calls",
    ),
]


@pytest.mark.alone
@pytest.mark.parametrize(("what", "options", "param", "words"), WRONG, ids=[x[0] for x in WRONG])
def test_bad_input_is_refused_at_once(
    client: OpenAI, as_family: Any, what: str, options: dict[str, Any], param: str, words: str
) -> None:
    as_family("hermes")
    body = {"model": "stories", "messages": ASK, "max_tokens": 1} | options
    body |= body.pop("extra_body", {})
    text = json.dumps(body)
    start = time.perf_counter()
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body=json.loads(text), cast_to=object)
    assert time.perf_counter() - start < 5 + len(text) / 1e6  # the client writes and sends it too
    error = refused.value.body
    assert isinstance(error, dict)
    assert error["param"] == param, error
    assert words in error["message"], error


def test_auto_may_be_off(client: OpenAI, as_family: Any) -> None:
    as_family("auto", enable_auto_tool_choice=False)
    with pytest.raises(openai.BadRequestError, match="--no-enable-auto-tool-choice"):
        client.chat.completions.create(model="stories", messages=ASK, tools=[G])
    assert said(client, tools=[G], tool_choice="required", max_tokens=60)["calls"]


# ── what the model is told ───────────────────────────────────────────────────────────────────


NO_TOOLS = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)


def prompt_of(client: OpenAI, server: Running, **options: Any) -> str:
    answer = client.chat.completions.create(
        model="stories", max_tokens=1, extra_body={"return_token_ids": True}, **options
    )
    ids = answer.model_extra["prompt_token_ids"]
    return server.service.prompts.tokenizer.decode(ids, skip_special_tokens=False)


def test_a_template_without_words_for_tools_gets_instructions(
    client: OpenAI, server: Running, as_family: Any
) -> None:
    as_family("auto", chat_template=NO_TOOLS)
    plain = prompt_of(client, server, messages=ASK)
    told = prompt_of(client, server, messages=ASK, tools=[F])
    shown = json.dumps({**F, "function": {"name": "f", "parameters": SHORT}})
    assert shown in told
    assert "<tool_call>" in told
    assert prompt_of(client, server, messages=ASK, tools=[F], tool_choice="none") == plain
    system = [{"role": "system", "content": "Be brief."}, *ASK]
    assert "Be brief.\n\n# Tools" in prompt_of(client, server, messages=system, tools=[F])


CALLED = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n": 1}'}}
HISTORY: list[Any] = [
    *ASK,
    {"role": "assistant", "content": "So.", "tool_calls": [CALLED]},
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
]


def test_calls_are_never_left_out(client: OpenAI, server: Running, as_family: Any) -> None:
    """A template that knows no calls gets them, and what came of them, as text."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    as_family("auto", chat_template=template)
    prompt = prompt_of(client, server, messages=HISTORY)
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
    assert prompt.endswith(
        f"[user]Weather?[assistant]So.\n{call}[user]<tool_response>\nrain\n</tool_response>"
    )
    refuses = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
    refuses += "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    as_family("auto", chat_template=refuses)
    told = prompt_of(client, server, messages=ASK, tools=[G])
    assert told.startswith("[user]# Tools")
    assert told.endswith("Weather?")


def test_reasoning_is_split_off(
    client: OpenAI, as_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_form", lambda how, asked, field: None)
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
    for opened, text, reasoning, content, calls in [
        ("", "<think>\nhm\n</think>\n\nHi.", "hm", "Hi.", 0),
        ("<think>\n", "hm\n</think>\n\nHi.", "hm", "Hi.", 0),
        ("<think>\n", f"hm\n{call}", "hm", "", 1),
        ("<think>\n", f"hm</think>So: {call}", "hm", "So:", 1),
        ("<think></think>", "Hi.", "", "Hi.", 0),
    ]:
        as_family("hermes", chat_template=TERSE + opened, reasoning_parser="qwen3")
        found = said(
            client, tools=[G], max_tokens=None,
            extra_body={"structured_outputs": {"choice": [text]}},
        )  # fmt: skip
        assert (found["reasoning"], found["content"]) == (reasoning, content)
        assert len(found["calls"]) == calls
    as_family("hermes", chat_template=TERSE + "<think>", reasoning_parser="none")
    body = {"structured_outputs": {"choice": ["a</think>b"]}}
    assert said(client, max_tokens=None, extra_body=body)["content"] == "a</think>b"


def test_reasoning_that_isnt_asked_for(
    client: OpenAI, as_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "_form", lambda how, asked, field: None)
    as_family("hermes", chat_template=TERSE + "<think>\n", reasoning_parser="qwen3")
    for shown, reasoning in ((False, ""), (True, "hm"), (None, "hm")):
        form = {"choice": ["hm\n</think>\n\nHi."]}
        body = {"structured_outputs": form, "include_reasoning": shown}
        found = said(client, max_tokens=None, extra_body=body)
        assert (found["reasoning"], found["content"]) == (reasoning, "Hi.")


def test_a_call_behind_reasoning_is_held_to_its_form(client: OpenAI, as_family: Any) -> None:
    """Thinking is free and has no end of its own here, so it is kept short by the tag's bias."""
    as_family("hermes", chat_template=TERSE + "<think>", reasoning_parser="deepseek_r1")
    found = said(client, tools=[G], tool_choice="required", max_tokens=400)
    if found["reason"] == "tool_calls":
        assert found["calls"] == [("g", found["calls"][0][1])]
    else:
        assert found["reason"] == "length"
        assert not found["content"]


def test_schemas_are_closed_once(
    client: OpenAI, as_family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    close = constraint.closed
    monkeypatch.setattr(constraint, "closed", lambda x: closed.append(x) or close(x))
    for family in ("hermes", "pythonic", "qwen3_coder"):
        as_family(family)
        closed.clear()
        offered: Any = {"tools": [tool("f", SHORT), G], "tool_choice": "required", "max_tokens": 1}
        client.chat.completions.create(model="stories", messages=ASK, **offered)
        assert closed == [SHORT, G["function"]["parameters"]]


def test_a_form_or_a_call(client: OpenAI, as_family: Any) -> None:
    """With response_format an answer is either in that form or calls."""
    as_family("hermes")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHORT}}
    found = said(client, tools=[G], response_format=form, max_tokens=120)
    if found["calls"]:
        assert all(name == "g" for name, _ in found["calls"])
    else:
        assert is_f(found["content"])
