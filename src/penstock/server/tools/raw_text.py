"""The texts that a schema allows, as they are: without the quotes that JSON puts around them.

Said as parts of a structural tag: listed texts, or regexes that the text must match. What can't be
said so is `Unsaid`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.grammar.anchors import whole
from penstock.grammar.ecma import to_rust
from penstock.grammar.formats import pattern_of
from penstock.grammar.refusal import Refusal
from penstock.grammar.shortest import check_shortest
from penstock.grammar.subschemas import resolve
from penstock.grammar.tag_fields import quoted
from penstock.server.tools.qwen3_coder import kinds_of
from penstock.server.tools.verdict import follows

_MOST_TEXTS: Final = 1_000  # that are held against a schema with more keywords
_MOST_WAYS: Final = 64  # alternatives
_MOST_TOGETHER: Final = 8  # regexes for the same text
_DEEPEST: Final = 16
_PLAIN: Final = frozenset(("type", "enum", "description", "title", "default", "examples"))
_UNSAID: Final = ("not", "if", "$dynamicRef", "$recursiveRef")
_ANY: Final = "(?s:.*)"
_Ways = list[tuple[str, ...]]
"""Alternatives, each of regexes that must all match."""


class Unsaid(Exception):  # noqa: N818 — it becomes an error, or the schema is left out
    """What a schema says can't be said in a form; the message says what."""


@dataclass(slots=True)
class Texts:
    """Either the texts themselves, or ways that others are matched."""

    listed: list[str] | None = None
    ways: _Ways = field(default_factory=list)


def texts_of(schema: Any, root: Mapping[str, Any]) -> Texts:
    """The texts that follow a schema. Raises Unsaid."""
    found = _listed(schema, root, 0)
    if found is None:
        return Texts(ways=_ways(schema, root, 0))
    texts = list(dict.fromkeys(found))
    if not (isinstance(schema, Mapping) and schema.keys() <= _PLAIN):
        if len(texts) > _MOST_TEXTS:
            raise Unsaid(
                f"{len(texts):,} values beside other keywords; at most {_MOST_TEXTS:,} are held "
                "against them"
            )
        told = {text: follows(schema, text, root) for text in texts}
        if None in told.values():
            raise Unsaid("its keywords can't be held against its values")
        texts = [text for text in texts if told[text]]
    return Texts(texts)


def part_of(ways: _Ways, without: str) -> list[dict[str, Any]]:
    """Parts for ways, none of which has this word in it."""
    return [
        {
            "type": "regex",
            "pattern": way[0] if way else _ANY,
            **({"also": list(way[1:])} if len(way) > 1 else {}),
            "excludes": [without],
        }
        for way in ways
    ]


def _listed(schema: Any, root: Mapping[str, Any], depth: int) -> list[str] | None:
    """Texts among which all are that follow it; None where there are others."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [one for one in values if isinstance(one, str)]
    kinds = kinds_of(schema, root)
    if kinds is not None and "string" not in kinds:
        return []
    together = [resolve(root, schema["$ref"])] if "$ref" in schema else []
    for one in (*together, *(schema.get("allOf") or ())):
        if (found := _listed(one, root, depth + 1)) is not None:
            return found
    for key in ("anyOf", "oneOf"):
        branches = [_listed(one, root, depth + 1) for one in schema.get(key) or ()]
        if branches and None not in branches:
            return [text for branch in branches for text in branch or ()]
    return None


def _ways(schema: Any, root: Mapping[str, Any], depth: int) -> _Ways:
    """The ways in which a text may follow a schema. Raises Unsaid."""
    if schema is True:
        return [()]
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        if schema is False:
            return []
        raise Unsaid("its references lead too far")
    kinds = kinds_of(schema, root)
    if kinds is not None and "string" not in kinds:
        return []
    unsaid = next((key for key in _UNSAID if key in schema), None)
    if unsaid is not None:
        raise Unsaid(f"{unsaid} can't be followed in a text without quotes")
    if "const" in schema or "enum" in schema:
        texts = texts_of(schema, root).listed or []
        return [(quoted(text),) for text in texts]
    ways = _together([[_own(schema)]])
    if "$ref" in schema:
        ways = _together([ways, _ways(resolve(root, schema["$ref"]), root, depth + 1)])
    for one in schema.get("allOf") or ():
        ways = _together([ways, _ways(one, root, depth + 1)])
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            branches = [_ways(one, root, depth + 1) for one in schema[key]]
            if key == "oneOf" and sum(map(bool, branches)) > 1:
                raise Unsaid("oneOf has several options that a text may meet")
            ways = _together([ways, [way for branch in branches for way in branch]])
    return ways


def _own(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """What a schema's own keywords say. Raises Unsaid."""
    found: list[str] = []
    try:
        if "pattern" in schema:
            found.append(whole(to_rust(schema["pattern"])))
        if "format" in schema and (pattern := pattern_of(schema["format"])) is not None:
            found.append(whole(pattern))
        for one in found:
            check_shortest(one)
    except Refusal as refusal:
        raise Unsaid(refusal.reason) from refusal
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    if most is not None and most < least:
        raise Unsaid(f"minLength is {least}, but maxLength is {most}")
    if least or most is not None:
        found.append(f"(?s:.{{{least},{'' if most is None else int(most)}}})")
    return tuple(found)


def _together(sides: Sequence[_Ways]) -> _Ways:
    """The ways that follow a way of each side."""
    ways = [tuple(itertools.chain(*chosen)) for chosen in itertools.product(*sides)]
    if len(ways) > _MOST_WAYS or any(len(way) > _MOST_TOGETHER for way in ways):
        raise Unsaid(
            f"more than {_MOST_WAYS} alternatives, or {_MOST_TOGETHER} patterns for the same text"
        )
    return ways
