"""Qwen3-Coder's XML: what its form lets through is read as arguments that follow the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from penstock.grammar import Grammars
from penstock.server.errors import ApiError
from penstock.server.tools.constraint import calls, check_size, structured, text_or_calls
from penstock.server.tools.families import TOOL_PARSERS
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
from penstock.server.tools.verdict import judge
from penstock.tokenizer import Tokenizer
from tests.grammar.walks import closing, text_of, walk
from tests.server.tools.test_constraint import STORIES, takes

jsonschema_rs = pytest.importorskip("jsonschema_rs")

LARGEST = 1.7976931348623157e308
FAMILY = TOOL_PARSERS["qwen3_coder"]
CITY = {"type": "string", "enum": ["Oslo", "Rome\nItaly", "null"]}
# name: (a parameter's schema, texts that are let through with what they mean, others)
PARAMETERS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "string": ({"type": "string"}, {"a\nb": "a\nb", "5": "5", "": ""}, ("x</parameter>y",)),
    "nullable": (
        {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        {"Oslo": "Oslo", "null": None, '"a"': '"a"'},
        ("Paris",),
    ),
    "nullable enum": (
        {"type": ["string", "null"], "enum": ["x", "y", None]},
        {"x": "x", "null": None},
        ('"x"', "z", "None"),
    ),
    "text or number": ({"type": ["string", "integer"]}, {"5": "5", "x": "x"}, ()),
    "number": ({"type": "number"}, {"5": 5, "1e999": LARGEST}, ('"5"',)),
    "constant": ({"const": "x"}, {"x": "x"}, ("y", "")),
    "constants": ({"anyOf": [{"const": "x"}, {"const": "y z"}]}, {"y z": "y z"}, ("y", "z")),
    "beginnings": ({"enum": ["a", "a\n\nb"]}, {"a": "a", "a\n\nb": "a\n\nb"}, ("a\n",)),
    "mixed enum": ({"enum": [1, "x", None]}, {"x": "x", "null": None}, ("1",)),
    "reference": ({"allOf": [{"$ref": "#/$defs/city"}]}, {"Oslo": "Oslo"}, ("Paris",)),
    "narrowed": (
        {"allOf": [{"$ref": "#/$defs/city"}, {"pattern": "^R"}]},
        {"Rome\nItaly": "Rome\nItaly"},
        ("Oslo",),
    ),
    "pattern": (
        {"type": "string", "pattern": "^[0-9]+|x$", "maxLength": 4},
        {"12": "12", "1234": "1234", "abx": "abx"},
        ("ab", "12345"),
    ),
    "found": ({"type": "string", "pattern": "b+"}, {"abbc": "abbc"}, ("ac",)),
    "format": ({"type": "string", "format": "date"}, {"2024-02-29": "2024-02-29"}, ("2023-02-29",)),
    "object": (
        {"allOf": [{"$ref": "#/$defs/box"}]},
        {'{"w": 1}': {"w": 1}},
        ('{"w": "1"}', "1"),
    ),
    "without a type": ({"properties": {"w": {"type": "integer"}}}, {'{"w": 1}': {"w": 1}}, ()),
    "whole": ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"5": 5}, ("5.5", "x")),
}
DEFINITIONS = {
    "city": CITY,
    "box": {"type": "object", "properties": {"w": {"type": "integer"}}, "required": ["w"]},
}


def schema_of(parameter: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": parameter},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": DEFINITIONS,
    }


def offer(schema: dict[str, Any], mode: Any = "required", *, strict: bool = True) -> Offer:
    return offer_of([Function("tools[0].function", "f", None, schema, strict)], Choice(mode), False)


def write(**arguments: str) -> str:
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = Tokenizer.from_folder(STORIES)
    eos = tokenizer.token_to_id("<|im_end|>")
    assert eos is not None
    return Grammars(tokenizer, tokenizer.vocab_size, [eos], deadline_s=60)


def read(schema: dict[str, Any], text: str) -> Any:
    (call,) = FAMILY.reader({"f": schema}).parse(text).calls
    return json.loads(call.arguments)


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_is_let_through_is_read_as_it_is_meant(name: str, grammars: Grammars) -> None:
    parameter, right, wrong = PARAMETERS[name]
    schema = schema_of(parameter)
    part = calls(FAMILY.form, offer(schema))
    for text, value in right.items():
        assert takes(grammars, part, write(a=text)), text
        assert read(schema, write(a=text)) == {"a": value}
    for text in wrong:
        assert not takes(grammars, part, write(a=text)), text


@pytest.mark.parametrize("name", PARAMETERS)
def test_walks_are_read_as_what_follows_the_schema(name: str, grammars: Grammars) -> None:
    schema = schema_of(PARAMETERS[name][0])
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    spec = structured(calls(FAMILY.form, offer(schema)))
    vocabulary, rng, ended = grammars.vocabulary, random.Random(name), 0
    favoured = closing(vocabulary.tokenizer)
    for _ in range(8):
        ids = walk(
            grammars.start(spec), vocabulary.size, vocabulary.eos_token_ids, rng,
            favoured=favoured, limit=150,
        )  # fmt: skip
        if ids is not None:
            ended += 1
            text = text_of(vocabulary.tokenizer, ids)
            value = read(schema, text)
            assert validator.is_valid(value), text
            assert judge(schema, json.dumps(value)).valid is not False
    listed = name not in ("string", "text or number", "found")  # a walk hardly writes the end
    assert ended or not listed


UNSAID: dict[str, tuple[dict[str, Any], str]] = {
    "not": (schema_of({"type": "string", "not": {"const": "x"}}), "'a': not can't be followed"),
    "anchor": (schema_of({"type": "string", "pattern": "a(^b|c)"}), "at a pattern's beginning"),
    "nothing": (schema_of({"enum": ["x</parameter>"]}), "'a': no text can be written"),
    "name": ({"properties": {"a>b": {}}}, "the name 'a>b' can't be written"),
    "all together": (
        {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "anyOf says more of all arguments together",
    ),
    "patterns": (
        {"properties": {"a": {}}, "patternProperties": {"^a": {"type": "null"}}},
        "patternProperties may say more",
    ),
}


@pytest.mark.parametrize("name", UNSAID)
def test_what_cant_be_said_is_refused_where_it_is_strict(name: str, grammars: Grammars) -> None:
    schema, message = UNSAID[name]
    with pytest.raises(ApiError, match=message) as refused:
        calls(FAMILY.form, offer(schema))
    assert (refused.value.status, refused.value.param) == (400, "tools[0].function.parameters")
    loose = calls(FAMILY.form, offer(schema, strict=False))
    required = {"a": "x"} if "required" in schema else {}
    assert takes(grammars, loose, write(**required))


@pytest.mark.parametrize("family", ["qwen3_coder", "pythonic"])
def test_arguments_behind_references_are_written(family: str, grammars: Grammars) -> None:
    """{"$ref": …} and {"allOf": […]} once made a function of no arguments."""
    one = {"type": "object", "properties": {"w": {"type": "integer"}}, "required": ["w"]}
    form = TOOL_PARSERS[family].form
    for schema in (
        {"$ref": "#/$defs/a%20b", "$defs": {"a b": one}},
        {"allOf": [one, {"properties": {"w": {"maximum": 7}, "v": {"type": "null"}}}]},
        {**one, "required": ["w"], "allOf": [{"additionalProperties": {"type": "integer"}}]},
    ):
        made = offer(schema)
        check_size(form, made)
        part = calls(form, made)
        right, bare = (write(w="5"), write()) if family == "qwen3_coder" else ("[f(w=5)]", "[f()]")
        assert takes(grammars, part, right)
        assert not takes(grammars, part, bare)
        assert not takes(grammars, part, right.replace("5", "x"))
    missing = {"properties": {}, "required": ["w"]}
    assert not takes(grammars, calls(form, offer(missing)), bare)


def test_pythons_names_are_held_to_what_is_read() -> None:
    form = TOOL_PARSERS["pythonic"].form
    with pytest.raises(ApiError, match="the name 'a b' can't be written"):
        calls(form, offer({"properties": {"a b": {"type": "integer"}}}))


def test_numbers_beyond_floats_are_the_largest() -> None:
    """A form lets any exponent through; what is read of it must be JSON that can be written."""
    found = TOOL_PARSERS["pythonic"].reader({"f": {}}).parse("[f(a=1e999, b=[-1e999])]")
    assert json.loads(found.calls[0].arguments) == {"a": LARGEST, "b": [-LARGEST]}


def test_strings_that_may_be_written_are_free_where_they_arent_held(grammars: Grammars) -> None:
    part = text_or_calls(FAMILY.form, offer(schema_of(CITY), "auto", strict=False))
    assert takes(grammars, part, "So: " + write(a="Paris"))
    assert not takes(grammars, part, "So: <tool_call>no")
