"""Forms of answers over HTTP: what can't be followed is refused at once, the rest is followed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema_rs
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from tests.server.conftest import Running

CHAT, WORDS = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Tell me of a dog."}]
LEAST: dict[str, dict[str, Any]] = {CHAT: {"messages": ASK}, WORDS: {"prompt": "A dog"}}
PLAIN = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
DOG = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 19},
        "colour": {"enum": ["black", "brown", "white"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def within(**bounds: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "integer", **bounds}}, "required": ["a"]}


# (what is sent, the field to blame, words of the message)
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such type": ({"guided_json": {"type": "strin"}}, "guided_json", "strin"),
    "a keyword that can't be held to": (
        {"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "#/uniqueItems"),
    "contradictory": (
        {"response_format": schema_of(within(minimum=5, maximum=1))},
        "response_format", "required property 'a' is unsatisfiable"),
    "nothing satisfies false": ({"guided_json": False}, "guided_json", "no value follows"),
    "an empty enum": ({"guided_json": {"enum": []}}, "guided_json", "no value follows"),
    "an empty pattern that is long": (
        {"guided_json": {"type": "string", "pattern": "^$", "minLength": 2}},
        "guided_json", "no value follows"),
    "a reference to nowhere": (
        {"structured_outputs": {"json": {"$ref": "#/$defs/no"}}}, "structured_outputs", "$defs/no"),
    "no JSON": ({"guided_json": "{"}, "guided_json", "isn't JSON"),
    "a schema of 5 MB": (
        {"guided_json": {"description": "x" * (5 << 20)}}, "guided_json", "at most 4,194,304"),
    "an enum of 100,000": (
        {"guided_json": {"enum": [f"value {i}" for i in range(100_000)]}},
        "guided_json", "at #/enum: 100,000 values; at most 40,000"),
    "a product of 12 unions": (
        {"guided_json": {"allOf": [
            {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(3)]}
            for i in range(12)]}}, "guided_json", "larger than can be compiled"),
    "an open group": ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    "look-ahead": ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
    "a rule that needs itself": (
        {"guided_grammar": 'start: x\nx: x "a"\n'}, "guided_grammar", "line 2: the rule 'x' needs"),
    "a root that needs itself": (
        {"guided_grammar": 'root ::= "a" root'}, "guided_grammar", "the rule 'root' needs itself"),
    "no such rule": ({"guided_grammar": "start: y"}, "guided_grammar", "line 1, column 8"),
    "no such tag": (
        {"structural_tag": {"type": "structural_tag", "format": {"type": "nope"}}},
        "structural_tag", "#/format: the type 'nope'"),
    "a trigger that begins nothing": (
        {"response_format": {
            "type": "structural_tag", "triggers": ["<b>"],
            "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}},
        "response_format", "#/tags/0/begin"),
    "two forms": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
    "a format without its schema": (
        {"response_format": {"type": "json_schema"}}, "response_format", "needs 'json_schema'"),
    "another format's field": (
        {"response_format": {"type": "json_object", "pattern": "a"}},
        "response_format", "has no 'pattern'"),
    "no such form": (
        {"structured_outputs": {"jso": {}}}, "structured_outputs", "Did you mean 'json'?"),
    "space of nothing": (
        {"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    "a form and ignore_eos": (
        {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured_outputs"),
}  # fmt: skip


def refused(server: Running, path: str, more: dict[str, Any]) -> tuple[str | None, str]:
    """(param, message): the same with and without stream, one of them within a second."""
    found, seconds = [], []
    with server.client() as client:
        for stream in (False, True):
            text = json.dumps({**LEAST[path], "max_tokens": 8, **more, "stream": stream})
            start = time.perf_counter()
            answer = client.post(
                path, content=text, headers={"content-type": "application/json"}
            )  # fmt: skip
            seconds.append(time.perf_counter() - start)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            found.append((error["param"], error["message"]))
    assert found[0] == found[1]
    assert min(seconds) < 1, seconds
    return found[0]


@pytest.fixture(scope="module")
def usual(server: Running) -> list[int]:
    with server.client() as client:
        return client.post(WORDS, json=PLAIN).json()["choices"][0]["token_ids"]


@pytest.fixture
def untouched(server: Running, usual: list[int]) -> Any:
    """Afterwards the engine answers as before, and holds nothing."""
    yield
    with server.client() as client:
        assert client.post(WORDS, json=PLAIN).json()["choices"][0]["token_ids"] == usual
        assert client.get("/health").status_code == 200
    assert server.rest()["used_blocks"] == 0


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("path", [CHAT, WORDS])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cant_be_followed_is_refused(server: Running, path: str, case: str) -> None:
    more, field, words = REFUSED[case]
    param, message = refused(server, path, more)
    assert param == field
    assert words in message


@pytest.mark.usefixtures("untouched")
def test_a_body_that_is_too_large(server: Running) -> None:
    most = server.service.config.max_body_bytes
    text = json.dumps({**LEAST[CHAT], "guided_json": {"description": "x" * most}})
    with server.client() as client:
        answer = client.post(CHAT, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert f"{most:,}" in answer.json()["error"]["message"]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "pattern", ["(x+x+)+y", "(a|aa)+$", "((a{1,9}){1,9}){1,9}b", "(a|b)*a(a|b){300}"]
)
def test_regexes_on_which_others_take_forever(server: Running, pattern: str) -> None:
    """Followed by an automaton, which never tries a way again."""
    start = time.perf_counter()
    with server.client() as client:
        body = {"prompt": "x", "guided_regex": pattern, "max_tokens": 24, "temperature": 0}
        answer = client.post(WORDS, json=body)
    assert answer.status_code == 200
    assert time.perf_counter() - start < 5


def test_a_choice_of_100_000(server: Running) -> None:
    choices = [f"value {i}" for i in range(100_000)]
    with server.client() as client:
        answer = client.post(WORDS, json={"prompt": "x", "guided_choice": choices}).json()
    assert answer["choices"][0]["text"] in choices


# ── forms, and what is banned ────────────────────────────────────────────────────────────────────

YES_OR_NO = {"guided_choice": ["yes", "no"]}


@pytest.fixture
def first(server: Running) -> list[int]:
    """The tokens with which "yes" or "no" may begin."""
    tokenizer = server.service.prompts.tokenizer
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    found = [i for i, x in enumerate(pieces) if x and (b"yes".startswith(x) or b"no".startswith(x))]
    assert len(found) >= 2
    return found


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("path", [CHAT, WORDS])
def test_bans_that_leave_nothing_to_begin_with(
    server: Running, path: str, first: list[int]
) -> None:
    others = [token for token in (300, 301) if token not in first]
    bans = {str(token): -100 for token in first}
    for field, more in (
        ("allowed_token_ids", {"allowed_token_ids": others}),
        ("logit_bias", {"logit_bias": bans}),
        ("logit_bias", {"allowed_token_ids": [*first, *others], "logit_bias": bans}),
    ):
        param, message = refused(server, path, {**YES_OR_NO, **more})
        assert param == field
        assert f"begin with {len(first)} tokens" in message
    param, message = refused(server, path, {"guided_regex": "a", "bad_words": ["a"]})
    assert (param, "begin with" in message) == ("bad_words", True)


def test_bans_that_leave_something(server: Running, first: list[int]) -> None:
    tokenizer = server.service.prompts.tokenizer
    (no,) = tokenizer.encode("n", add_special_tokens=False)
    assert no in first
    most = {str(token): -100 for token in first if token != no}
    all_but_banned = {str(token): -99 for token in first}
    with server.client() as client:
        for bias, texts in ((most, ["no"]), (all_but_banned, ["yes", "no"])):
            answer = client.post(WORDS, json={**LEAST[WORDS], **YES_OR_NO, "logit_bias": bias})
            assert answer.json()["choices"][0]["text"] in texts


def test_a_healed_end_that_is_banned(server: Running) -> None:
    body = {"prompt": "Once upon a ti", "token_healing": True, "allowed_token_ids": [300]}
    with server.client() as client:
        answer = client.post(WORDS, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "allowed_token_ids"
    assert "token_healing" in answer.json()["error"]["message"]


# ── the official client ──────────────────────────────────────────────────────────────────────────


class Dog(BaseModel):
    name: str = Field(min_length=2, max_length=12)
    age: int = Field(ge=1, le=19)
    colour: Literal["black", "brown", "white"]


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
        yield client


OPTIONS: dict[str, Any] = {"model": "stories", "messages": ASK, "max_completion_tokens": 120}


def test_a_schema_three_times(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        **OPTIONS, response_format=schema_of(DOG), n=3, seed=5, temperature=1.5
    )
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    for text, choice in zip(texts, answer.choices, strict=True):
        jsonschema_rs.validate(DOG, json.loads(text))
        assert choice.finish_reason == "stop"


def test_streamed_forms_are_the_same(client: OpenAI) -> None:
    options = {**OPTIONS, "response_format": schema_of(DOG), "seed": 6}
    whole = client.chat.completions.create(**options).choices[0].message.content
    pieces = [
        choice.delta.content or ""
        for chunk in client.chat.completions.create(**options, stream=True)
        for choice in chunk.choices
    ]
    assert "".join(pieces) == whole
    jsonschema_rs.validate(DOG, json.loads(whole))


def test_parse_into_a_class(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(**OPTIONS, response_format=Dog, seed=7)
    dog = parsed.choices[0].message.parsed
    assert isinstance(dog, Dog)
    older = client.beta.chat.completions.parse(**OPTIONS, response_format=Dog, seed=7)
    assert older.choices[0].message.parsed == dog
    with client.chat.completions.stream(**OPTIONS, response_format=Dog, seed=7) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == dog


def test_any_object(client: OpenAI) -> None:
    """Of a model of children's stories one may not end, but it always begins as an object."""
    answer = client.chat.completions.create(
        **OPTIONS, response_format={"type": "json_object"}, seed=1
    )
    (choice,) = answer.choices
    text = choice.message.content
    assert text.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:
        assert choice.finish_reason == "length"


@pytest.fixture
def no_space(server: Running) -> dict[str, int]:
    """A bias against tokens of nothing but space, of which JSON may have any amount."""
    tokenizer = server.service.prompts.tokenizer
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    return {str(i): -100 for i, piece in enumerate(pieces) if piece.isspace()}


@pytest.mark.parametrize(
    ("more", "schema"),
    [
        ({"guided_json": DOG}, DOG),
        ({"guided_json": json.dumps(DOG), "guided_whitespace_pattern": ""}, DOG),
        ({"structured_outputs": {"json": DOG, "disable_any_whitespace": True}}, DOG),
        ({"guided_choice": ["1", "2"]}, {"enum": [1, 2]}),
        ({"guided_regex": "[1-9][0-9]"}, {"type": "integer", "minimum": 10, "maximum": 99}),
        ({"guided_grammar": 'root ::= "[" ("1" | "2") "]"'}, {"enum": [[1], [2]]}),
        ({"structural_tag": {"type": "structural_tag",
                             "format": {"type": "json_schema", "json_schema": DOG}}}, DOG),
    ],
)  # fmt: skip
def test_vllms_names(
    client: OpenAI, more: dict[str, Any], schema: Any, no_space: dict[str, int]
) -> None:
    more = {**more, "logit_bias": no_space}
    text = client.chat.completions.create(**OPTIONS, seed=2, extra_body=more).choices[0].message
    jsonschema_rs.validate(schema, json.loads(text.content))
    words = client.completions.create(
        model="stories", prompt="A dog", max_tokens=120, seed=2, extra_body=more
    )
    jsonschema_rs.validate(schema, json.loads(words.choices[0].text))


def test_the_client_is_told(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            **OPTIONS, response_format=schema_of({"type": "strin"}), stream=True
        )
    assert caught.value.code == "invalid_structure"
    assert caught.value.param == "response_format"


def test_responses_and_messages_follow_a_schema(server: Running) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "number", "schema": schema, "strict": True}
    with server.client() as client:
        answer = client.post(
            "/v1/responses",
            json={"input": "A number?", "text": {"format": form}, "max_output_tokens": 90},
        ).json()
        assert json.loads(answer["output"][0]["content"][0]["text"])["n"] in (1, 22)
        assert answer["text"]["format"] == form
        form = {"type": "json_schema", "schema": schema}
        for more in ({"output_format": form}, {"output_config": {"format": form}}):
            body = {"model": "stories", "max_tokens": 90, "messages": ASK, **more}
            said = client.post("/v1/messages", json=body).json()
            assert json.loads(said["content"][0]["text"])["n"] in (1, 22)
            assert said["stop_reason"] == "end_turn"
