"""What a request asks for, written as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.grammar import gbnf, lark, schema, structural_tag
from penstock.grammar.matcher import first_line
from penstock.grammar.probe import STEPS, STEPS_OF_A_REGEX, suspicious
from penstock.grammar.refusal import Refusal
from penstock.grammar.shortest import check_shortest
from penstock.grammar.subschemas import Schema
from penstock.grammar.vocabulary import Vocabulary
from penstock.sampling.structured import StructuredOutputs

MOST_CHOICES = 100_000

Explain = Callable[[str], tuple[str, str, str]]
"""The library's message → our reason, the place, and what of the message to show."""


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar as llguidance takes it, and how its messages are to be read."""

    text: str
    explain: Explain
    fuel: int = 500_000
    steps: int = STEPS  # for which it is tried out
    parts: Mapping[str, Source] = field(default_factory=dict)  # tried out alone, by place


def source_of(spec: StructuredOutputs, vocabulary: Vocabulary) -> Source:
    """Raises Refusal for what can't be written."""
    match spec.kind:
        case "json" | "json_object":
            return _of_json(spec)
        case "regex":
            check_shortest(str(spec.regex))
            source = _of_lark(f"start: {lark.regex(str(spec.regex))}\n", _explain_regex)
            return replace(source, steps=STEPS_OF_A_REGEX)
        case "choice":
            return _of_choices(spec)
        case "grammar":
            return _of_grammar(str(spec.grammar))
        case _:
            text = structural_tag.to_lark(json.loads(spec.text), vocabulary)
            lark.check(text)
            return _of_lark(text, _explain)


def _of_json(spec: StructuredOutputs) -> Source:
    document = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
    whitespace = schema.Whitespace.of(spec)
    prepared = schema.prepare(document)

    def source(part: Schema, steps: int) -> Source:
        text = json.dumps({"grammars": [{"json_schema": schema.with_options(part, whitespace)}]})
        return Source(text, lambda detail: schema.explain(document, detail), steps=steps)

    tried = {
        place: source({"type": "string", "pattern": pattern}, STEPS_OF_A_REGEX)
        for place, pattern in suspicious(prepared)
    }
    return replace(source(prepared, 0), parts=tried)


def _of_choices(spec: StructuredOutputs) -> Source:
    choices = spec.choice or ()
    if len(choices) > MOST_CHOICES:
        raise Refusal(
            f"it has {len(choices):,} choices, of which at most {MOST_CHOICES:,} are read"
        )
    for i, one in enumerate(choices):
        if half := re.search("[\ud800-\udfff]", one):
            raise Refusal(
                f"it holds half of a surrogate pair at {half.start()}, which is no character",
                f"choice[{i}]",
            )
    # One terminal: as alternatives of a rule, a thousand of them would take seconds.
    options = " | ".join(map(lark.literal, choices))
    choice = _of_lark(f"start: CHOICE\nCHOICE: {options}\n", _explain)
    return replace(
        choice, fuel=1_000_000, steps=0
    )  # plain texts burn fast: 100,000 take half a second


def _of_grammar(text: str) -> Source:
    if gbnf.looks_like_gbnf(text):
        written = gbnf.to_lark(text)
        return _of_lark(written, _explain)
    lark.check(text)
    return _of_lark(text, _explain_lark)


def _of_lark(text: str, explain: Explain) -> Source:
    return Source(json.dumps({"grammars": [{"lark_grammar": text}]}), explain)


def _explain(detail: str) -> tuple[str, str, str]:
    return "the library refuses it", "", first_line(detail)


def _explain_regex(detail: str) -> tuple[str, str, str]:
    errors = re.findall(r"error: ([^\n]+)", detail)
    said = errors[-1] if errors else first_line(detail).split(": ", 1)[-1]
    return "the regex isn't one that can be followed", "", said


def _explain_lark(detail: str) -> tuple[str, str, str]:
    match = re.match(r"(?:at )?(\d+)\((\d+)\): (.*)", detail)
    if match is None:
        return _explain(detail)
    return "the library refuses it", f"line {match[1]}, column {match[2]}", first_line(match[3])
