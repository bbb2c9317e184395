"""Gemma 4's form: what it lets through is read as arguments that follow the schema."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.grammar import Grammars
from penstock.server.config import ServerConfig
from penstock.server.tools.constraint import behind_reasoning, calls, structured, text_or_calls
from penstock.server.tools.events import Event, Parsed, collect
from penstock.server.tools.families import REASONING_PARSERS, TOOL_PARSERS
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
from penstock.server.tools.plan import Tooling
from penstock.tokenizer import Tokenizer
from tests.grammar.walks import closing, text_of, walk
from tests.server.tools.test_constraint import STORIES, as_gemma, takes
from tests.server.tools.test_templates import LATER, rows, template, written

jsonschema_rs = pytest.importorskip("jsonschema_rs")

FAMILY = TOOL_PARSERS["gemma4"]
LARGEST = 1.7976931348623157e308
Q = '<|"|>'
DEFINITIONS = {
    "city": {"type": "string", "enum": ["Oslo", 'R"o"me\n']},
    "node": {
        "type": "object",
        "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["v"],
        "additionalProperties": False,
    },
}
# name: (an argument's schema, texts that are let through with what they mean, others)
ARGUMENTS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "string": (
        {"type": "string"},
        {f"{Q}a\n\"b\" {{}}{Q}": 'a\n"b" {}', f"{Q}{Q}": "", f"{Q}<|{Q}": "<|"},
        ('"a"', "a", f"{Q}a{Q}b{Q}"),
    ),
    "nullable": (
        {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        {f"{Q}Oslo{Q}": "Oslo", "null": None, f"{Q}null{Q}": "null"},
        (f"{Q}Paris{Q}", "None", "x"),
    ),
    "types": (
        {"type": ["string", "integer", "null"], "maximum": 9},
        {f"{Q}5{Q}": "5", "5": 5, "null": None},
        ("12", "5.5", "true"),
    ),
    "number": ({"type": "number"}, {"5": 5, "-1e999": -LARGEST}, (f"{Q}5{Q}", "05")),
    "mixed enum": (
        {"enum": [1, "x", None, "1"]},
        {"1": 1, f"{Q}1{Q}": "1", "null": None},
        ("x", f"{Q}y{Q}", "2"),
    ),
    "reference": (
        {"$ref": "#/$defs/city"},
        {f'{Q}R"o"me\n{Q}': 'R"o"me\n'},
        (f"{Q}Paris{Q}", f"{Q}R{Q}"),
    ),
    "pattern": (
        {"type": "string", "pattern": "^[0-9]+$", "maxLength": 4},
        {f"{Q}1234{Q}": "1234"},
        (f"{Q}12345{Q}", f"{Q}a{Q}", "1234"),
    ),
    "quotes": ({"enum": [f"a{Q}", "b"]}, {f"{Q}b{Q}": "b"}, (f"{Q}a{Q}{Q}", f"{Q}a{Q}")),
    "nothing but quotes": ({"const": f"a{Q}"}, {json.dumps(f"a{Q}"): f"a{Q}"}, (f"{Q}a{Q}",)),
    "strings": (
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        {f"[{Q}a{Q}]": ["a"], f"[{Q}a{Q},{Q}],{Q}]": ["a", "],"]},
        ("[]", f"[{Q}a{Q},]", f"[{Q}a{Q},{Q}b{Q},{Q}c{Q}]", "[1]"),
    ),
    "any list": ({"type": "array"}, {"[]": [], '[1,{"a": "b"}]': [1, {"a": "b"}]}, ("1",)),
    "object": (
        {
            "type": "object",
            "properties": {"w": {"type": "integer"}, "of": {"$ref": "#/$defs/city"}},
            "additionalProperties": False,
        },
        {"{}": {}, "{w:1}": {"w": 1}, f"{{w:1,of:{Q}Oslo{Q}}}": {"w": 1, "of": "Oslo"}},
        ("{w:1,}", f"{{w:{Q}1{Q}}}", "{x:1}", f"{{of:{Q}Oslo{Q},w:1}}"),
    ),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {'{"a b": 1}': {"a b": 1}},
        ('{"a": "b"}',),
    ),
    "a reference that leads back": (
        {"$ref": "#/$defs/node"},
        {"{v:1}": {"v": 1}, '{v:1,next:{"v": 2}}': {"v": 1, "next": {"v": 2}}},
        ("{v:1,next:{}}",),
    ),
    "options": (
        {"oneOf": [{"type": "string", "const": "x"}, {"type": "array", "items": {"const": 1}}]},
        {f"{Q}x{Q}": "x", "[1,1]": [1, 1]},
        (f"{Q}y{Q}", "[2]"),
    ),
    "not": ({"type": "string", "not": {"const": "x"}, "enum": ["x", "y"]}, {f"{Q}y{Q}": "y"},
            (f"{Q}x{Q}",)),
}  # fmt: skip


def schema_of(argument: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": argument},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }


def offer(schema: dict[str, Any], mode: Any = "required", *, strict: bool = True) -> Offer:
    return offer_of([Function("tools[0].function", "f", None, schema, strict)], Choice(mode), False)


def call(body: str) -> str:
    return f"<|tool_call>call:f{body}<tool_call|>"


def with_marks(folder: Path) -> Tokenizer:
    """The embedded model's tokenizer with Gemma 4's special tokens."""
    made = json.loads((STORIES / "tokenizer.json").read_text())
    first = Tokenizer.from_folder(STORIES).vocab_size
    for i, mark in enumerate((*FAMILY.marks, "<|channel>", "<channel|>")):
        kept = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        made["added_tokens"].append({"id": first + i, "content": mark, "special": True, **kept})
    for name in ("tokenizer_config.json", "config.json"):
        if (STORIES / name).is_file():
            shutil.copy(STORIES / name, folder)
    (folder / "tokenizer.json").write_text(json.dumps(made))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module", params=["text", "tokens"])
def grammars(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of a tokenizer to which the marks are text, and of one to which they are special tokens."""
    tokenizer = Tokenizer.from_folder(STORIES)
    if request.param == "tokens":
        tokenizer = with_marks(tmp_path_factory.mktemp("marks"))
    eos = tokenizer.token_to_id("<|im_end|>")
    assert eos is not None
    return Grammars(tokenizer, tokenizer.vocab_size, [eos], deadline_s=60)


def parse(text: str, schema: Any = None) -> Parsed:
    return FAMILY.reader({"f": schema or {}}).parse(text)


def read(text: str) -> Any:
    (one,) = parse(text).calls
    return json.loads(one.arguments)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_let_through_is_read_as_it_is_meant(name: str, grammars: Grammars) -> None:
    argument, right, wrong = ARGUMENTS[name]
    part = calls(FAMILY.form, offer(schema_of(argument)))
    for text, value in right.items():
        assert takes(grammars, part, call(f"{{a:{text}}}")), text
        assert read(call(f"{{a:{text}}}")) == {"a": value}
    for text in wrong:
        assert not takes(grammars, part, call(f"{{a:{text}}}")), text


@pytest.mark.parametrize("name", ARGUMENTS)
def test_walks_are_read_as_what_follows_the_schema(name: str, grammars: Grammars) -> None:
    schema = schema_of(ARGUMENTS[name][0])
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    spec = structured(calls(FAMILY.form, offer(schema)))
    vocabulary, rng = grammars.vocabulary, random.Random(name)
    favoured = closing(vocabulary.tokenizer)
    for _ in range(8):
        ids = walk(
            grammars.start(spec), vocabulary.size, vocabulary.eos_token_ids, rng,
            favoured=favoured, limit=150,
        )  # fmt: skip
        if ids is not None:
            text = text_of(vocabulary.tokenizer, ids)
            assert validator.is_valid(read(text)), text


WHOLE: dict[str, dict[str, Any]] = {
    "all together": {
        "type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "a name": {"type": "object", "properties": {"a": {"type": "string"}, "b:c": {}}},
    "elsewhere": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    },
    "many": {
        "type": "object", "properties": {x: {"type": "string"} for x in "abcdefghijklmnopqrst"}
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_what_cant_be_said_is_json(name: str, grammars: Grammars) -> None:
    part = calls(FAMILY.form, offer(WHOLE[name]))
    assert takes(grammars, part, call('{"a": "x"}'))
    assert not takes(grammars, part, call('{"a": 1}'))
    assert not takes(grammars, part, call(f"{{a:{Q}x{Q}}}"))
    assert read(call('{"a": "x"}')) == {"a": "x"}


def test_no_arguments_and_any(grammars: Grammars) -> None:
    part = calls(FAMILY.form, offer({"type": "object"}))
    assert takes(grammars, part, call("{}"))
    loose = text_or_calls(FAMILY.form, offer(schema_of({"type": "string"}), "auto", strict=False))
    assert takes(grammars, loose, "So: " + call(f"{{a:{Q}x{Q}}}"))
    assert not takes(grammars, loose, "So: <|tool_call>no")


def test_many_tools_are_said_in_fewer_parts(grammars: Grammars) -> None:
    """Together they are as many as a structural tag may have."""
    inner = {"type": "object", "properties": {x: {"type": "string"} for x in "abcdef"}}
    schema = {"type": "object", "properties": dict.fromkeys("abcdef", inner)}
    functions = [Function("t", f"f{i}", None, schema, True) for i in range(40)]
    part = calls(FAMILY.form, offer_of(functions, Choice("required"), False))
    assert takes(grammars, part, '<|tool_call>call:f7{"b": {"c": "x"}}<tool_call|>')
    few = calls(FAMILY.form, offer(schema))
    assert takes(grammars, few, call('{b:{c:"x"}}'))  # the outer object's names as they are
    schema["required"] = ["a"]
    alone = calls(FAMILY.form, offer(schema))
    assert takes(grammars, alone, call(f"{{a:{{}},b:{{c:{Q}x{Q}}}}}"))


def test_schemas_that_branch_are_read_in_time() -> None:
    names = [f"n{i}" for i in range(10)]
    each = {"type": "object", "properties": {x: {"$ref": f"#/$defs/{x}"} for x in names}}
    schema = {"type": "object", "properties": dict.fromkeys(names, each), "required": ["n1"],
              "$defs": dict.fromkeys(names, each)}  # fmt: skip
    assert calls(FAMILY.form, offer(schema))


def test_bfcls_answers_are_let_through(grammars: Grammars) -> None:
    """In the schema's order, the required arguments first, as its grammar has them."""
    taken = 0
    for schemas, turn in rows("parallel_multiple", 25):
        if not all(jsonschema_rs.is_valid(schemas[name], value) for name, value in turn):
            continue  # a variable's name for a list
        functions = [Function("t", n, None, schema) for n, schema in schemas.items()]
        part = calls(FAMILY.form, Offer(tuple(functions), "required"))
        texts = []
        for name, arguments in turn:
            required = schemas[name].get("required", [])
            names = list(schemas[name]["properties"])
            order = [*required, *(x for x in names if x not in required)]
            ordered = {x: arguments[x] for x in order if x in arguments}
            texts.append(f"<|tool_call>call:{name}{as_gemma(ordered)}<tool_call|>")
        assert takes(grammars, part, "".join(texts)), texts
        taken += 1
    assert taken >= 20


def test_what_the_template_writes_is_read_again() -> None:
    value = {"a": None, "b": [True, {"c": 1.5e-7, "d": {}}, []], "e": 'x "y" {z:1},', "f": 10**40}
    text = written(template(f"{LATER}/google-gemma-4-31B-it"), [("f", value), ("f", {"a b": -1})])
    assert [json.loads(x.arguments) for x in parse(text).calls] == [value, {"a b": -1}]


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ("{a:1e999,b:-1e999}", {"a": LARGEST, "b": -LARGEST}),
        (f"{{a:{'9' * 400}}}", {"a": LARGEST}),
        (f"{{a:{'9' * 600}}}", None),
        (f"{{a:{'x' * 600}}}", None),
        ("{a:01}", None),
        ("{a:}", None),
        ("{:1}", None),
        ("{a:1,}", None),
        ("{a 1}", None),
        ("{a:[1,]}", None),
        ("{a:1 b:2}", None),
        ('{a:"x\\ud800"}', None),  # nobody could write it down
        ('{a:"x\\"}', None),
        (f"{{a:{Q}x{Q}y{Q}}}", None),
        ("{a:" * 64 + "1" + "}" * 64, ...),
        ("{a:" * 65 + "1" + "}" * 65, None),  # deeper than a request may be
        ("{a:" * 3000, None),
    ],
)
def test_what_isnt_a_call_is_text(arguments: str, value: Any) -> None:
    text = call(arguments)
    if value is None:
        assert parse(text) == Parsed(content=text)
    elif value is not ...:
        assert read(text) == value
    else:
        assert parse(text).calls


def test_thoughts_come_first(grammars: Grammars) -> None:
    """Its quotes and marks are seen though they are special; calls in thoughts are drafts."""
    tags = REASONING_PARSERS["gemma4"]
    made = call(f"{{a:{Q}x{Q}}}")
    offered = offer(schema_of({"type": "string"}))
    part = behind_reasoning(calls(FAMILY.form, offered), tags, inside=False)
    text = f"<|channel>thought\nI use <|tool_call> or not.\n<channel|>{made}"
    assert takes(grammars, part, f"<|channel>thought\nI use tools.\n<channel|>{made}")
    assert takes(grammars, part, made)
    assert not takes(grammars, part, f"<|channel>thought\n<channel|>So: {made}")
    source = template(f"{LATER}/google-gemma-4-31B-it")
    tooling = Tooling(grammars.vocabulary.tokenizer, ServerConfig())
    plan = tooling.plan(source, offered)
    assert (plan.family, plan.tags) == (FAMILY, tags)
    for parts in ([text], list(text)):
        reader = plan.answer(inside=False)
        events: list[Event] = [event for piece in parts for event in reader.feed(piece)]
        found = collect([*events, *reader.finish()])
        assert found.reasoning == "I use <|tool_call> or not."
        assert [x.arguments for x in found.calls] == ['{"a": "x"}']
        assert found.content == ""
