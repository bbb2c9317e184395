"""What holds a model to whole calls: a structural tag in the family's own form.

A call that must be made is all of the answer, behind reasoning if the model thinks. Where it may be
made, text is free until the family's mark stands there; from then on only a call can follow. The
parts are those of vLLM's and xgrammar's structural tags, which `penstock.grammar` compiles.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeAlias

from penstock.sampling import StructuredOutputs
from penstock.sampling.structured import MOST_CHARACTERS
from penstock.server.errors import ApiError
from penstock.server.tools import qwen3_coder
from penstock.server.tools.forms import NAME, Form
from penstock.server.tools.offer import NO_ARGUMENTS, Function, Offer
from penstock.server.tools.reasoning import ThinkTags

Part: TypeAlias = dict[str, Any]

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_PART_CHARACTERS: Final = 160  # around a property's schema or a tool's
_NO_OBJECT: Final[Part] = {"type": "regex", "pattern": r"(?s:\s*(?:[^{\s].*)?)"}
"""Text that doesn't begin as a call would."""
_BLANK = r"[\n]{0,2}"  # behind reasoning


def constrains(offer: Offer) -> bool:
    """Whether an answer must be held to calls that are whole."""
    return offer.active and (offer.mode == "required" or any(x.strict for x in offer.callable))


def calls(form: Form, offer: Offer, loose: Collection[str] = ()) -> Part:
    """An answer that only calls, at least once.

    loose: tools whose schema can't be followed; their arguments are any object.
    """
    several = form.several and offer.parallel
    tags = [_tag(form, function, loose) for function in offer.callable]
    listed = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.between,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    return _sequence(_text(form.opening), listed, _text(form.closing))


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
        tags = [_as_tag(form.opening, inner, form.closing)]
        triggers = [form.trigger]
    else:
        tags = [_tag(form, function, loose) for function in offer.callable]
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
    if form.arguments == "json":
        return len(json.dumps(schema)) + _PART_CHARACTERS
    properties = schema.get("properties") or {}
    each = len(json.dumps(_definitions(schema))) + _PART_CHARACTERS
    size = len(json.dumps(properties)) + each * len(properties)
    if form.arguments == "python" and not schema.get("required"):
        size = size * (len(properties) + 1) // 2
    return size + _PART_CHARACTERS


def behind_reasoning(part: Part, tags: ThinkTags | None, inside: bool) -> Part:
    """A part that reasoning comes before. inside: which the prompt has opened."""
    if tags is None:
        return part
    thought = _as_tag("" if inside else tags.open, {"type": "any_text"}, tags.close)
    before = _sequence(thought, {"type": "regex", "pattern": _BLANK})
    return _sequence(before if inside else {"type": "optional", "content": before}, part)


def behind_analysis(part: Part, before: str, after: str) -> Part:
    """A part that a message of harmony's analysis may come before."""
    thought = _as_tag(before, {"type": "any_text"}, after)
    return _sequence({"type": "optional", "content": thought}, part)


def structured(part: Part) -> StructuredOutputs:
    """As sampling parameters have it."""
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": part})


def _text(value: str) -> Part:
    return {"type": "const_string", "value": value}


def _sequence(*parts: Part) -> Part:
    return {"type": "sequence", "elements": list(parts)}


def _as_tag(begin: str, content: Part, end: str) -> Part:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _json(schema: Any) -> Part:
    """A value of a schema, laid out as templates and training texts have it."""
    return {"type": "json_schema", "json_schema": schema, "any_whitespace": False}


def _tag(form: Form, function: Function, loose: Collection[str]) -> Part:
    content = _arguments(form, function, loose)
    return _as_tag(form.before.replace(NAME, function.name), content, form.after)


def _python_tag(form: Form, function: Function, offer: Offer, loose: Collection[str]) -> Part:
    """A list that begins with a call of this function."""
    begin = form.opening + form.before.replace(NAME, function.name)
    parts = [_arguments(form, function, loose), _text(form.after)]
    if offer.parallel:
        others = [_tag(form, other, loose) for other in offer.callable]
        more = _sequence(_text(form.between), {"type": "or", "elements": others})
        parts.append({"type": "star", "content": more})
    return _as_tag(begin, _sequence(*parts), form.closing)


def _arguments(form: Form, function: Function, loose: Collection[str]) -> Part:
    schema = _schema(function)
    if form.arguments == "json":
        held = _ANY_OBJECT if function.name in loose or not schema else {"type": "object", **schema}
        return _json(held)
    properties = schema.get("properties") or {}
    needed = dict.fromkeys(name for name in schema.get("required") or () if name in properties)
    required, optional = list(needed), [name for name in properties if name not in needed]
    if form.arguments == "xml":
        parts = [_xml(name, schema, function.name in loose) for name in required]
        parts += [
            {"type": "optional", "content": _xml(name, schema, function.name in loose)}
            for name in optional
        ]
        return _sequence(*parts)
    return _python(required, optional, schema, function.name in loose)


def _schema(function: Function) -> Mapping[str, Any]:
    return NO_ARGUMENTS if function.parameters is None else function.parameters


def _value(name: str, schema: Mapping[str, Any], loose: bool) -> Part:
    """One argument's value as JSON; references lead to definitions, which come along."""
    one = schema["properties"][name]
    if loose:
        return _json(True)
    definitions = _definitions(schema)
    held = {**one, **definitions} if isinstance(one, Mapping) else one
    return _json(held)


def _definitions(schema: Mapping[str, Any]) -> Part:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _xml(name: str, schema: Mapping[str, Any], loose: bool) -> Part:
    begin = f"{qwen3_coder.PARAMETER}{name}>\n"
    end = f"\n{qwen3_coder.PARAMETER_END}\n"
    one = qwen3_coder.resolved(schema["properties"][name], schema)
    types = set(qwen3_coder.types_of(one, schema))
    if types <= {"string"}:  # written as it is
        listed = one.get("enum") if isinstance(one, Mapping) else None
        texts = [value for value in listed or () if isinstance(value, str)]
        if texts and not loose:
            options = {"type": "or", "elements": [_text(value) for value in texts]}
            return _sequence(_text(begin), options, _text(end))
        return _as_tag(begin, {"type": "any_text"}, end)
    return _sequence(_text(begin), _value(name, schema, loose), _text(end))


def _python(
    required: list[str], optional: list[str], schema: Mapping[str, Any], loose: bool
) -> Part:
    """`a=1, b="x"`: the required ones first, then any of the others in their order."""

    def one(name: str, comma: bool) -> Part:
        return _sequence(_text(f"{', ' if comma else ''}{name}="), _value(name, schema, loose))

    def rest(names: list[str]) -> list[Part]:
        return [{"type": "optional", "content": one(name, True)} for name in names]

    if required:
        first = [one(name, i > 0) for i, name in enumerate(required)]
        return _sequence(*first, *rest(optional))
    if not optional:
        return _text("")
    starts = [
        _sequence(one(name, False), *rest(optional[i + 1 :])) for i, name in enumerate(optional)
    ]
    return {"type": "optional", "content": {"type": "or", "elements": starts}}
