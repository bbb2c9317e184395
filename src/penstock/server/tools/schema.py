"""Whether the schema of a tool's arguments is one, before a model is shown it.

Held to JSON Schema 2020-12 where that says what a keyword must be, and looked through for what
nothing can satisfy. What a grammar can't follow is another question, asked only of schemas that the
arguments are held to. Source: json-schema.org, draft 2020-12, "Core" and "Validation".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from penstock.grammar.shape import contradiction
from penstock.grammar.subschemas import is_index, path_of

Place: TypeAlias = "tuple[Place, str | tuple[str, str]] | None"
"""Of a part of a schema: the part around it, and the step into it. Written out for a mistake alone:
names of properties may be long, and what they hold many."""

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_COUNTS = (
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength",
    "minProperties",
)  # fmt: skip
_NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
_PLAIN_KEY = re.compile(r"[A-Za-z_$][\w$-]*")


def problem_of(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """(where, what is wrong) of the first mistake, or None. where: such as `.properties.city`."""
    kind = schema.get("type", "object")
    if kind != "object":
        return ".type", f"is {_shown(kind)}; arguments are an object, so it must be 'object'"
    waiting: list[tuple[Place, Any]] = [(None, schema)]
    seen = set[int]()
    for place, one in waiting:  # which grows
        if isinstance(one, bool) or id(one) in seen:
            continue
        seen.add(id(one))
        if not isinstance(one, Mapping):
            said = f"is {_shown(one)}; it must be a schema: an object, true or false"
            return _written(place), said
        found = _mistake(one)
        if found is None and (contrary := contradiction(one)):
            found = f".{contrary[0]}", contrary[1]
        found = found or _dangling(one, schema)
        if found is not None:
            return _written(place) + found[0], found[1]
        waiting += (((place, inner), value) for inner, value in _subschemas(one))
        waiting += _named(one, schema)
    return None


def _named(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """What a reference leads to, which may lie where no other schema does."""
    reference = schema.get("$ref")
    if reference is None or not (reference == "#" or reference.startswith("#/")):
        return
    found: Any = root
    place: Place = None
    for key in map(str, path_of(reference)):
        listed = isinstance(found, list)
        found = found[int(key)] if listed else found[key]
        place = place, f"[{key}]" if listed else _step(key)
    yield place, found


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str | tuple[str, str], Any]]:
    for key in _MAPS:
        for name, value in schema.get(key, {}).items():
            yield (key, name), value
    for key in _LISTS:
        yield from ((f".{key}[{i}]", x) for i, x in enumerate(schema.get(key, ())))
    for key in _SINGLE:
        value = schema.get(key)
        if key == "items" and isinstance(value, list):  # as up to draft 2019-09
            yield from ((f".items[{i}]", x) for i, x in enumerate(value))
        elif key in schema:
            yield f".{key}", value


def _written(place: Place) -> str:
    steps = []
    while place is not None:
        place, step = place
        steps.append(step if isinstance(step, str) else f".{step[0]}{_step(step[1])}")
    return "".join(reversed(steps))


def _step(name: str) -> str:
    plain = len(name) <= 60 and _PLAIN_KEY.fullmatch(name)
    return f".{name}" if plain else f"[{name[:60]!r}]"


def _mistake(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """A keyword that has a value it can't have."""
    kinds = schema.get("type")
    if "type" in schema:
        for kind in kinds if isinstance(kinds, list) and kinds else [kinds]:
            if kind not in _TYPES:
                return ".type", f"is {_shown(kind)}; it must be one of {', '.join(_TYPES)}"
    for key in _MAPS:
        if key in schema and not isinstance(schema[key], Mapping):
            return f".{key}", f"is {_shown(schema[key])}; it must be an object of schemas"
    for key in (*_LISTS, "enum"):
        value = schema.get(key)
        if key in schema and not (isinstance(value, list) and value):
            return f".{key}", f"is {_shown(value)}; it must be a list with at least one entry"
    for key in _COUNTS:
        value = schema.get(key, 0)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if not whole or isinstance(value, bool) or value < 0:
            return f".{key}", f"is {_shown(value)}; it must be an integer of at least 0"
    for key in _NUMBERS:
        value = schema.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f".{key}", f"is {_shown(value)}; it must be a number"
    for key in ("$ref", "pattern", "format", "$schema"):
        if not isinstance(schema.get(key, ""), str):
            return f".{key}", f"is {_shown(schema[key])}; it must be a text"
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(x, str) for x in required):
        return ".required", f"is {_shown(required)}; it must be a list of texts"
    return None


def _dangling(schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, str] | None:
    """A reference into the schema to what isn't there."""
    reference = schema.get("$ref", "#")
    if not (reference == "#" or reference.startswith("#/")):
        return None if reference.startswith("#") else (".$ref", _outside(reference))
    found: Any = root
    for key in map(str, path_of(reference)):
        if isinstance(found, list) and is_index(key, found):
            found = found[int(key)]
        elif isinstance(found, Mapping) and key in found:
            found = found[key]
        else:
            return ".$ref", f"is {reference[:80]!r}, and there is nothing"
    return None


def _outside(reference: str) -> str:
    return f"is {reference[:80]!r}; only the schema's own parts (#/…) are looked up"


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float | str):
        return repr(value)[:80]
    return ("an empty " if not value else "a ") + ("list" if isinstance(value, list) else "object")
