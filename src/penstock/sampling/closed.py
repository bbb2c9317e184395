"""A JSON schema whose objects have the properties that it names, and no others.

JSON Schema leaves objects open where `additionalProperties` isn't said, and a model that is held to
one invents keys. Schemas are written for readers that ignore those: tools' parameters, Pydantic's
classes. vLLM closes them, by xgrammar's strict mode or by `disable_additional_properties`.

What follows the closed schema follows the original: objects are closed only where that can but
leave texts out, not below `not`, nor where several schemas must hold together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TOGETHER = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef")
_OPEN = (
    *_TOGETHER,
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
)
"""Beside one of these, an object's properties aren't all that may or must be there."""

_OF_OBJECTS = ("properties", "required", "minProperties", "maxProperties", *_OPEN)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties", "unevaluatedItems", "additionalItems")
_LISTS = ("prefixItems",)
_NAMES = ("$id", "$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef")
"""Ways to name a schema, beside its place."""


def closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever that leaves only texts out.

    A schema that names others but by their place in it stays as it is.
    """
    if not isinstance(schema, dict) or _names_otherwise(schema):
        return schema
    try:
        return _Closing(schema).close(schema, "#")
    except RecursionError:  # which is refused when it is compiled
        return schema


def _walk(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _names_otherwise(schema: dict[str, Any]) -> bool:
    for one in _walk(schema):
        reference = one.get("$ref", "#")
        if isinstance(reference, str) and not (reference == "#" or reference.startswith("#/")):
            return True
        if any(isinstance(one.get(name), str) for name in _NAMES):
            return True
    return False


class _Closing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left: set[str] = set()  # places whose schemas hold together with others
        self._find(root, False)
        looked_at: set[str] = set()
        while todo := self._left - looked_at:  # and what those refer to
            for place in todo:
                self._find(self._at(place), True)
            looked_at |= todo

    def _find(self, schema: Any, together: bool) -> None:
        """Which places are referred to where closing them could do more than leave texts out."""
        if not isinstance(schema, dict):
            return
        reference = schema.get("$ref")
        beside = [key for key in _OF_OBJECTS if key in schema and key != "$ref"]
        if isinstance(reference, str) and (together or beside):
            self._left.add(reference)
        for key, value in schema.items():
            if key in _MAPS and isinstance(value, dict):
                for one in value.values():
                    self._find(one, together)
            elif key in _ONE:
                self._find(value, together)
            elif key in (*_LISTS, "anyOf", "oneOf", "allOf") and isinstance(value, list):
                apart = key in _LISTS or self._is_apart(schema, key)
                for one in value:
                    self._find(one, together or not apart)
            elif key not in ("const", "default", "enum", "examples", "required"):
                self._find(value, True)

    def _is_apart(self, schema: dict[str, Any], key: str) -> bool:
        """Whether of `anyOf` and its like one schema alone decides, in all that it says."""
        if any(name in schema for name in _OF_OBJECTS if name != key):
            return False
        options = schema[key]
        return key == "anyOf" or len(options) == 1 or (key == "oneOf" and self._differ(options))

    def _differ(self, options: list[Any]) -> bool:
        """Whether a property that all must have tells them apart, as in Pydantic's unions."""
        found = [self._resolved(one) for one in options]
        if not all(isinstance(one.get("properties"), dict) for one in found):
            return False
        for name in found[0]["properties"]:
            tags = [self._tag(one, name) for one in found]
            if None not in tags and len(set(tags)) == len(tags):
                return True
        return False

    @staticmethod
    def _tag(schema: Mapping[str, Any], name: str) -> str | None:
        required, what = schema.get("required"), schema["properties"].get(name)
        if not (isinstance(required, list) and name in required and isinstance(what, dict)):
            return None
        values = [what["const"]] if "const" in what else what.get("enum")
        if not (isinstance(values, list) and len(values) == 1 and isinstance(values[0], str)):
            return None
        return values[0]

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """What a `$ref` stands for; nothing where that can't be told."""
        for _ in range(8):
            if not isinstance(schema, dict):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = self._at(reference)
        return {}

    def _at(self, place: str) -> Any:
        schema: Any = self._root
        for part in place.split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and name.isdecimal() and int(name) < len(schema):
                schema = schema[int(name)]
            else:
                schema = schema.get(name) if isinstance(schema, dict) else None
        return schema

    def close(self, schema: Any, place: str) -> Any:
        """The schema at `place`, closed."""
        if not isinstance(schema, dict) or place in self._left:
            return schema
        made = dict(schema)
        for key, value in schema.items():
            inner = f"{place}/{key}"
            if key in _MAPS and isinstance(value, dict):
                made[key] = {
                    name: self.close(one, f"{inner}/{_escaped(name)}")
                    for name, one in value.items()
                }
            elif key in _ONE:
                made[key] = self.close(value, inner)
            elif key in (*_LISTS, "anyOf", "oneOf", "allOf") and isinstance(value, list):
                if key in _LISTS or self._is_apart(schema, key):
                    made[key] = [self.close(one, f"{inner}/{i}") for i, one in enumerate(value)]
        if _names_all(schema):
            made["additionalProperties"] = False
        return made


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether its properties are all that an object needs."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(key in schema for key in _OPEN):
        return False
    required, least = schema.get("required", []), schema.get("minProperties", 0)
    return (
        isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and isinstance(least, int)
        and least <= len(properties)
    )
