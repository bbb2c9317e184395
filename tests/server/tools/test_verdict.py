"""Whether arguments follow a schema: the official test suite, hostile schemas, and what is told."""

from __future__ import annotations

import json
import logging
import tarfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI

from penstock.server.routes import tools as routes
from penstock.server.tools.verdict import Verdict, judge
from tests.server.conftest import Running
from tests.server.tools.test_chat import ASK, tool
from tests.server.tools.test_templates import DATA, rows

SUITE = "structured/json-schema-test-suite.tar.xz"


def test_the_official_suite() -> None:
    """Never wrong; what isn't said is about what needs other documents or an evaluation."""
    if not (DATA / SUITE).is_file():
        pytest.skip(f"the shared data has no {SUITE}")
    wrong, count = [], Counter[bool | None]()
    with tarfile.open(DATA / SUITE) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if parts[:2] != ("tests", "draft2020-12") or member.name[-5:] != ".json":
                continue
            if "optional" in parts:
                continue
            file = tar.extractfile(member)
            assert file is not None
            for group in json.load(file):
                if not isinstance(group["schema"], dict):  # of arguments it is an object
                    continue
                for case in group["tests"]:
                    found = judge(group["schema"], json.dumps(case["data"]))
                    count[found.valid] += 1
                    if found.valid is not None and found.valid != case["valid"]:
                        wrong.append((member.name, group["description"], case["description"]))
    assert wrong == []
    assert count[True] > 500
    assert count[True] > 500
    assert count[False] > 350


@pytest.mark.parametrize("kind", ["parallel_multiple", "multiple", "simple_python"])
def test_bfcls_answers_are_judged_as_by_another_validator(kind: str) -> None:
    count = Counter[bool | None]()
    for schemas, calls in rows(kind, 100):
        for name, arguments in calls:
            text = json.dumps(arguments)
            found = judge(schemas[name], text).valid
            assert found is jsonschema_rs.is_valid(schemas[name], arguments), text
            count[found] += 1
            # … and so is the same call with something wrong in it.
            wrong = {**arguments, **{key: [None, {}] for key in list(arguments)[:1]}}
            expected = jsonschema_rs.is_valid(schemas[name], wrong)
            assert judge(schemas[name], json.dumps(wrong)).valid is expected
    assert count[True] > 90


@pytest.mark.parametrize(
    ("schema", "arguments", "place", "keyword"),
    [
        ({"properties": {"n": {"type": "integer"}}}, {"n": 1.5}, "n", "type"),
        ({"properties": {"n": {"type": "integer"}}}, {"n": 1.0}, None, ""),
        ({"properties": {"n": {"enum": [1, "a"]}}}, {"n": True}, "n", "enum"),
        ({"required": ["city"]}, {}, "city", "required"),
        ({"properties": {"a": {"items": {"maximum": 3}}}}, {"a": [1, 4]}, "a[1]", "maximum"),
        ({"properties": {}, "additionalProperties": False}, {"x": 1}, "x", "false"),
        ({"properties": {"a": {"pattern": "^[a-z]+$"}}}, {"a": "Rome"}, "a", "pattern"),
        ({"properties": {"a": {"multipleOf": 0.1}}}, {"a": 0.3}, None, ""),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"minLength": 3}]}}}, {"a": "b"},
         "a", "anyOf"),
        ({"properties": {"a": {"format": "date"}}}, {"a": "soon"}, None, ""),
    ],
)  # fmt: skip
def test_the_place_is_named(
    schema: dict[str, Any], arguments: Any, place: str | None, keyword: str
) -> None:
    expected = Verdict(True) if place is None else Verdict(False, place, keyword)
    assert judge(schema, json.dumps(arguments)) == expected


def of_a(schema: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"a": schema}}


ENDLESS = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(64)}
LONG = "ab" * 1000
HOSTILE: list[tuple[dict[str, Any], Any, bool | None]] = [
    (of_a({"pattern": "^(a+)+$"}), {"a": "a" * 2000 + "!"}, False),
    (of_a({"pattern": "^(a|aa)+b$"}), {"a": "a" * 2000 + "!"}, False),
    (of_a({"pattern": "(a|b)*a(a|b){18}(c|d)*c(c|d){18}$"}), {"a": LONG}, False),
    (of_a({"pattern": "^((([a-c]{1,99}){1,99}){1,99}){1,99}$"}), {"a": LONG}, None),
    (of_a({"pattern": "(" * 400 + "a" + ")" * 400}), {"a": "a"}, None),
    (of_a({"pattern": "^(?=a)a"}), {"a": "a"}, None),
    (of_a({"pattern": "a"}), {"a": "a" * 1_000_000}, None),
    ({"allOf": [{"$ref": "#"}]}, {}, None),
    ({"$ref": "#/$defs/d0", "$defs": ENDLESS | {"d64": True}}, {}, None),
    (of_a({"uniqueItems": True}), {"a": list(range(5000))}, None),
    (of_a({"items": {"enum": list(range(50_000))}}), {"a": [49_999] * 50}, None),
    (of_a({"unevaluatedProperties": False}), {"a": {}}, None),
    (of_a({"dependentRequired": 5}), {"a": {}}, None),
    (of_a({"multipleOf": 0.1}), {"a": 1e400}, None),
    (of_a({"anyOf": [{"pattern": "(?=a)"}, {"type": "string"}]}), {"a": "b"}, True),
    (of_a({"not": {"pattern": "(?=a)"}}), {"a": "b"}, None),
]  # fmt: skip


@pytest.mark.alone
@pytest.mark.parametrize(("schema", "arguments", "valid"), HOSTILE)
def test_it_takes_no_longer_than_it_may(
    schema: dict[str, Any], arguments: Any, valid: bool | None
) -> None:
    start = time.perf_counter()
    assert judge(schema, json.dumps(arguments)).valid is valid
    assert time.perf_counter() - start < 5


def counts(server: Running) -> Counter[str]:
    found = Counter[str]()
    for line in server.service.metrics.text().decode().splitlines():
        if line.startswith("penstock:tool_calls_total"):
            name, value = line.rsplit(" ", 1)
            found[name.partition('valid="')[2].partition('"')[0]] += int(float(value))
    return found


def test_calls_are_counted_and_sent_as_they_are(
    client: OpenAI,
    server: Running,
    as_family: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    as_family("hermes")
    monkeypatch.setattr(routes, "_form", lambda how, asked, field: None)
    schema = {"type": "object", "properties": {"n": {"maximum": 9}, "p": {"pattern": "^(?=a)"}}}
    logger = logging.getLogger("penstock.server")
    monkeypatch.setattr(logger, "propagate", True)
    for arguments, word in (
        ('{"n": 3}', "true"),
        ('{"n": 30}', "false"),
        ('{"p": "a"}', "unknown"),
    ):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        body = {"structured_outputs": {"choice": [text]}}
        before = counts(server)
        caplog.clear()
        asked: dict[str, Any] = {"model": "stories", "messages": ASK, "tools": [tool("f", schema)],
                                 "extra_body": body}  # fmt: skip
        answer = client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.arguments == arguments
        assert list(client.chat.completions.create(**asked, stream=True))
        end = time.monotonic() + 10
        while (counts(server) - before).total() < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert counts(server) - before == Counter({word: 2})
        warned = [x for x in caplog.records if "schema" in x.message]
        assert len(warned) == (2 if word == "false" else 0)
        for record in warned:
            fields = record.fields  # type: ignore[attr-defined]
            assert (fields["tool"], fields["place"], fields["keyword"]) == (
                "f", "arguments.n", "maximum",
            )  # fmt: skip
            assert record.levelno == logging.WARNING


def test_references_may_be_percent_encoded() -> None:
    schema = {"properties": {"n": {"$ref": "#/$defs/a%20b"}}, "$defs": {"a b": {"type": "integer"}}}
    assert judge(schema, '{"n": 3}').valid is True
    assert judge(schema, '{"n": "3"}').valid is False
