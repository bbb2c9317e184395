"""Real schemas: how many compile, and that whatever is written follows them.

The check is jsonschema-rs, a validator that shares nothing with llguidance, with formats asserted.
"""

from __future__ import annotations

import json
import random
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.grammar.walks import closing, text_of, walk

from penstock.errors import InvalidSamplingError
from penstock.grammar import Grammars
from penstock.sampling.structured import StructuredOutputs

jsonschema_rs = pytest.importorskip("jsonschema_rs")
jsonschema = pytest.importorskip("jsonschema")

ARCHIVE = "structured/jsonschemabench_dev.tar.xz"
COMPILED = 0.90


def schemas(archive: Path, every: int) -> Iterator[tuple[str, Any]]:
    with tarfile.open(archive) as tar:
        found = sorted(name for name in tar.getnames() if name.endswith(".json"))
        chosen = set(found[::every])
        for member in tar:
            if member.name in chosen:
                file = tar.extractfile(member)
                assert file is not None
                yield Path(member.name).name, json.loads(file.read())["schema"]


def finite(number: str) -> float:
    """A number, which may be beyond what a float holds; JSON has no such bound."""
    return max(-1e300, min(1e300, float(number)))


def check(name: str, schema: Any, grammars: Grammars, walks: int, limit: int) -> int:
    """How many walks came to an end; each of them follows the schema."""
    vocabulary = grammars.vocabulary
    favoured, rng = closing(vocabulary.tokenizer), random.Random(name)
    try:
        validator: Any = jsonschema_rs.validator_for(schema, validate_formats=True)
    except jsonschema_rs.ValidationError:  # a pattern such as \{d}, which the other reads
        validator = jsonschema.validators.validator_for(schema)(schema)
    finished = 0
    for _ in range(walks):
        ids = walk(
            grammars.start(StructuredOutputs(json=schema)),
            vocabulary.size,
            vocabulary.eos_token_ids,
            rng,
            favoured=favoured,
            limit=limit,
        )
        if ids is not None:
            text = text_of(vocabulary.tokenizer, ids)
            value = json.loads(text, parse_float=finite)
            assert validator.is_valid(value), f"{name}: {text}"
            finished += 1
    return finished


def run(archive: Path, grammars: Grammars, every: int, walks: int) -> None:
    count = compiled = finished = 0
    for name, schema in schemas(archive, every):
        count += 1
        try:
            grammars.compile(StructuredOutputs(json=schema))
        except InvalidSamplingError:
            continue
        compiled += 1
        finished += check(name, schema, grammars, walks, 400)
    assert compiled >= COMPILED * count
    assert finished >= 0.8 * walks * compiled


@pytest.fixture(scope="module")
def archive(shared_data: Path) -> Path:
    if not (shared_data / ARCHIVE).is_file():
        pytest.skip(f"the shared data has no {ARCHIVE}")
    return shared_data / ARCHIVE


def test_real_schemas_are_followed(archive: Path, grammars_of: Callable[[str], Grammars]) -> None:
    run(archive, grammars_of("stories260K"), every=40, walks=2)


@pytest.mark.slow
def test_all_real_schemas_are_followed(
    archive: Path, grammars_of: Callable[[str], Grammars]
) -> None:
    run(archive, grammars_of("stories260K"), every=1, walks=3)


SAID_OTHERWISE: dict[str, Any] = {
    "not required": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "not": {"required": ["a"]},
    },
    "not a type": {"not": {"type": ["object", "array", "string"]}},
    "not one of": {"type": "string", "not": {"enum": ["", "a", "ab", "b", "é", "😀"]}},
    "not numbers": {"type": "integer", "minimum": 0, "maximum": 5, "not": {"enum": [0, 3]}},
    "not true": {"type": ["boolean", "null"], "not": {"const": True}},
    "not bounded": {"type": "number", "not": {"minimum": 3, "maximum": 7}},
    "not long": {"type": "string", "not": {"minLength": 3}},
    "not both": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "not": {"allOf": [{"required": ["a"]}, {"required": ["b"]}]},
    },
    "not a reference": {
        "$defs": {"a": {"const": "x"}},
        "enum": ["x", "y"],
        "not": {"$ref": "#/$defs/a"},
    },
    "one of two": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        "additionalProperties": False,
    },
    "one of overlapping": {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]},
    "one of kinds": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"]}
            for k in "ab"
        ]
    },
    "if": {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
        "required": ["kind"],
        "if": {"properties": {"kind": {"const": "a"}}},
        "then": {"required": ["n"]},
        "else": {"properties": {"n": False}},
    },
    "dependencies": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
        "additionalProperties": False,
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"b": {"required": ["c"]}},
    },
    "names": {"type": "object", "propertyNames": {"pattern": "^[a-c]+$"}, "maxProperties": 3},
    "dot": {"type": "string", "pattern": "^a.b$"},
    "classes": {"type": "string", "pattern": r"^[\w&&-]\s\d[^\s]\W[[a]$"},
    "ends of lists": {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}},
    "multiples": {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1},
    "recursion": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    "recursion that may not begin": {
        "type": "object",
        "properties": {"end": {"type": "null"}, "more": {"$ref": "#/$defs/more"}},
        "$defs": {"more": {"type": "array", "items": {"$ref": "#/$defs/more"}, "minItems": 1}},
    },
    **{
        f"format {name}": {"type": "string", "format": name}
        for name in (
            "date time date-time duration hostname email ipv4 ipv6 uuid uri uri-reference "
            "json-pointer relative-json-pointer idn-email idn-hostname iri iri-reference "
            "uri-template"
        ).split()
    },
}


@pytest.mark.parametrize("name", SAID_OTHERWISE)
def test_what_is_said_otherwise_means_the_same(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    assert check(name, SAID_OTHERWISE[name], grammars_of("stories260K"), 12, 150)


@pytest.mark.parametrize("name", [name for name in SAID_OTHERWISE if "format" not in name])
def test_what_is_said_otherwise_leaves_nothing_out(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    """Every value of a list that the schema allows can be written, and no other one."""
    schema = SAID_OTHERWISE[name]
    grammars = grammars_of("gpt2")
    validator = jsonschema_rs.validator_for(schema)
    values: list[Any] = [None, True, False, 0, 1, 3, 5, 2.5, 7, 8, -0.75, "", "a", "ab", "b", "abc"]
    values += ["é", "é😀", "x", "y", "c", "a\nb", "a\tb", "& 1x-[", "- 1x-a", [], [1]]
    values += [[1, 2], [1, 1], [[]], [[], [[]]], [[], [], []], {}, {"a": 1}, {"b": None}]
    values += [{"a": 1, "b": None}, {"kind": "a"}, {"kind": "b"}, {"kind": "a", "n": 1}]
    values += [{"kind": "b", "n": 1}, {"a": None, "b": None, "c": None}, {"b": None, "c": None}]
    values += [
        {"a": None, "b": None},
        {"c": None},
        {"d": 1},
        {"end": None},
        {"end": None, "more": []},
    ]
    for value in values:
        text = json.dumps(value, ensure_ascii=False)
        state = grammars.start(StructuredOutputs(json=schema))
        tokens = grammars.vocabulary.tokenizer.encode(text)
        assert _accepts(state, tokens) == validator.is_valid(value), text


def _accepts(state: Any, tokens: list[int]) -> bool:
    from penstock.errors import RequestError

    try:
        for token in tokens:
            state.accept(token)
    except RequestError:
        return False
    return bool(state.may_end)


def test_white_space_has_bounds(grammars_of: Callable[[str], Grammars]) -> None:
    """A space; or one or two line ends and up to 32 spaces or 8 tabs."""
    grammars = grammars_of("gpt2")
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    for between, follows in (
        ("", True), (" ", True), ("  ", False), ("\n" + " " * 32, True), ("\n" + " " * 33, False),
        ("\r\n\n" + "\t" * 8, True), ("\n" + "\t" * 9, False), ("\n\n\n", False),
    ):  # fmt: skip
        tokens = grammars.vocabulary.tokenizer.encode("{" + between + '"a":1}')
        state = grammars.start(StructuredOutputs(json={**schema, "additionalProperties": False}))
        assert _accepts(state, tokens) == follows, repr(between)
