"""Structural tags in both forms: what they let through, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.grammar.test_grammar_gbnf import written

from penstock.errors import InvalidSamplingError
from penstock.grammar import Grammars
from penstock.sampling.structured import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = {"type": "json_schema", "json_schema": SCHEMA}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str, **more: Any) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern, **more}


def gbnf(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def row(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [tag("<f=x>", CALL, "</f>"), tag("<f=y>", constant("!"), "</f>")],
}
OLDER = {
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": SCHEMA, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
# name: (the format, what may be written, what may not)
FORMS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "free text between": (
        TRIGGERED,
        ("", "hi < there\n", '<f=x>{"a":3}</f>', 'hi <f=x>{"a": 3}</f> and <f=y>!</f> end'),
        ("hi <f=z>", '<f=x>{"b":1}</f>', '<f=x>{"a":1}', "a <f="),
    ),
    "at least one": (
        {**TRIGGERED, "at_least_one": True},
        ("<f=y>!</f>", "<f=y>!</f> more <f=y>!</f>"),
        ("", "text", "text <f=y>!</f>"),
    ),
    "one only": (
        {**TRIGGERED, "stop_after_first": True},
        ("", "text", "text <f=y>!</f>"),
        ("<f=y>!</f> more",),
    ),
    "exactly one": (
        {**TRIGGERED, "at_least_one": True, "stop_after_first": True},
        ("<f=y>!</f>",),
        ("", "text", "<f=y>!</f>x"),
    ),
    "thinking first": (
        {
            "type": "sequence",
            "elements": [tag("<think>", {"type": "any_text"}, "</think>"), CALL],
        },
        ('<think>well </ \n so</think>{"a":1}', '<think></think>{"a":1}'),
        ('<think>a</think>b{"a":1}', '{"a":1}', "<think>a"),
    ),
    "two ends": (
        tag("<a>", {"type": "regex", "pattern": "[0-9/]+"}, ["</a>", "</b>"]),
        ("<a>1/2</a>", "<a>12</b>"),
        ("<a></a>", "<a>1</c>"),
    ),
    "tags within a tag": (
        tag("<a>", TRIGGERED, "</a>"),
        ("<a>hi <f=y>!</f> x</a>", "<a></a>"),
        ("<a><f=y></a>", "<a></a>b", "<a>hi"),
    ),
    "separated": (
        {
            "type": "tags_with_separator",
            "separator": ", ",
            "tags": [tag("[", {"type": "regex", "pattern": "[0-9]+"}, "]")],
        },
        ("", "[1]", "[1], [23]"),
        ("[1],", "x", "[1][2]"),
    ),
    "choices and counts": (
        {
            "type": "repeat",
            "min": 2,
            "max": 3,
            "content": {"type": "or", "elements": [constant("x"), constant("yz")]},
        },
        ("xyz", "xxx", "yzyzyz"),
        ("x", "xxxx"),
    ),
    "optional parts": (
        {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": constant("a")},
                {"type": "star", "content": constant("b")},
                {"type": "plus", "content": {"type": "grammar", "grammar": 'root ::= "c" | "d"'}},
            ],
        },
        ("c", "abbdc", "bd"),
        ("a", "aac", "cb"),
    ),
    "without a word": (
        tag("<a>", {"type": "any_text", "excludes": ["bad", "ugly"]}, "</a>"),
        ("<a>good</a>", "<a>b a d</a>"),
        ("<a>so bad</a>", "<a>ugly</a>"),
    ),
}
FORMS |= {
    "a regex up to its end": (
        tag("<a>", regex(".*"), "</a>"),
        ("<a>x</a>", "<a></a>"),
        ("<a>x", "<a>x</a>y"),
    ),
    "a regex that may have its end": (
        tag("(", regex("[a-z]+"), "x)"),
        ("(aax)", "(xxx)"),
        ("(x)", "(aa)"),
    ),
    "text behind such a tag": (
        {**TRIGGERED, "tags": [tag("<f=x>", regex("[^\n]*"), "</f>")]},
        ("a <f=x>b</f> c", "<f=x>b</f><f=x>d</f>"),
        ("a <f=x>b",),
    ),
    "a grammar up to its end": (
        tag("<a>", gbnf('root ::= [a-z]+ ("<" [a-z]+)?'), ["</a>", "</b>"]),
        ("<a>x</a>", "<a>x<y</b>"),
        ("<a></a>",),
    ),
    "regexes in a row": (
        row(regex("[a-z]*"), constant("ab"), gbnf("root ::= [0-9]+"), constant("5")),
        ("ab15", "xabab555"),
        ("ab1", "x15"),
    ),
    "regexes in a row, in a tag": (
        tag("[", row(CALL, regex(" *[a-z]*"), constant("!")), "]"),
        ('[{"a": 1} x!]', '[{"a": 1}!]'),
        ('[{"a": 1} x]',),
    ),
    "empty regexes": (tag("a", regex(""), "b"), ("ab",), ("a",)),
    "never": (
        row(constant("a"), {"type": "repeat", "min": 0, "max": 0, "content": constant("b")}),
        ("a",),
        ("ab",),
    ),
    "several regexes for one text": (
        tag("<", regex("[a-z ]*", also=["(?s:.{2,5})", ".*c"], excludes=["bad"]), ">"),
        ("<abc>", "<a c>"),
        ("<c>", "<abcdec>", "<badc>"),
    ),
    "a text that doesn't begin so": (
        {**TRIGGERED, "never_first": ["<think>"]},
        ("", "a <think>", "<thin", 'hi <f=x>{"a":3}</f><think>'),
        ("<think>", " <think> <f=y>!</f>"),
    ),
}


def spec_of(form: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("tokenizer", ["gpt2", "qwen2.5"])
def test_a_format_lets_through_what_it_describes(
    name: str, tokenizer: str, grammars_of: Callable[[str], Grammars]
) -> None:
    form, right, wrong = FORMS[name]
    grammars = grammars_of(tokenizer)
    for text in right:
        assert written(grammars, spec_of(form), text), text
    for text in wrong:
        assert not written(grammars, spec_of(form), text), text


def test_the_older_form_is_the_newer_one(grammars_of: Callable[[str], Grammars]) -> None:
    spec = StructuredOutputs(structural_tag=OLDER)
    for text in ("hi", 'hi <f=y>{"a":1}</f> and <f=x>{"a":2}</f>'):
        assert written(grammars_of("gpt2"), spec, text)
    for text in ("<f=z>", "<f=x>1"):
        assert not written(grammars_of("gpt2"), spec, text)


def test_special_tokens_come_only_where_they_are_named(
    grammars_of: Callable[[str], Grammars],
) -> None:
    grammars = grammars_of("qwen2.5")
    named = tag("<|vision_start|>", {"type": "any_text"}, {"type": "token", "token": "<|box_end|>"})
    triggered = {"type": "triggered_tags", "triggers": ["<|vision_start|>"], "tags": [named]}
    assert written(grammars, spec_of(triggered), "a <|vision_start|>b<|box_end|> c")
    assert not written(grammars, spec_of(triggered), "a <|box_end|>")
    assert not written(grammars, spec_of(triggered), "<|vision_start|>b<|vision_end|>")
    state = grammars.start(spec_of(constant("<|vision_start|>")))
    assert state.forced() == [grammars.vocabulary.tokenizer.token_to_id("<|vision_start|>")]


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown type": ({"type": "any_tokens"}, "at #/format: the type 'any_tokens' can't"),
    "no type": ({"value": "x"}, "at #/format/type: type must be a text"),
    "unknown field": ({"type": "any_text", "max_tokens": 3}, "'max_tokens' can't be followed"),
    "text without end": (
        {"type": "sequence", "elements": [{"type": "any_text"}, constant("a")]},
        "at #/format/elements/0: any_text has no end here",
    ),
    "no trigger": (
        {**TRIGGERED, "triggers": ["<g"]},
        "at #/format/tags/0/begin: 0 of the triggers stand at the beginning of '<f=x>'",
    ),
    "two triggers": ({**TRIGGERED, "triggers": ["<f", "<f="]}, "2 of the triggers"),
    "schema": (
        tag("a", {"type": "json_schema", "json_schema": {"x": 1, "pattern": "(?=a)"}}, "b"),
        "at #/format/content/json_schema/pattern: the pattern",
    ),
    "style": ({**CALL, "style": "qwen_xml"}, "only the style json"),
    "grammar": ({"type": "grammar", "grammar": "root ::= x"}, "line 1: there is no rule 'x'"),
    "token": ({"type": "token", "token": "<|nothing|>"}, "the model has no token '<|nothing|>'"),
    "counts": ({"type": "repeat", "min": 3, "max": 2, "content": constant("a")}, "from 3 to 2"),
    "no tags": ({**TRIGGERED, "tags": []}, "there are no tags"),
    "a regex that takes the next part": (
        row(regex(".*"), CALL),
        "at #/format/elements/0: what it matches may go on with what the part behind it begins",
    ),
    "a grammar that does": (
        {"type": "star", "content": row(CALL, gbnf("root ::= [^x]*"))},
        "at #/format/content/elements/1: what it matches may go on",
    ),
    "no regex": (row(regex("a("), CALL), r"unclosed group"),
    "nothing": (
        tag("a", regex("a+", also=["b+"]), "b"),
        "at #/format/content: no text matches all of it",
    ),
    "also": (regex("a", also=[1]), "at #/format/also: also must be a list of texts"),
    "kind": ({"type": "sequence", "elements": "ab"}, "elements must be a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_isnt_a_format_is_refused_with_its_place(
    name: str, grammars_of: Callable[[str], Grammars]
) -> None:
    form, message = REFUSED[name]
    with pytest.raises(InvalidSamplingError, match=message.replace("|", r"\|")):
        grammars_of("gpt2").compile(spec_of(form))
