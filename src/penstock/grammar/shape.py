"""Whether a schema's keywords hold what they must, so that all that follows may rely on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.grammar.refusal import Refusal

_KINDS: Final = ("null", "boolean", "integer", "number", "string", "array", "object")


def check_shape(schema: dict[str, Any]) -> None:
    """Raises Refusal, with the keyword as its place."""
    for names, fits, what in _SHAPES:
        for name in names.split():
            if name in schema and not fits(schema[name]):
                raise Refusal(f"{name} must be {what}, not {schema[name]!r:.60}", f"/{name}")


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
    ("dependencies dependentRequired", _dependencies, "an object of lists of names, or of schemas"),
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
