"""Whether no value follows two schemas at once: then oneOf is anyOf."""

from __future__ import annotations

from typing import Any, Final

from penstock.grammar.subschemas import Schema, resolve

_DEEPEST: Final = 12
_MOST_ASKED: Final = 20_000
"""Of one document; further questions are answered "no"."""

_ALL: Final = frozenset(("null", "boolean", "number", "string", "array", "object"))


class Disjoint:
    """Answers for the schemas of one document; "no" also where it can't be seen."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._asked = 0

    def all(self, schemas: list[Schema]) -> bool:
        """Whether each two are, seen at once: they list values, of their own or of a property."""
        if _share_none(schemas):
            return True
        objects = [one for one in schemas if isinstance(one, dict)]
        names = required(objects[0]) if objects and len(objects) == len(schemas) else []
        return any(
            _share_none([_property(one, name) for one in objects])
            for name in names[:_DEEPEST]
            if isinstance(name, str) and all(_is_object_with(one, name) for one in objects)
        )

    def __call__(self, left: Schema, right: Schema, depth: int = 0) -> bool:
        if left is False or right is False:
            return True
        self._asked += 1
        if self._asked > _MOST_ASKED:
            return False
        if not isinstance(left, dict) or not isinstance(right, dict) or depth > _DEEPEST:
            return False
        for one, other in ((left, right), (right, left)):
            if self._by_part(one, other, depth):
                return True
        if not self.kinds(left) & self.kinds(right):
            return True
        if _values_differ(left, right):
            return True
        return self._by_property(left, right, depth)

    def _by_part(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """By what one of them is made of."""
        if "$ref" in one:
            target = resolve(self.document, one["$ref"])
            if target is not None and self(target, other, depth + 1):
                return True
        if any(self(part, other, depth + 1) for part in one.get("allOf", ())):
            return True
        return any(
            one.get(key) and all(self(part, other, depth + 1) for part in one[key])
            for key in ("anyOf", "oneOf")
        )

    def kinds(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """The types that its values may have, and perhaps more."""
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return _ALL
        found = _ALL
        kinds = schema.get("type")
        if kinds is not None:
            listed = kinds if isinstance(kinds, list) else [kinds]
            found = frozenset("number" if kind == "integer" else kind for kind in listed)
        if "$ref" in schema:
            target = resolve(self.document, schema["$ref"])
            if target is not None:
                found &= self.kinds(target, depth + 1)
        return found

    def _by_property(self, left: dict[str, Any], right: dict[str, Any], depth: int) -> bool:
        """Both are objects, and one property can't be right for both."""
        if self.kinds(left) & self.kinds(right) != {"object"}:
            return False
        for one, other in ((left, right), (right, left)):
            for name in required(one):
                mine, theirs = _property(one, name), _property(other, name)
                if theirs is False:
                    return True
                if name in required(other) and self(mine, theirs, depth + 1):
                    return True
        return False


def required(schema: dict[str, Any]) -> list[Any]:
    """The names that must be there."""
    found = schema.get("required")
    return found if isinstance(found, list) else []


def _property(schema: dict[str, Any], name: Any) -> Schema:
    """What a property must follow, as far as `properties` says."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        found: Schema = properties[name]
        return found
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return not closed


def _is_object_with(schema: dict[str, Any], name: str) -> bool:
    return schema.get("type") == "object" and name in required(schema)


def _share_none(schemas: list[Schema]) -> bool:
    """Whether each lists texts and whole numbers as its values, and none is listed twice."""
    seen: set[str | int] = set()
    for schema in schemas:
        values = _values(schema) if isinstance(schema, dict) else None
        if values is None or not all(
            isinstance(one, (str, int)) and not isinstance(one, bool) for one in values
        ):
            return False
        if not seen.isdisjoint(values):
            return False
        seen.update(values)
    return True


def _values_differ(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Both list their values, and none is in both lists."""
    both = [_values(left), _values(right)]
    if both[0] is None or both[1] is None:
        return False
    return not any(one == other for one in both[0] for other in both[1])


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) and len(found) <= 200 else None
