"""Where in a schema the library's complaint lies: its messages name a property at best."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from penstock.grammar import lark
from penstock.grammar.matcher import first_line
from penstock.grammar.refusal import Refusal, pointer
from penstock.grammar.shape import contradiction
from penstock.grammar.subschemas import Path, Schema, path_of, reachable, resolve

_REQUIRED: Final = re.compile(r"required property '(.*)' is unsatisfiable")
_FLOAT: Final = re.compile(r"(min|max)=Some\(([^)]*)\)")
_BOUNDS: Final = {
    "min": ("minimum", "exclusiveMinimum"),
    "max": ("maximum", "exclusiveMaximum"),
}
_ROOT: Final[Path] = ()
_MOST_LEVELS: Final = 12  # each is compiled by itself


def of_nothing(document: Schema, why: str) -> tuple[str, str]:
    """The innermost part that must be there and that no value follows, and why, as far as seen."""
    if found := seen(document):
        return found
    path, schema = _ROOT, document
    for _ in range(_MOST_LEVELS):
        name = _REQUIRED.search(why)
        inner = _required(document, path, schema, name[1]) if name else None
        if inner is None:
            break
        path, schema = inner
        complaint = _complaint(document, schema) if isinstance(schema, dict) else ""
        if not complaint:
            break
        why = complaint
    return pointer(path), why


def seen(document: Schema) -> tuple[str, str] | None:
    """The first contradiction within a part that must be there, and what it is."""
    for place, part in _together(document, _ROOT, document, required=True):
        found = contradiction(part)
        if found is not None:
            return pointer((*place, found[0])), f"{found[0]} {found[1]}"
    return None


def _required(document: Schema, path: Path, schema: Schema, name: str) -> tuple[Path, Any] | None:
    for place, part in _together(document, path, schema):
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            return (*place, "properties", name), properties[name]
    return None


def _together(
    document: Schema, path: Path, schema: Schema, *, required: bool = False
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A schema, and those of its allOf and $ref, with their places; of required properties too."""
    seen: set[int] = set()
    waiting: deque[tuple[Path, Any]] = deque([(path, schema)])
    while waiting:
        place, one = waiting.popleft()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        yield place, one
        waiting += [((*place, "allOf", i), part) for i, part in enumerate(one.get("allOf", ()))]
        if "$ref" in one:
            waiting.append((path_of(one["$ref"]), resolve(document, one["$ref"])))
        names = one.get("required") if required else None
        for name in names if isinstance(names, list) else ():
            waiting.append(((*place, "properties", name), one.get("properties", {}).get(name)))


def _complaint(document: Schema, schema: dict[str, Any]) -> str:
    """What the library says of a part by itself, with what it may name."""
    import llguidance

    named = {key: document[key] for key in ("$defs", "definitions") if key in document}  # type: ignore[index,operator]
    text = json.dumps({"grammars": [{"json_schema": {**named, **schema}}]})
    said = first_line(llguidance.LLMatcher.validate_grammar(text))
    return said.removeprefix("Unsatisfiable schema: ")


def of_a_regex(document: Schema) -> tuple[str, str] | None:
    """The first pattern that isn't a regex, and what is wrong with it."""
    for path, schema in reachable(document):
        patterns = [((*path, "pattern"), schema.get("pattern"))]
        named = schema.get("patternProperties")
        patterns += [((*path, "patternProperties", one), one) for one in named or ()]
        for place, pattern in patterns:
            if isinstance(pattern, str) and (wrong := _wrong(pattern)):
                return pointer(place), wrong
    return None


def _wrong(pattern: str) -> str:
    """Why it is no regex; empty where it is one."""
    import llguidance

    try:
        text = f"start: {lark.regex(pattern)}\n"
    except Refusal as refusal:
        return refusal.reason
    grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
    said = llguidance.LLMatcher.validate_grammar(grammar)
    errors = re.findall(r"error: ([^\n]+)", said)
    return errors[-1] if errors else ""


def of_a_pattern(document: Schema, detail: str) -> str:
    """The pattern that a message quotes between slashes."""
    for path, schema in reachable(document):
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and f"/{pattern}/" in detail:
            return pointer((*path, "pattern"))
        for one in schema.get("patternProperties") or ():
            if f"/{one}/" in detail:
                return pointer((*path, "patternProperties"))
    return ""


def of_a_range(document: Schema, detail: str) -> str:
    """The bound that a message names."""
    for side, number in _FLOAT.findall(detail):
        for path, schema in reachable(document):
            for key in _BOUNDS[side]:
                value = schema.get(key)
                if isinstance(value, (int, float)) and float(value) == float(number):
                    return pointer((*path, key))
    return ""
