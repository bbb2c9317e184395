"""Whether a schema's keywords hold what they must, so that all that follows may rely on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.grammar.refusal import Refusal

_ORDERED: Final = (
    ("minimum", "maximum"), ("minItems", "maxItems"), ("minLength", "maxLength"),
    ("minProperties", "maxProperties"), ("minContains", "maxContains"),
)  # fmt: skip
_KINDS: Final = ("null", "boolean", "integer", "number", "string", "array", "object")


def check_shape(schema: dict[str, Any]) -> None:
    """Raises Refusal, with the keyword as its place."""
    for names, fits, what in _SHAPES:
        for name in names.split():
            if name in schema and not fits(schema[name]):
                raise Refusal(f"{name} must be {what}, not {schema[name]!r:.60}", f"/{name}")


def contradiction(schema: Mapping[str, Any]) -> tuple[str, str] | None:
    """(keyword, what is wrong) where keywords of a schema let no value follow them together.

    Its keywords must hold what they must.
    """
    for low, high in _ORDERED:
        if low in schema and high in schema and schema[low] > schema[high]:
            return low, f"is {schema[low]}, but {high} is {schema[high]}"
    for key in ("enum", "anyOf", "oneOf"):
        if key in schema and not schema[key]:
            return key, "is an empty list"
    kinds = schema.get("type")
    if kinds is not None:
        named = list(dict.fromkeys(kinds)) if isinstance(kinds, list) else [kinds]
        for key, values in (("enum", schema.get("enum")), ("const", [schema.get("const")])):
            if key in schema and not any(
                has_type(one, kind) for one in values or () for kind in named
            ):
                return key, f"has no value of type {' or '.join(named)}"
        if "object" not in named:
            return None
    properties, required = schema.get("properties", {}), schema.get("required", ())
    closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    for name in required if isinstance(required, list) else ():
        if properties.get(name) is False or (closed and name not in properties):
            return "required", f"names {name[:60]!r}, which properties doesn't allow"
    return None


def has_type(value: Any, kind: str) -> bool:
    """Whether a value is of one of JSON Schema's types; 1.0 is an integer."""
    if kind in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and (kind == "number" or isinstance(value, int) or value.is_integer())
    classes = {"array": list, "boolean": bool, "object": dict, "string": str}
    return value is None if kind == "null" else isinstance(value, classes[kind])


def _schema(value: Any) -> bool:
    return isinstance(value, (dict, bool))


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_schema, value))


def _named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_schema, value.values()))


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _dependencies(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _schema(one) or _texts(one) or isinstance(one, str) for one in value.values()
    )


def _lists_of_names(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_texts, value.values()))


def _type(value: Any) -> bool:
    listed = value if isinstance(value, list) else [value]
    return bool(listed) and all(isinstance(one, str) and one in _KINDS for one in listed)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_SHAPES: Final[tuple[tuple[str, Callable[[Any], bool], str], ...]] = (
    ("type", _type, f"one of {', '.join(_KINDS)}, or a list of them"),
    ("properties patternProperties dependentSchemas", _named, "an object of schemas"),
    ("dependencies", _dependencies, "an object of lists of names, or of schemas"),
    ("dependentRequired", _lists_of_names, "an object of lists of names"),
    ("allOf anyOf oneOf prefixItems", _schemas, "a list of schemas"),
    ("items", lambda one: _schema(one) or _schemas(one), "a schema, or a list of them"),
    (
        "additionalProperties additionalItems not if then else contains propertyNames",
        _schema,
        "a schema",
    ),
    # In draft 3 `required` is true or false, and stands in the property; later ones ignore that.
    ("required", lambda one: _texts(one) or isinstance(one, bool), "a list of names"),
    ("enum", lambda one: isinstance(one, list), "a list of values"),
    ("pattern format $ref", lambda one: isinstance(one, str), "a text"),
    ("minimum maximum", _number, "a number"),
    ("exclusiveMinimum exclusiveMaximum", lambda one: isinstance(one, (int, float)), "a number"),
    ("multipleOf", lambda one: _number(one) and one > 0, "a number above 0"),
    (
        "minLength maxLength minItems maxItems minProperties maxProperties",
        _count,
        "a whole number of at least 0",
    ),
)
