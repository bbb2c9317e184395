"""How many schemas one and the same value must follow: what the library merges, pair by pair.

A chain of $ref and allOf takes it time that grows faster than the square of its length; patterns
that a text must all match, faster than any power of their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.grammar.depth import too_deep
from penstock.grammar.refusal import Refusal, pointer
from penstock.grammar.subschemas import children, reachable, resolve

LONGEST_CHAIN: Final = 200
"""Of $ref and allOf: 300 take 0.15 s of a core, 1,000 take 1.4."""

MOST_PATTERNS: Final = 8
"""That one text must match, formats among them: 20 take three seconds."""


DEEPEST: Final = 400
"""Schemas within each other or named by each other, of whatever kind: the library goes into them by
recursion when it compiles, copies and lets go, in whatever thread, and 8 MB of stack overflow
between 600 and 2,000."""


def check_depth(document: dict[str, Any]) -> None:
    """Raises Refusal where the depth of a search along parts and references is too large."""
    schemas = {id(document): document}

    def parts(key: int) -> Iterator[int]:
        for part in _parts(document, schemas[key]):
            schemas[id(part)] = part
            yield id(part)

    if too_deep([id(document)], parts, DEEPEST):
        raise Refusal(
            f"more than {DEEPEST} schemas lie within each other here, or name each other", "#"
        )


def _parts(document: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schemas that one leads to at once."""
    for _, part in children(schema):
        if isinstance(part, dict):
            yield part
    target = resolve(document, schema["$ref"]) if "$ref" in schema else None
    if isinstance(target, dict):
        yield target


def check_chains(document: dict[str, Any]) -> None:
    """Raises Refusal, with the place of a schema that leads too far."""
    schemas = [schema for _, schema in reachable(document)]
    paths = [path for path, _ in reachable(document)]
    lengths: dict[int, int] = {}
    patterns: dict[int, int] = {}
    for path, schema in zip(paths, schemas, strict=True):
        _measure(document, schema, lengths, patterns)
        if lengths[id(schema)] > LONGEST_CHAIN:
            raise Refusal(
                f"a chain of {lengths[id(schema)]:,} schemas, each named by $ref or allOf in the "
                f"one before, begins here; at most {LONGEST_CHAIN} can be compiled in time",
                pointer(path),
            )
        if patterns[id(schema)] > MOST_PATTERNS:
            raise Refusal(
                f"{patterns[id(schema)]:,} patterns and formats hold for the same text; at most "
                f"{MOST_PATTERNS} can be compiled in time",
                pointer(path),
            )
    check_depth(document)


def _measure(
    document: dict[str, Any],
    schema: dict[str, Any],
    lengths: dict[int, int],
    patterns: dict[int, int],
) -> None:
    """Fill in the two for a schema and all that it leads to, the last ones first."""
    waiting = [schema]
    while waiting:
        one = waiting[-1]
        if lengths.get(id(one), 0) > 0:
            waiting.pop()
            continue
        parts = _merged(document, one)
        fresh = [part for part in parts if id(part) not in lengths]
        if id(one) not in lengths and fresh:
            lengths[id(one)] = 0  # being measured: a circle ends here
            waiting += fresh
            continue
        waiting.pop()
        lengths[id(one)] = 1 + max((lengths.get(id(part), 0) for part in parts), default=0)
        own = "pattern" in one
        patterns[id(one)] = own + sum(patterns.get(id(part), 0) for part in parts)


def _merged(document: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """What a value of this schema must follow besides."""
    parts = [*schema.get("allOf", ())]
    if "$ref" in schema:
        parts.append(resolve(document, schema["$ref"]))
    return [part for part in parts if isinstance(part, dict)]
