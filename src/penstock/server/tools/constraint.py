"""What holds a model to whole calls: a structural tag in the family's own form.

A call that must be made is all of the answer, behind reasoning if the model thinks. Where it may be
made, text is free until the family's mark stands there; from then on only a call can follow. The
parts are those of vLLM's and xgrammar's structural tags, which `penstock.grammar` compiles.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from penstock.sampling import StructuredOutputs
from penstock.sampling.closed import closed
from penstock.sampling.structured import MOST_CHARACTERS
from penstock.server.errors import ApiError
from penstock.server.tools import gemma4_form, xml_form
from penstock.server.tools.flat import Flat, flat
from penstock.server.tools.forms import NAME, Form
from penstock.server.tools.offer import NO_ARGUMENTS, Function, Offer
from penstock.server.tools.parts import (
    Part,
    as_json,
    as_tag,
    definitions,
    held_json,
    members,
    sequence,
    text,
)
from penstock.server.tools.qwen3_coder import types_of
from penstock.server.tools.raw_text import Unsaid
from penstock.server.tools.reasoning import ThinkTags

__all__ = [
    "Part", "behind_analysis", "behind_reasoning", "calls", "check_size", "constrains",
    "shut", "structured", "text_or_calls",
]  # fmt: skip

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_PART_CHARACTERS: Final = 160  # around a property's schema or a tool's
_NO_OBJECT: Final[Part] = {"type": "any_text", "never_first": ["{"]}
"""Text that doesn't begin as a call would."""
_NAMES: Final = {"python": re.compile(r"[\w.\-]{1,256}"), "xml": re.compile(r"[^>]{1,256}")}
"""Of arguments, as the readers have them."""
_BLANK = r"[\n]{0,2}"  # behind reasoning


@dataclass(frozen=True, slots=True)
class _Shut(Function):
    """A tool whose schema is closed."""


def shut(offer: Offer) -> Offer:
    """The tools that may be called, with schemas that are closed once and not by all who read."""
    names = [one.name for one in fields(Function)]
    functions = []
    for function in offer.callable:
        own = {name: getattr(function, name) for name in names}
        own["parameters"] = None if function.parameters is None else closed(function.parameters)
        functions.append(_Shut(**own))
    return replace(offer, functions=tuple(functions))


def constrains(offer: Offer) -> bool:
    """Whether an answer must be held to calls that are whole."""
    return offer.active and (offer.mode == "required" or any(x.strict for x in offer.callable))


def calls(form: Form, offer: Offer, loose: Collection[str] = ()) -> Part:
    """An answer that only calls, at least once.

    loose: tools whose schema can't be followed; their arguments are any object.
    """
    several = form.several and offer.parallel
    tags = _tags(form, offer, loose)
    listed = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    return sequence(text(form.opening), listed, text(form.closing))


def text_or_calls(form: Form, offer: Offer, loose: Collection[str] = ()) -> Part:
    """An answer that may call. Only strict tools' arguments follow their schemas."""
    loose = {*loose, *(x.name for x in offer.callable if not x.strict)}
    parallel = form.several and offer.parallel
    if form.leading:
        return {"type": "or", "elements": [calls(form, offer, loose), dict(_NO_OBJECT)]}
    if form.arguments == "python":  # nothing but its name tells a call from a list
        tags = [_python_tag(form, x, offer, loose) for x in offer.callable]
        triggers = [tag["begin"] for tag in tags]
    elif form.opening:
        inner = calls(form, offer, loose)["elements"][1]
        tags = [as_tag(form.opening, inner, form.closing)]
        triggers = [form.trigger]
    else:
        tags = _tags(form, offer, loose)
        triggers = [form.trigger]
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "stop_after_first": not parallel,
    }


def check_size(form: Form, offer: Offer) -> None:
    """Raises ApiError for tools whose form is too long to be written, before it is.

    Where arguments are no JSON, each property is a part with the definitions that it may refer to;
    in Python's lists any call may stand behind any other, and any argument be the first.
    """
    sizes = [_size(form, function) for function in offer.callable]
    total = sum(sizes)
    lists = form.arguments == "python" and offer.mode == "auto" and offer.parallel
    if lists:
        total *= 1 + len(sizes)
    most = MOST_CHARACTERS["structural_tag"]
    if total > most:
        at = max(range(len(sizes)), key=sizes.__getitem__)
        advice = ", or parallel_tool_calls: false" if lists else ""
        raise ApiError(
            400,
            f"What {len(sizes):,} tools may be called with takes about {total:,} characters to say "
            f"in this model's form; at most {most:,} are read. The longest is "
            f"{offer.callable[at].place} with {sizes[at]:,}. Send fewer or shorter ones, tools "
            f"without strict and with tool_choice 'auto'{advice}.",
            param="tools",
            code="invalid_function_parameters",
        )


def _size(form: Form, function: Function) -> int:
    """Characters of a tool's part, about."""
    schema = _schema(function)
    if form.arguments in ("json", "gemma"):  # beyond a certain size Gemma's is JSON
        return len(json.dumps(schema)) + _PART_CHARACTERS
    made = flat(schema)
    each = len(json.dumps(definitions(schema))) + _PART_CHARACTERS
    size = len(json.dumps(made.properties)) + each * len(made.properties)
    if form.arguments == "python" and not made.required:
        size = size * (len(made.properties) + 1) // 2
    return size + _PART_CHARACTERS


def behind_reasoning(part: Part, tags: ThinkTags | None, inside: bool) -> Part:
    """A part that reasoning comes before. inside: which the prompt has opened."""
    if tags is None:
        return part
    if not inside:
        part = _not_beginning(part, tags.open)
    thought = as_tag("" if inside else tags.open, {"type": "any_text"}, tags.close)
    before = sequence(thought, {"type": "regex", "pattern": _BLANK})
    return sequence(before if inside else {"type": "optional", "content": before}, part)


def _not_beginning(part: Part, word: str) -> Part:
    """A part whose free text doesn't begin with a word, so that the word begins something else."""
    if part["type"] == "or":
        return {**part, "elements": [_not_beginning(one, word) for one in part["elements"]]}
    if part["type"] in ("any_text", "triggered_tags"):
        return {**part, "never_first": [*part.get("never_first", ()), word]}
    return part


def behind_analysis(part: Part, before: str, after: str) -> Part:
    """A part that a message of harmony's analysis may come before."""
    thought = as_tag(before, {"type": "any_text"}, after)
    return sequence({"type": "optional", "content": thought}, part)


def structured(part: Part) -> StructuredOutputs:
    """As sampling parameters have it."""
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": part})


def _tags(form: Form, offer: Offer, loose: Collection[str]) -> list[Part]:
    """A call of each function."""
    tags = []
    for function in offer.callable:
        content = _arguments(form, function, loose, len(offer.callable))
        tags.append(as_tag(form.before.replace(NAME, function.name), content, form.after))
    return tags


def _python_tag(form: Form, function: Function, offer: Offer, loose: Collection[str]) -> Part:
    """A list that begins with a call of this function."""
    begin = form.opening + form.before.replace(NAME, function.name)
    parts = [_arguments(form, function, loose, len(offer.callable)), text(form.after)]
    if offer.parallel:
        others = {"type": "or", "elements": _tags(form, offer, loose)}
        more = sequence(text(form.between), others)
        parts.append({"type": "star", "content": more})
    return as_tag(begin, sequence(*parts), form.closing)


def _arguments(form: Form, function: Function, loose: Collection[str], tools: int) -> Part:
    schema = _schema(function)
    if form.arguments == "gemma":
        write = gemma4_form.loose if function.name in loose else gemma4_form.held
        return write(schema, tools)
    if form.arguments == "json":
        held = _ANY_OBJECT if function.name in loose or not schema else {"type": "object", **schema}
        return as_json(held)
    made = flat(schema)
    if function.name not in loose:
        try:
            return _said(form, schema, made)
        except Unsaid as unsaid:
            if function.strict:
                raise _unsaid(function, str(unsaid)) from unsaid
    # As far as it goes: the arguments' names, and any values.
    known = {name: True for name in made.properties if _NAMES[form.arguments].fullmatch(name)}
    required = {name: None for name in made.required if name in known}
    kinds = {name: types_of(made.properties[name], schema) for name in known}
    values = {
        name: xml_form.loose(kinds[name]) if form.arguments == "xml" else as_json(True)
        for name in known
    }
    return _written(form, values, required)


def _said(form: Form, schema: Mapping[str, Any], made: Flat) -> Part:
    """Arguments as their schema has them. Raises Unsaid."""
    if made.problem:
        raise Unsaid(made.problem)
    for name in made.properties:
        if not _NAMES[form.arguments].fullmatch(name):
            raise Unsaid(f"the name {name[:60]!r} can't be written")
    values = {}
    for name, one in made.properties.items():
        try:
            values[name] = (
                xml_form.held(one, schema) if form.arguments == "xml" else held_json(one, schema)
            )
        except Unsaid as unsaid:
            raise Unsaid(f"{name[:60]!r}: {unsaid}") from unsaid
    return _written(form, values, made.required)


def _unsaid(function: Function, reason: str) -> ApiError:
    place = f"{function.place}.{function.schema_field}"
    return ApiError(
        400,
        f"{place} can't be followed in the form in which this model writes calls: {reason}. Change "
        "that part of the schema, or leave out strict.",
        param=place,
        code="invalid_function_parameters",
    )


def _schema(function: Function) -> Mapping[str, Any]:
    """Of its arguments, in which nothing is invented that it doesn't name."""
    given = function.parameters
    if given is None:
        return NO_ARGUMENTS
    return given if isinstance(function, _Shut) else closed(given)


def _written(form: Form, values: Mapping[str, Part], required: Collection[str]) -> Part:
    """The required arguments, then any of the others in their order. values: of all, by name."""
    if form.arguments == "python":
        return members(values, required, comma=", ", sign="=")
    optional = [name for name in values if name not in required]
    parts = [xml_form.parameter(name, values[name]) for name in required]
    parts += [
        {"type": "optional", "content": xml_form.parameter(name, values[name])} for name in optional
    ]
    return sequence(*parts)
