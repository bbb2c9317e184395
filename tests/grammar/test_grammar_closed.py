"""Schemas whose objects are closed: what follows them follows the originals."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from penstock.errors import InvalidSamplingError
from penstock.grammar import Grammars
from penstock.sampling import StructuredOutputs
from penstock.sampling.closed import closed

jsonschema_rs = pytest.importorskip("jsonschema_rs")

SUITE = "structured/json-schema-test-suite.tar.xz"
BENCH = "structured/jsonschemabench_dev.tar.xz"
A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
SHUT = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (A, SHUT),
        (A | {"required": ["a"]}, SHUT | {"required": ["a"]}),
        (A | {"minProperties": 1}, SHUT | {"minProperties": 1}),
        ({"items": A, "prefixItems": [A]}, {"items": SHUT, "prefixItems": [SHUT]}),
        ({"items": [A], "additionalItems": A}, {"items": [SHUT], "additionalItems": SHUT}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"allOf": [A], "description": "x"}, {"allOf": [SHUT], "description": "x"}),
        (
            {"properties": {"b": {"$ref": "#/$defs/x"}}, "$defs": {"x": A}},
            {
                "properties": {"b": {"$ref": "#/$defs/x"}},
                "$defs": {"x": SHUT},
                "additionalProperties": False,
            },
        ),
        (
            {"patternProperties": {"^x": A}, "additionalProperties": A},
            {"patternProperties": {"^x": SHUT}, "additionalProperties": SHUT},
        ),
    ],
    ids=str,
)  # fmt: skip
def test_objects_are_closed(schema: Any, made: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == made
    assert json.dumps(schema) == before  # which isn't touched


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "required": ["b"]},
        {**A, "minProperties": 2},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "anyOf": [{"required": ["b"]}, {"required": ["a"]}]},
        {"not": A},
        {"contains": A},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {"oneOf": [A, {"properties": {"b": {}}}]},
        {"if": A, "then": A},
        {"dependentSchemas": {"a": A}},
        {"not": {"$ref": "#/$defs/x"}, "$defs": {"x": A}},
        {"not": {"$ref": "#/$defs/y"}, "$defs": {"x": A, "y": {"items": {"$ref": "#/$defs/x"}}}},
        {"$ref": "#/$defs/x", "properties": {"b": {}}, "$defs": {"x": A}},
        {"items": {"$ref": "other.json"}, "properties": {"a": {}}},
        {"$id": "http://x/y", "properties": {"a": {}}},
        # others speak of what is within, too
        {"properties": {"b": A}, "allOf": [{"properties": {"b": {"required": ["z"]}}}]},
        {"properties": {"b": A}, "anyOf": [{"properties": {"b": {"required": ["z"]}}}]},
        {"properties": {"b": A}, "if": {"properties": {"b": {"required": ["z"]}}}},
        {"properties": {"b": A}, "$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": {}}}}},
        {"properties": {"ab": A}, "patternProperties": {"^a": A}},
        {"patternProperties": {"^a": A, "b$": A}},
        {"properties": {"a": {}}, "enum": [{"b": 1}]},
        {"items": A, "uniqueItems": True, "minItems": 9},
        {"items": [{"not": {"$ref": "#/$defs/x"}}], "$defs": {"x": A}},
        {
            "items": [
                {"properties": {"b": A}, "allOf": [{"properties": {"b": {"minProperties": 2}}}]}
            ]
        },
        # places written otherwise, or that aren't there
        {"allOf": [{"$ref": "#/$defs/a%3Cb%3E"}, {"maxProperties": 9}], "$defs": {"a<b>": A}},
        {"anyOf": [A], "items": {"$ref": "#/anyOf/00"}},
        {"anyOf": [A], "items": {"$ref": "#/anyOf/" + "9" * 5000}},
        {"items": {"$ref": "#/nowhere"}, "properties": {"a": {}}},
        {"oneOf": []},
        {"anyOf": []},
        {"items": {"$anchor": "x", "properties": {"a": {}}}},
    ],
    ids=str,
)
def test_what_could_do_more_than_leave_texts_out_stays(schema: Any) -> None:
    assert closed(schema) == schema


class Cat(BaseModel):
    kind: Literal["cat"] = Field(...)
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = Field(...)
    owner: Cat | None = None


class House(BaseModel):
    pets: list[Cat | Dog]
    first: Cat | Dog = Field(discriminator="kind")
    names: dict[str, Dog]


def test_pydantics_classes_are_closed_all_through() -> None:
    made = closed(House.model_json_schema())
    assert made["additionalProperties"] is False
    assert all(made["$defs"][name]["additionalProperties"] is False for name in ("Cat", "Dog"))
    assert made["properties"]["names"]["additionalProperties"] == {"$ref": "#/$defs/Dog"}


def test_time_is_linear_in_size() -> None:
    """Of what was written to take long, too."""
    count = 3000
    names = [f"p{i}" for i in range(count)]
    union = {
        "discriminator": {"propertyName": "p0"},
        "oneOf": [{"$ref": "#/$defs/x"}] * count,
        "$defs": {"x": {"properties": {n: {"const": "a"} for n in names}, "required": names}},
    }
    start = time.process_time()
    assert closed(union) == union
    chain: Any = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)}
    closed({"not": {"$ref": "#/$defs/d0"}, "$defs": {**chain, f"d{count}": A}})
    closed({"items": [{"items": {"items": {}}} for _ in range(20 * count)]})
    assert time.process_time() - start < 10  # about 1; squares of these sizes would take minutes


def test_what_can_be_written_can_be_when_it_is_closed(
    grammars_of: Callable[[str], Grammars], shared_data: Path
) -> None:
    grammars = grammars_of("gpt2")
    if not (shared_data / BENCH).is_file():
        pytest.skip(f"the shared data has no {BENCH}")
    count = 0
    for i, (schema, _) in enumerate(_cases(shared_data, (BENCH,))):
        made = closed(schema)
        if made == schema or i % 8:
            continue
        try:
            grammars.compile(StructuredOutputs(json=schema))
        except InvalidSamplingError:
            continue
        grammars.compile(StructuredOutputs(json=made))
        count += 1
    assert count > 50


def test_what_follows_a_closed_schema_follows_the_schema(shared_data: Path) -> None:
    """On the instances of real schemas, and of JSON Schema's own suite, by another's validator."""
    counts = {"closed": 0, "left out": 0, "kept": 0}
    if not all((shared_data / name).is_file() for name in (SUITE, BENCH)):
        pytest.skip(f"the shared data has no {SUITE} or no {BENCH}")
    for schema, instances in _cases(shared_data):
        made = closed(schema)
        if made == schema:
            continue
        try:
            before, after = (jsonschema_rs.validator_for(x) for x in (schema, made))
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
            continue  # a pattern that only others read, or a schema from elsewhere
        counts["closed"] += 1
        for instance in instances:
            if after.is_valid(instance):
                assert before.is_valid(instance), (schema, instance)
                counts["kept"] += 1
            elif before.is_valid(instance):
                counts["left out"] += 1
    assert counts["closed"] > 200 and counts["kept"] > 100, counts


def _cases(folder: Path, names: Sequence[str] = (SUITE, BENCH)) -> Iterator[tuple[Any, list[Any]]]:
    for name in names:
        every = 5 if name == BENCH else 1
        with tarfile.open(folder / name) as files:
            for i, file in enumerate(files):
                content = files.extractfile(file) if file.name.endswith(".json") else None
                if content is None or i % every:
                    continue
                found = json.loads(content.read())
                for group in found if isinstance(found, list) else [found]:
                    if isinstance(group, dict) and {"schema", "tests"} <= group.keys():
                        yield group["schema"], [test["data"] for test in group["tests"]]


def test_as_a_parameter() -> None:
    asked = StructuredOutputs(json=A, disable_additional_properties=True)
    assert json.loads(asked.text) == SHUT
    assert json.loads(StructuredOutputs(json=A).text) == A
    with pytest.raises(InvalidSamplingError, match="which only json has, beside regex"):
        StructuredOutputs(regex="a", disable_additional_properties=True)
    with pytest.raises(InvalidSamplingError, match="must be true or false"):
        StructuredOutputs(json=A, disable_additional_properties=1)  # type: ignore[arg-type]
