"""Whether a call's arguments follow its tool's schema, found out in bounded time.

JSON Schema 2020-12 where it asserts something (`format` doesn't), and the older spellings that
tools still have (`items` as a list, `dependencies`). Schemas come from whoever sends a request:
each subschema that a value is held against, and each comparison, is a step, and there are so many
and no more. Patterns are matched by llguidance's automata, which don't go back, never by `re`.
What is beyond that, or isn't known here, is neither followed nor broken. Source: json-schema.org,
draft 2020-12, "Core" and "Validation".
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, TypeAlias

import llguidance

from penstock.grammar.ecma import to_rust
from penstock.grammar.refusal import Refusal
from penstock.grammar.shape import has_type
from penstock.grammar.subschemas import path_of

Place: TypeAlias = "tuple[Place, str | int] | None"
Found: TypeAlias = bool | None
"""None: it can't be said."""

_STEPS: Final = 50_000
_DEPTH: Final = 160  # of schemas in each other, by way of references too
_MOST_PATTERN, _MOST_MATCHED, _MOST_GROUPS = 256, 2048, 16  # characters; of a text; in each other
_FUEL: Final = 50_000  # of a pattern's automaton: tens of milliseconds
_UNKNOWN: Final = frozenset(
    "$anchor $dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef unevaluatedItems "
    "unevaluatedProperties".split()
)


# A keyword with a value that it can't have, which nobody has looked at before.
_UNREADABLE: Final = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip
_DIALECTS: Final = ("http://json-schema.org/", "https://json-schema.org/")


class _TooMuch(Exception):  # noqa: N818 — it ends the search
    """There are no steps left."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """valid: None where it can't be said; where: such as `days[0]`; why: the keyword, or else."""

    valid: Found
    where: str = ""
    why: str = ""


def judge(schema: Mapping[str, Any], arguments: str) -> Verdict:
    """Of a call's arguments, as text."""
    one = _Judge(schema)
    dialect = schema.get("$schema")
    if isinstance(dialect, str) and not dialect.startswith(_DIALECTS):
        return Verdict(None, why="$schema names keywords of its own")
    try:
        valid = one.follows(schema, json.loads(arguments), None)
    except _TooMuch:
        return Verdict(None, why="the schema takes too many steps")
    except _UNREADABLE:
        return Verdict(None, why="the schema can't be read")
    if valid is not False:
        return Verdict(valid, why="" if valid else "a keyword or pattern isn't looked at")
    return Verdict(False, _written(one.fault[0]), one.fault[1])


def follows(schema: Any, value: Any, root: Mapping[str, Any]) -> Found:
    """Whether a value follows a part of a schema."""
    try:
        return _Judge(root).follows(schema, value, None)
    except (_TooMuch, *_UNREADABLE):
        return None


@dataclass(slots=True)
class _Judge:
    root: Mapping[str, Any]
    steps: int = _STEPS
    depth: int = 0
    fault: tuple[Place, str] = field(default=(None, ""))

    def step(self, count: int = 1) -> None:
        self.steps -= count
        if self.steps < 0:
            raise _TooMuch

    def follows(self, schema: Any, value: Any, at: Place) -> Found:
        """Whether a value follows a schema. What breaks it first is in `fault`."""
        self.step()
        if isinstance(schema, bool):
            return schema or self.broken(at, "false")
        if self.depth >= _DEPTH:
            raise _TooMuch
        if schema is not self.root and "$id" in schema:
            return None  # references are read otherwise within
        self.depth += 1
        found: Found = None if _UNKNOWN & schema.keys() else True
        for key, check in _CHECKS.items():
            if key not in schema:
                continue
            one = check(self, schema, value, at)
            if one is False:
                found = False
                if self.fault[1] == "":
                    self.fault = (at, key)
                break
            found = found if one else None
        self.depth -= 1
        return found

    def broken(self, at: Place, why: str) -> bool:
        self.fault = (at, why)
        return False

    def all(self, parts: Iterator[tuple[Any, Any, Place]]) -> Found:
        """Whether each value of (schema, value, place) follows its schema."""
        found: Found = True
        for schema, value, at in parts:
            one = self.follows(schema, value, at)
            if one is False:
                return False
            found = found if one else None
        return found

    def options(self, schemas: Any, value: Any, at: Place) -> tuple[int, int]:
        """(options that a value follows, options of which that can't be said)."""
        found = [self.follows(one, value, at) for one in schemas]
        return found.count(True), found.count(None)

    def equal(self, one: Any, other: Any) -> bool:
        """As JSON has it: 1 is 1.0, but isn't true."""
        self.step()
        if isinstance(one, bool) or isinstance(other, bool):
            return one is other
        if isinstance(one, list) and isinstance(other, list):
            pairs = zip(one, other, strict=False)
            return len(one) == len(other) and all(self.equal(a, b) for a, b in pairs)
        if isinstance(one, dict) and isinstance(other, dict):
            same = one.keys() == other.keys()
            return same and all(self.equal(value, other[key]) for key, value in one.items())
        return bool(one == other)

    def matches(self, pattern: str, text: str) -> Found:
        """Whether a pattern is found in a text."""
        self.step(1 + len(text) // 16)
        if len(text) > _MOST_MATCHED:
            return None
        automaton = _automaton(pattern)
        if automaton is None:
            return None
        data = json.dumps(text, ensure_ascii=False).encode()
        matcher = automaton.deep_copy()
        taken = matcher.try_consume_tokens(list(data))
        if matcher.is_error():
            return None
        return taken == len(data) and matcher.is_accepting()

    def resolved(self, reference: str) -> Any:
        if reference != "#" and not reference.startswith("#/"):
            return None
        found: Any = self.root
        for key in path_of(reference):
            self.step()
            found = found[int(key)] if isinstance(found, list) else found[key]
            if isinstance(found, Mapping) and "$id" in found:
                return None
        return found


@lru_cache(maxsize=256)
def _automaton(pattern: str) -> llguidance.LLMatcher | None:
    """Of the JSON texts in which a pattern is found; None for one that isn't read here."""
    if len(pattern) > _MOST_PATTERN or _groups(pattern) > _MOST_GROUPS:
        return None
    try:
        schema = json.dumps({"type": "string", "pattern": to_rust(pattern)})
    except Refusal:
        return None
    limits = llguidance.LLParserLimits(
        initial_lexer_fuel=_FUEL, max_lexer_states=5_000, verbose_errors=False
    )
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    made = llguidance.LLMatcher(_bytes(), grammar, log_level=0, limits=limits)
    return None if made.is_error() else made


@lru_cache(maxsize=1)
def _bytes() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def _groups(pattern: str) -> int:
    """How deep groups lie in each other, at most."""
    deepest = depth = 0
    for character in pattern:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _written(place: Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:60]}")
    return "".join(reversed(steps)).removeprefix(".")[:200]


# ── keywords ─────────────────────────────────────────────────────────────────────────────────

Check: TypeAlias = Callable[[_Judge, Mapping[str, Any], Any, Place], Found]


def _ref(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    target = j.resolved(schema["$ref"])
    return None if target is None else j.follows(target, value, at)


def _type(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    kinds = schema["type"]
    named = [kinds] if isinstance(kinds, str) else kinds
    j.step(len(named))
    return any(has_type(value, kind) for kind in named) or j.broken(at, "type")


def _enum(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    return any(j.equal(one, value) for one in schema["enum"]) or j.broken(at, "enum")


def _const(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    return j.equal(schema["const"], value) or j.broken(at, "const")


def _number(key: str, holds: Callable[[Any, Any], bool]) -> Check:
    def check(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return holds(value, schema[key]) or j.broken(at, key)

    return check


def _is_multiple(value: float, of: float) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(value)
    return Fraction(str(value)) % Fraction(str(of)) == 0


def _length(key: str, kind: type[Sized], holds: Callable[[int, int], bool]) -> Check:
    def check(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
        return not isinstance(value, kind) or holds(len(value), schema[key]) or j.broken(at, key)

    return check


def _pattern(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    if not isinstance(value, str):
        return True
    found = j.matches(schema["pattern"], value)
    return j.broken(at, "pattern") if found is False else found


def _items(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    if not isinstance(value, list):
        return True
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):  # as up to draft 2019-09
        first, rest = rest, schema.get("additionalItems", True)
    parts = ((first[i] if i < len(first) else rest, x, (at, i)) for i, x in enumerate(value))
    return j.all(parts)


def _unique(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    if not schema["uniqueItems"] or not isinstance(value, list):
        return True
    pairs = ((value[i], value[k]) for i in range(len(value)) for k in range(i))
    return not any(j.equal(*pair) for pair in pairs) or j.broken(at, "uniqueItems")


def _contains(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    if not isinstance(value, list):
        return True
    found = [j.follows(schema["contains"], one, (at, i)) for i, one in enumerate(value)]
    sure, maybe = found.count(True), found.count(None)
    least, most = schema.get("minContains", 1), schema.get("maxContains", math.inf)
    if sure + maybe < least or sure > most:
        return j.broken(at, "contains")
    return True if least <= sure and sure + maybe <= most else None


def _properties(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    """`properties`, `patternProperties` and `additionalProperties`."""
    if not isinstance(value, dict):
        return True
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    found: Found = True
    for name, one in value.items():
        j.step()
        here = [named[name]] if name in named else []
        sure = bool(here)
        for pattern, schema_of in patterns.items():
            matched = j.matches(pattern, name)
            if matched is None:
                found, sure = None, True
            elif matched:
                here.append(schema_of)
        if not (here or sure):
            here = [schema.get("additionalProperties", True)]
        told = j.all((part, one, (at, name)) for part in here)
        if told is False:
            return False
        found = found if told else None
    return found


def _required(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    names = schema["required"]
    if not isinstance(value, dict):
        return True
    j.step(len(names))
    missing = next((name for name in names if name not in value), None)
    return missing is None or j.broken((at, missing), "required")


def _names(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    if not isinstance(value, dict):
        return True
    return j.all((schema["propertyNames"], name, (at, name)) for name in value)


def _dependent(key: str) -> Check:
    def check(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
        if not isinstance(value, dict):
            return True
        found: Found = True
        for name, needed in schema[key].items():
            j.step()
            if name not in value:
                continue
            whole = {"required": needed} if isinstance(needed, list) else needed
            one = j.follows(whole, value, at)
            if one is False:
                return False
            found = found if one else None
        return found

    return check


def _all_of(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    return j.all((one, value, at) for one in schema["allOf"])


def _any_of(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    sure, maybe = j.options(schema["anyOf"], value, at)
    return True if sure else None if maybe else j.broken(at, "anyOf")


def _one_of(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    sure, maybe = j.options(schema["oneOf"], value, at)
    if sure > 1 or sure + maybe == 0:
        return j.broken(at, "oneOf")
    return None if maybe else True


def _not(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    found = j.follows(schema["not"], value, at)
    return None if found is None else not found or j.broken(at, "not")


def _if(j: _Judge, schema: Mapping[str, Any], value: Any, at: Place) -> Found:
    found = j.follows(schema["if"], value, at)
    if found is None:
        return None
    return j.follows(schema.get("then" if found else "else", True), value, at)


_CHECKS: Final[Mapping[str, Check]] = {
    "$ref": _ref,
    "type": _type,
    "enum": _enum,
    "const": _const,
    "minimum": _number("minimum", lambda value, least: value >= least),
    "maximum": _number("maximum", lambda value, most: value <= most),
    "exclusiveMinimum": _number("exclusiveMinimum", lambda value, below: value > below),
    "exclusiveMaximum": _number("exclusiveMaximum", lambda value, above: value < above),
    "multipleOf": _number("multipleOf", _is_multiple),
    "minLength": _length("minLength", str, lambda count, least: count >= least),
    "maxLength": _length("maxLength", str, lambda count, most: count <= most),
    "pattern": _pattern,
    "minItems": _length("minItems", list, lambda count, least: count >= least),
    "maxItems": _length("maxItems", list, lambda count, most: count <= most),
    "prefixItems": lambda j, schema, value, at: (
        True if "items" in schema else _items(j, schema, value, at)
    ),
    "items": _items,
    "uniqueItems": _unique,
    "contains": _contains,
    "minProperties": _length("minProperties", dict, lambda count, least: count >= least),
    "maxProperties": _length("maxProperties", dict, lambda count, most: count <= most),
    "required": _required,
    "properties": lambda j, schema, value, at: (
        True
        if {"patternProperties", "additionalProperties"} & schema.keys()
        else _properties(j, schema, value, at)
    ),
    "patternProperties": lambda j, schema, value, at: (
        True if "additionalProperties" in schema else _properties(j, schema, value, at)
    ),
    "additionalProperties": _properties,
    "propertyNames": _names,
    "dependentRequired": _dependent("dependentRequired"),
    "dependentSchemas": _dependent("dependentSchemas"),
    "dependencies": _dependent("dependencies"),
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
}
"""Keywords that assert something; of those that are read together, the last one reads them all."""
