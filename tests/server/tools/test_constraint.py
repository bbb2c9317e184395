"""The forms that calls are held to: what templates write is let through, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import RequestError
from penstock.grammar import Grammars
from penstock.server import ServerConfig
from penstock.server.called import Called
from penstock.server.metrics import Metrics
from penstock.server.routes import tools as routes
from penstock.server.tools import harmony
from penstock.server.tools.constraint import (
    behind_analysis,
    behind_reasoning,
    calls,
    constrains,
    structured,
    text_or_calls,
)
from penstock.server.tools.events import Call
from penstock.server.tools.families import TOOL_PARSERS
from penstock.server.tools.forms import NAME, Form
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
from penstock.server.tools.plan import Tooling
from penstock.server.tools.reasoning import ThinkTags
from penstock.tokenizer import Tokenizer
from tests.server.tools.test_templates import TEMPLATES, rows, template, written

STORIES = Path(__file__).resolve().parents[3] / "src" / "penstock" / "assets" / "stories"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["c", "f"]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
GOOD, MORE = {"city": "Köln", "days": 3}, {"city": 'a "b" [c]', "days": 1, "units": "f"}
FORMS = {name: family.form for name, family in TOOL_PARSERS.items()}
JSON_FORMS = [name for name, form in FORMS.items() if form.arguments == "json"]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.from_folder(STORIES)
    eos = tokenizer.token_to_id("<|im_end|>")
    assert eos is not None
    return Grammars(tokenizer, tokenizer.vocab_size, [eos])


def takes(grammars: Grammars, part: dict[str, Any], text: str) -> bool:
    """Whether a text is whole in this form."""
    state = grammars.start(structured(part))
    try:
        for token in grammars.vocabulary.tokenizer.encode(text, add_special_tokens=False):
            state.accept(token)
    except RequestError:
        return False
    return state.may_end


def offer(mode: Any = "required", *, strict: bool = True, parallel: bool = True) -> Offer:
    functions = [
        Function("tools[0]", "get_weather", None, SCHEMA, strict),
        Function("tools[1]", "get_time", None, {"type": "object", "properties": {}}, strict),
    ]
    return offer_of(functions, Choice(mode), parallel)


def write(name: str, *turn: tuple[str, dict[str, Any]]) -> str:
    form = FORMS[name]
    if form.arguments == "json":
        return form.write(Call(n, json.dumps(a, ensure_ascii=False)) for n, a in turn)
    texts = []
    for tool, arguments in turn:
        if form.arguments == "python":
            body = ", ".join(
                f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items()
            )
        elif form.arguments == "gemma":
            body = as_gemma(arguments)
        else:
            body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
        texts.append(form.before.replace(NAME, tool) + body + form.after)
    return form.opening + form.between.join(texts) + form.closing


def as_gemma(value: Any) -> str:
    """A value as Gemma 4's template writes it, in the order in which it is given."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{as_gemma(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(as_gemma, value))}]"
    return json.dumps(value)


@pytest.mark.parametrize("name", FORMS)
def test_calls_that_must_be_made(grammars: Grammars, name: str) -> None:
    form = FORMS[name]
    part = calls(form, offer())
    weather, time = ("get_weather", GOOD), ("get_time", {})
    assert takes(grammars, part, write(name, weather))
    assert takes(grammars, part, write(name, ("get_weather", MORE)))
    assert takes(grammars, part, write(name, time))
    assert takes(grammars, part, write(name, weather, time)) == form.several
    only_one = calls(form, offer(parallel=False))
    assert takes(grammars, only_one, write(name, weather))
    assert not takes(grammars, only_one, write(name, weather, time))
    for wrong in (
        "Sure. " + write(name, weather),
        write(name, weather)[:-1],
        write(name, weather) + " Done.",
        write(name, ("get_weather", {"city": "Köln"})),
        write(name, ("get_weather", {"city": "Köln", "days": 12})),
        write(name, ("get_weather", {**GOOD, "other": 1})),
        write(name, ("get_weather", {**GOOD, "units": "k"})),
        write(name, ("get_rain", GOOD)),
        "",
    ):
        assert not takes(grammars, part, wrong), wrong


@pytest.mark.parametrize("name", [name for name in FORMS if name != "openai"])
def test_calls_that_may_be_made(grammars: Grammars, name: str) -> None:
    """Text is free until the family's mark; from then on only a whole call can follow."""
    form = FORMS[name]
    part = text_or_calls(form, offer("auto"))
    weather = ("get_weather", GOOD)
    assert takes(grammars, part, "It rains, [1] {a}.\n")
    before, so = ("", "") if form.leading else ("Let me see.\n\n", "So: ")
    assert takes(grammars, part, before + write(name, weather))
    assert takes(grammars, part, write(name, weather, ("get_time", {})))
    assert not takes(grammars, part, so + write(name, ("get_weather", {"city": "Köln"})))
    only_one = text_or_calls(form, offer("auto", parallel=False))
    assert takes(grammars, only_one, so + write(name, weather))
    assert not takes(grammars, only_one, write(name, weather, weather))
    loose = text_or_calls(form, offer("auto", strict=False))
    if form.arguments == "json":
        assert takes(grammars, loose, write(name, ("get_weather", {"other": [1]})))


def test_what_is_constrained() -> None:
    assert constrains(offer("required", strict=False))
    assert constrains(offer("auto"))
    assert not constrains(offer("auto", strict=False))
    assert not constrains(offer("none"))


@pytest.mark.parametrize("name", JSON_FORMS)
def test_bfcls_answers_are_let_through(grammars: Grammars, name: str) -> None:
    """As the families' own templates write them, held to BFCL's own schemas."""
    form = FORMS[name]
    checked = 0
    for schemas, turn in _few(name):
        functions = [Function("t", n, None, schema) for n, schema in schemas.items()]
        part = calls(form, Offer(tuple(functions), "required"))
        text = form.write(Call(n, json.dumps(a, ensure_ascii=False)) for n, a in turn)
        assert takes(grammars, part, text), text
        checked += 1
    assert checked >= 10


def _few(name: str) -> Iterator[tuple[dict[str, Any], list[tuple[str, Any]]]]:
    for schemas, turn in rows("parallel_multiple", 12):
        for one in [turn] if FORMS[name].several else [[call] for call in turn]:
            # In the schema's order, which a grammar has to keep to.
            yield schemas, [(n, _ordered(a, schemas[n])) for n, a in one]


def _ordered(value: Any, schema: Any) -> Any:
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    keys = sorted(value, key=lambda key: list(properties).index(key))
    return {key: _ordered(value[key], properties[key]) for key in keys}


@pytest.mark.parametrize("short", ["Qwen-Qwen2.5-7B-Instruct", "meta-llama-Llama-3.1-8B-Instruct"])
def test_what_templates_write_is_let_through(grammars: Grammars, short: str) -> None:
    (name,) = [x for x in TEMPLATES if x.endswith(short) and x.startswith("llama.cpp")]
    text = written(template(name), [("get_weather", GOOD)])
    start = text.index("<tool_call>" if "Qwen" in short else '{"name"')
    end = text.rindex("<|im_end|>" if "Qwen" in short else "<|eot_id|>")
    assert takes(grammars, calls(FORMS[TEMPLATES[name][0]], offer()), text[start:end])


def test_reasoning_may_come_first(grammars: Grammars) -> None:
    form, tags = FORMS["hermes"], ThinkTags("<think>", "</think>")
    call = write("hermes", ("get_time", {}))
    opened = behind_reasoning(calls(form, offer()), tags, inside=True)
    assert takes(grammars, opened, f"hm <tool_call> {{\n</think>\n\n{call}")
    assert not takes(grammars, opened, call)
    closed = behind_reasoning(calls(form, offer()), tags, inside=False)
    assert takes(grammars, closed, f"<think>\nhm\n</think>\n\n{call}")
    assert takes(grammars, closed, call)
    assert not takes(grammars, closed, f"hm {call}")
    may = behind_reasoning(text_or_calls(form, offer("auto")), tags, inside=True)
    assert takes(grammars, may, f"hm</think>So.\n{call}")
    assert not takes(grammars, may, "hm</think>So.\n<tool_call>no")
    before = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
    after = f"{harmony.END}{harmony.START}assistant"
    part = behind_analysis(calls(FORMS["openai"], offer()), before, after)
    call = write("openai", ("get_weather", GOOD))
    assert takes(grammars, part, call)
    assert takes(grammars, part, f"{before}Hm.{after}{call}")


@pytest.mark.parametrize(
    "name", ["hermes", "llama3_json", "pythonic", "lfm2", "deepseek_v31", "gemma4"]
)
def test_a_mark_in_the_reasoning_is_no_call(grammars: Grammars, name: str) -> None:
    """Where the prompt hasn't opened it: it was read as the answer's text, and so as a call."""
    form, tags = FORMS[name], ThinkTags("<think>", "</think>")
    part = behind_reasoning(text_or_calls(form, offer("auto")), tags, inside=False)
    mark = (form.opening + form.before)[:12]
    call = write(name, ("get_weather", GOOD))
    assert takes(grammars, part, f"<think>use {mark} here</think>\n\nhello")
    assert takes(grammars, part, f"<think>use {mark} or not</think>\n\n{call}")
    assert takes(grammars, part, "It rains. <think>")
    assert takes(grammars, part, call)
    assert not takes(grammars, part, "<think>hm")
    wrong = write(name, ("get_weather", {"city": "Köln"}))
    assert not takes(grammars, part, f"<think>hm</think>\n\n{wrong}")


def test_harmony_answers_or_calls(grammars: Grammars) -> None:
    plan = Tooling(grammars.vocabulary.tokenizer, ServerConfig(tool_call_parser="openai"))
    how = routes.Answering(plan.plan(None, offer("auto")), False, Called(Metrics()), "r")
    make = routes._form(how, None, "")
    assert make is not None
    part = make(())
    final = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
    assert takes(grammars, part, f"{final}It rains.")
    assert takes(grammars, part, write("openai", ("get_weather", GOOD)))
    assert not takes(grammars, part, write("openai", ("get_weather", {"city": "Köln"})))
    assert not takes(grammars, part, "It rains.")


def test_optional_python_arguments(grammars: Grammars) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "boolean"}}
    function = Function("t", "f", None, {"type": "object", "properties": properties}, strict=True)
    part = calls(FORMS["pythonic"], offer_of([function], Choice("required"), False))
    for good in ("f()", "f(a=1)", "f(b=null)", "f(a=1, c=true)", "f(b=null, c=false)"):
        assert takes(grammars, part, f"[{good}]"), good
    for wrong in ("f(,)", "f(a=1,)", "f(c=true, a=1)", "f(a=x)", "f(a=1 b=null)"):
        assert not takes(grammars, part, f"[{wrong}]"), wrong


def test_definitions_come_along(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "$defs": {"place": {"enum": ["Rome"]}},
    }
    for name in ("pythonic", "qwen3_coder", "gemma4", "hermes"):
        function = Function("t", "f", None, schema, strict=True)
        part = calls(FORMS[name], offer_of([function], Choice("required"), False))
        assert takes(grammars, part, write(name, ("f", {"at": "Rome"})))
        assert not takes(grammars, part, write(name, ("f", {"at": "Oslo"})))


def test_every_form_has_a_trigger_where_it_needs_one() -> None:
    for name, form in FORMS.items():
        begins = form.opening or form.before
        assert isinstance(form, Form)
        if name not in ("pythonic", "llama4_pythonic", "openai") and not form.leading:
            assert form.trigger
            assert begins.startswith(form.trigger)
