"""Where the schemas lie within a JSON schema, and what a $ref names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any, Final
from urllib.parse import unquote

Schema = dict[str, Any] | bool
Path = tuple[str | int, ...]

_ONE: Final = (
    "additionalProperties",
    "additionalItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)
_MANY: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED: Final = ("properties", "patternProperties", "dependentSchemas", "dependencies")


def children(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas right within one, but for those that only a $ref reaches."""
    for key in _ONE:
        if key in schema:
            yield (key,), schema[key]
    for key in (*_MANY, "items"):
        value = schema.get(key)
        if isinstance(value, list):
            for i, one in enumerate(value):
                yield (key, i), one
        elif key == "items" and value is not None:
            yield (key,), value
    for key in _NAMED:
        value = schema.get(key)
        if isinstance(value, dict):
            for name, one in value.items():
                if isinstance(one, (dict, bool)):
                    yield (key, name), one


def reachable(document: Schema) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each schema that the whole leads to, with its place; where a $ref can't be read, all."""
    seen: set[int] = set()
    waiting: list[tuple[Path, Any]] = [((), document)]
    while waiting:
        path, schema = waiting.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield path, schema
        found = [((*path, *more), child) for more, child in children(schema)]
        if "$ref" in schema:
            target = resolve(document, schema["$ref"])
            if target is None and isinstance(document, dict):  # by an $id or an anchor: any of them
                for key in ("$defs", "definitions"):
                    named = document.get(key)
                    if isinstance(named, dict):
                        found += [((key, name), one) for name, one in named.items()]
            else:
                found.append((path_of(schema["$ref"]), target))
        waiting += reversed(found)


def resolve(document: Mapping[str, Any] | bool, reference: object) -> Any:
    """What "#/…" names; None for another reference, and where nothing is there."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = document
    for one in path_of(reference):
        if isinstance(found, Mapping) and one in found:
            found = found[str(one)]
        elif isinstance(found, list) and is_index(str(one), found):
            found = found[int(one)]
        else:
            return None
    return found


def is_index(text: str, items: Sized) -> bool:
    """Whether a part of a reference is the place of one of `items`."""
    return text.isdecimal() and len(text) <= 9 and int(text) < len(items)


def path_of(reference: str) -> Path:
    """The place that "#/…" names."""
    parts = unquote(reference[1:]).split("/")[1:]
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in parts)
