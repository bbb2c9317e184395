"""A JSON schema whose objects have the properties that it names, and no others.

JSON Schema leaves objects open where `additionalProperties` isn't said, and a model that is held to
one invents keys. Schemas are written for readers that ignore those: tools' parameters, Pydantic's
classes. vLLM closes them, by xgrammar's strict mode or by `disable_additional_properties`.

What follows the closed schema follows the original, and something does if something followed
that: an object is closed only where one schema alone speaks of it, so not below `not`, and not
where others hold beside it (`allOf`, `anyOf` or a `$ref` beside properties, `if`, a pattern that
names the same property). What several places refer to is closed if it may be in all of them.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

_HARMLESS = frozenset(
    "$comment $defs $schema definitions default deprecated description discriminator examples "
    "nullable readOnly title type writeOnly".split()
)
"""What may stand beside `anyOf` and its like, which then decide alone."""

_SEVERAL = frozenset(
    "$dynamicRef $recursiveRef $ref allOf anyOf const contains dependencies dependentSchemas else "
    "enum if not oneOf then unevaluatedItems unevaluatedProperties uniqueItems".split()
)
"""With one of these, more than a schema's own `properties` and `items` say what it describes."""

_OPEN = ("additionalProperties", "dependentRequired", "patternProperties", "propertyNames")
"""Beside one of these, an object's properties aren't all that may or must be there."""

_NAMES = ("$id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef")
"""Ways to name a schema, beside its place."""

_MAPS = ("properties", "patternProperties")
_DEFINITIONS = ("$defs", "definitions")
_ONE = ("additionalItems", "additionalProperties", "items")
_LISTS = ("items", "prefixItems")
_MOST_DIGITS = 9


class _UnclearError(Exception):
    """Something is referred to that can't be found."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever that leaves only texts out.

    One that names schemas but by their place in it, or places that aren't there, stays as it is. So
    does one that is too deep, which is refused when it is compiled. Takes time linear in its size.
    """
    if not isinstance(schema, dict):
        return schema
    try:
        return _Closing(schema).close(schema)
    except (_UnclearError, RecursionError):
        return schema


class _Closing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left: set[int] = set()  # schemas that hold together with others, by identity
        self._met: set[int] = set()  # of which it is known where they stand
        self._find(root)

    def _find(self, schema: Any) -> None:
        """Leave what holds together with others, from a schema on of which that isn't known."""
        if not isinstance(schema, dict) or id(schema) in self._met or id(schema) in self._left:
            return
        self._met.add(id(schema))
        if any(isinstance(schema.get(name), str) for name in _NAMES):
            raise _UnclearError
        alone, own = _alone(schema), not _SEVERAL & schema.keys()
        patterns = schema.get("patternProperties")
        # names and patterns, or several patterns, may speak of one property
        overlap = isinstance(patterns, dict) and (len(patterns) > 1 or "properties" in schema)
        for key, value in schema.items():
            if key in _DEFINITIONS and isinstance(value, dict):
                for one in value.values():
                    self._find(one)
            elif alone == key and key == "$ref":
                self._find(self._at(value))
            elif alone == key:
                apart = key != "oneOf" or self._differ(schema)
                for one in value:
                    self._find(one) if apart else self._leave(one)
            elif own and not (key in _MAPS and overlap):
                for one in _within(key, value):
                    self._find(one)
            else:
                self._leave_all(key, value)

    def _leave_all(self, key: str, value: Any) -> None:
        if key in (*_MAPS, "dependentSchemas", "dependencies") and isinstance(value, dict):
            for one in value.values():
                self._leave(one)
        elif isinstance(value, list) and key not in ("const", "enum", "required"):
            for one in value:
                self._leave(one)
        elif key == "$ref":
            self._leave(self._at(value))
        elif key not in ("const", "default", "enum", "examples"):
            self._leave(value)

    def _leave(self, schema: Any) -> None:
        """The schema, and all that it is made of."""
        if not isinstance(schema, dict) or id(schema) in self._left:
            return
        self._left.add(id(schema))
        if any(isinstance(schema.get(name), str) for name in _NAMES):
            raise _UnclearError
        for key, value in schema.items():
            if key in _DEFINITIONS and isinstance(value, dict):
                for one in value.values():
                    self._find(one)
            else:
                self._leave_all(key, value)

    def _differ(self, schema: dict[str, Any]) -> bool:
        """Whether a property tells the options of `oneOf` apart, as in Pydantic's unions."""
        about = schema.get("discriminator")
        name = about.get("propertyName") if isinstance(about, dict) else None
        tags: set[str] = set()
        for option in schema["oneOf"]:
            reference = option.get("$ref") if isinstance(option, dict) else None
            tag = _tag(option if reference is None else self._at(reference), name)
            if tag is None or tag in tags:
                return len(schema["oneOf"]) == 1
            tags.add(tag)
        return True

    def _at(self, reference: Any) -> Any:
        """The schema at a place. Raises _UnclearError for one that isn't there, or elsewhere."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _UnclearError
        found: Any = self._root
        for part in reference.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and _is_index(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                raise _UnclearError
        return found

    def close(self, schema: Any) -> Any:
        """The schema, closed where it is known that it stands alone."""
        if id(schema) not in self._met or id(schema) in self._left:
            return schema
        made = dict(schema)
        alone = _alone(schema)
        for key, value in schema.items():
            if key in (*_MAPS, *_DEFINITIONS) and isinstance(value, dict):
                made[key] = {name: self.close(one) for name, one in value.items()}
            elif isinstance(value, dict) and key in _ONE:
                made[key] = self.close(value)
            elif isinstance(value, list) and (key in _LISTS or key == alone):
                made[key] = [self.close(one) for one in value]
        if _names_all(schema):
            made["additionalProperties"] = False
        return made


def _within(key: str, value: Any) -> list[Any]:
    """The schemas of what an object or a list is made of."""
    if key in _MAPS and isinstance(value, dict):
        return list(value.values())
    if key in _LISTS and isinstance(value, list):
        return value
    return [value] if key in _ONE else []


def _alone(schema: dict[str, Any]) -> str | None:
    """Which of `$ref`, `anyOf` and their like says all that the schema says; None: none does."""
    keys = [key for key in schema if key not in _HARMLESS]
    if len(keys) != 1 or keys[0] not in ("$ref", "allOf", "anyOf", "oneOf"):
        return None
    value = schema[keys[0]]
    if keys[0] == "$ref":
        return "$ref"
    lists = isinstance(value, list) and (keys[0] != "allOf" or len(value) == 1)
    return keys[0] if lists else None


def _tag(schema: Any, name: Any) -> str | None:
    """The one text that an object's property must be, by which it is told apart."""
    if not (isinstance(schema, dict) and isinstance(name, str)):
        return None
    properties, required = schema.get("properties"), schema.get("required")
    if not (isinstance(properties, dict) and isinstance(required, list) and name in required):
        return None
    what = properties.get(name)
    if not isinstance(what, dict):
        return None
    values = [what["const"]] if "const" in what else what.get("enum")
    one = values[0] if isinstance(values, list) and len(values) == 1 else None
    return one if isinstance(one, str) else None


def _is_index(name: str) -> bool:
    plain = name.isascii() and name.isdecimal() and len(name) <= _MOST_DIGITS
    return plain and (name == "0" or name[0] != "0")


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether its properties are all that an object needs."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or _SEVERAL & schema.keys():
        return False
    if any(key in schema for key in _OPEN):
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )
