"""A tool's schema as one list of arguments, for forms that write them one by one.

What stands behind the schema's own `$ref` and within its `allOf` is put together. What else it says
of the arguments as a whole (that one needs another, how many there are) can't be written so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.grammar.subschemas import resolve

_MOST_PARTS: Final = 64
_UNSAID: Final = (
    "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies",
    "propertyNames", "enum", "const", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip


@dataclass(slots=True)
class Flat:
    """The arguments. problem: why they aren't all that the schema says, or nothing."""

    properties: dict[str, Any] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)  # in their order
    problem: str = ""


def flat(root: Mapping[str, Any]) -> Flat:
    """Of the schema of a function's arguments."""
    made = Flat()
    parts = _parts(root, made)
    named: dict[str, list[Any]] = {}
    for part in parts:
        for name, one in (part.get("properties") or {}).items():
            named.setdefault(name, []).append(one)
    for part in parts:
        for name in part.get("required") or ():
            named.setdefault(name, [])
            made.required[name] = None
    for part in parts:
        _add_others(part, named, made)
    for name, schemas in named.items():
        kept = [one for one in schemas if one is not True]
        if False not in kept:
            made.properties[name] = kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True
    missing = [name for name in made.required if name not in made.properties]
    if missing:
        made.required = {name: None for name in made.required if name in made.properties}
        made.problem = made.problem or f"required names {missing[0][:60]!r}, which isn't allowed"
    for part in parts:
        _check(part, made)
    return made


def _parts(root: Mapping[str, Any], made: Flat) -> list[Mapping[str, Any]]:
    """The schema, and those that every value of it follows besides."""
    parts: list[Mapping[str, Any]] = []
    waiting: list[Any] = [root]
    for one in waiting:  # which grows
        if one is True or any(one is part for part in parts):
            continue
        if not isinstance(one, Mapping) or len(parts) == _MOST_PARTS:
            made.problem = "its parts in $ref and allOf can't be put together"
            continue
        parts.append(one)
        if "$ref" in one:
            waiting.append(resolve(root, one["$ref"]))
        waiting += one.get("allOf") or ()
    return parts


def _add_others(part: Mapping[str, Any], named: dict[str, list[Any]], made: Flat) -> None:
    """What a part says of arguments that another one names."""
    own = part.get("properties") or {}
    more = part.get("additionalProperties", True)
    patterns = part.get("patternProperties")
    for name, schemas in named.items():
        if patterns:
            made.problem = made.problem or "patternProperties may say more of an argument"
        elif name not in own and more is not True:
            schemas.append(more)


def _check(part: Mapping[str, Any], made: Flat) -> None:
    for key in _UNSAID:
        if key in part:
            made.problem = made.problem or f"{key} says more of all arguments together"
    if part.get("minProperties", 0) > len(made.required):
        made.problem = made.problem or "minProperties is more than are required"
    if part.get("maxProperties", len(made.properties)) < len(made.properties):
        made.problem = made.problem or "maxProperties is less than there are"
