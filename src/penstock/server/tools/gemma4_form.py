"""Gemma 4's arguments as parts: strings between its quotes, objects and lists as it writes them.

What a schema says beyond that (patterns of names, references that lead back, options that overlap),
and what takes too many parts, is JSON, which the reader reads too: so any schema can be followed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from penstock.grammar.subschemas import resolve
from penstock.server.tools.flat import flat
from penstock.server.tools.gemma4 import QUOTE
from penstock.server.tools.parts import (
    Part,
    as_json,
    as_tag,
    held_json,
    members,
    one_of,
    sequence,
    text,
)
from penstock.server.tools.qwen3_coder import kinds_of, types_of
from penstock.server.tools.raw_text import Unsaid, part_of, texts_of

_MOST_PARTS: Final = 2_000  # of all tools; a structural tag may have 3,000
_MOST_CHARACTERS: Final = 400_000  # of their schemas' parts
_MOST_OPTIONAL: Final = 12  # members of an object that requires none: each may be the first
_MOST_ITEMS: Final = 256  # of a list that says how many
_DEEPEST: Final = (5, 2, 1)  # objects and lists in each other: what is tried until it fits
_NAME: Final = re.compile(r'[^\s:,{}\[\]"<]{1,256}')
_PLAIN: Final = frozenset(
    "$comment default deprecated description examples readOnly title type writeOnly".split()
)
_OBJECT: Final = _PLAIN | {"properties", "required", "additionalProperties"}
_LIST: Final = _PLAIN | {"items", "minItems", "maxItems"}
_SEVERAL: Final = frozenset(("$ref", "allOf", "anyOf", "oneOf", "not", "if", "$dynamicRef"))
_COMPLEX: Final = frozenset(("string", "array", "object"))
_NUMBERS: Final = frozenset(("integer", "number"))
_ELSEWHERE: Final = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')
_ANY_TEXT: Final = as_tag(QUOTE, {"type": "any_text", "excludes": [QUOTE]}, QUOTE)


def held(schema: Mapping[str, Any], tools: int) -> Part:
    """Arguments that follow a schema. tools: how many there are."""
    made = flat(schema)
    whole = as_json({"type": "object", **schema} if schema else {"type": "object"})
    if made.problem or not made.properties:
        return whole
    for deepest in _DEEPEST:
        values = _Values(schema, deepest)
        try:
            written = {name: values.of(one, 0) for name, one in made.properties.items()}
        except Unsaid:
            return whole
        part = _object(written, made.required)
        if part is not None and _fits(part, tools):
            return part
    return whole


def loose(schema: Mapping[str, Any], tools: int) -> Part:
    """Arguments with the names that a schema has, and any values."""
    made, whole = flat(schema), as_json({"type": "object"})
    names = [name for name in made.properties if _NAME.fullmatch(name)]
    kinds = {name: types_of(made.properties[name], schema) for name in names}
    values = {name: _any(kinds[name]) for name in names}
    required = [name for name in made.required if name in values]
    part = _object(values, required) if values else None
    return whole if part is None or not _fits(part, tools) else part


def _any(kinds: Collection[str]) -> Part:
    """A value of one of these types, or of any."""
    if "string" not in kinds:
        return as_json(True)
    return _ANY_TEXT if len(kinds) == 1 else one_of([_ANY_TEXT, as_json(True)])


def _object(values: Mapping[str, Part], required: Collection[str]) -> Part | None:
    """An object with bare names; None where they can't be written or in too many ways."""
    if not all(map(_NAME.fullmatch, values)) or not (required or len(values) <= _MOST_OPTIONAL):
        return None
    return sequence(text("{"), members(values, required, comma=",", sign=":"), text("}"))


def _fits(part: Part, tools: int) -> bool:
    """Whether a part isn't too large beside the other tools'."""
    waiting, characters = [part], 0
    for one in waiting:  # which grows
        if "json_schema" in one:
            characters += len(json.dumps(one["json_schema"]))
        waiting += one.get("elements", ())
        waiting += [one["content"]] if "content" in one else []
        if len(waiting) > _MOST_PARTS // tools or characters > _MOST_CHARACTERS // tools:
            return False
    return True


class _Values:
    """Writes values of a schema's parts. root: what its references are looked up in.

    deepest: objects and lists in each other; what is in these is JSON.
    """

    def __init__(self, root: Mapping[str, Any], deepest: int) -> None:
        self.root, self.deepest = root, deepest
        self.left = _MOST_PARTS
        self.within = set[int]()  # references that are being followed

    def of(self, schema: Any, depth: int) -> Part:
        """A value. Raises Unsaid where only the whole schema can say it."""
        self.left -= 1
        if isinstance(schema, Mapping) and self.left >= 0 and depth < self.deepest:
            try:
                part = self._own(schema, depth)
            except Unsaid:
                part = None
            if part is not None:
                return part
        dumped = json.dumps(schema)
        if _ELSEWHERE.search(dumped):
            raise Unsaid("a reference leads to another place than the definitions")
        return held_json(schema, self.root) if '"$ref"' in dumped else as_json(schema)

    def _own(self, schema: Mapping[str, Any], depth: int) -> Part | None:
        """The same in Gemma's own words; None where it is better said in JSON."""
        said = schema.keys() - _PLAIN
        if said == {"$ref"}:
            return self._reference(schema["$ref"], depth)
        if said in ({"anyOf"}, {"oneOf"}):
            return self._options(schema, depth)
        kinds = kinds_of(schema, self.root)
        if not kinds or not kinds & _COMPLEX:
            return None
        if len(kinds) > 1:
            alone = not said & _SEVERAL
            branches = [self.of(_only(schema, kind), depth) for kind in sorted(kinds) if alone]
            return one_of(branches) if alone else None
        if kinds == {"string"}:
            return self._text(schema)
        if kinds == {"object"} and schema.keys() <= _OBJECT:
            return self._members(schema, depth)
        return self._items(schema, depth) if schema.keys() <= _LIST else None

    def _reference(self, reference: Any, depth: int) -> Part | None:
        found = resolve(self.root, reference)
        if not isinstance(found, Mapping) or id(found) in self.within:
            return None
        self.within.add(id(found))
        try:
            return self.of(found, depth)
        finally:
            self.within.remove(id(found))

    def _options(self, schema: Mapping[str, Any], depth: int) -> Part | None:
        options = schema.get("anyOf") or schema.get("oneOf") or ()
        kinds = [kinds_of(one, self.root) for one in options]
        apart = all(itertools.starmap(_apart, itertools.combinations(kinds, 2)))
        if not options or "type" in schema or ("oneOf" in schema and not apart):
            return None
        return one_of([self.of(one, depth) for one in options])

    def _text(self, schema: Mapping[str, Any]) -> Part:
        if schema.keys() <= _PLAIN:
            return _ANY_TEXT
        texts = texts_of(schema, self.root)
        if texts.listed is None:
            options = part_of(texts.ways, QUOTE)
        else:
            options = [text(one) for one in texts.listed if QUOTE not in one]
        if not options:
            raise Unsaid("no text between quotes follows it")
        return as_tag(QUOTE, one_of(options), QUOTE)

    def _members(self, schema: Mapping[str, Any], depth: int) -> Part | None:
        properties = schema.get("properties") or {}
        required = dict.fromkeys(schema.get("required") or ())
        if not properties or not required.keys() <= properties.keys():
            return None
        if any(one is False for one in properties.values()):
            return None
        values = {name: self.of(one, depth + 1) for name, one in properties.items()}
        return _object(values, required)

    def _items(self, schema: Mapping[str, Any], depth: int) -> Part | None:
        low, high = int(schema.get("minItems", 0)), int(schema.get("maxItems", -1))
        given = schema.get("items", True)
        if max(low, high) > _MOST_ITEMS or high == 0 or -1 < high < low:
            return None
        if given is not True and not isinstance(given, Mapping):
            return None
        one = self.of(given, depth + 1)
        more = {"type": "repeat", "min": max(low - 1, 0), "max": high - 1 if high > 0 else -1,
                "content": sequence(text(","), one)}  # fmt: skip
        items = sequence(one, more)
        if low == 0:
            items = {"type": "optional", "content": items}
        return sequence(text("["), items, text("]"))


def _apart(one: frozenset[str] | None, other: frozenset[str] | None) -> bool:
    """Whether no value has a type of both."""
    if one is None or other is None:
        return False
    return not (one & other or (one & _NUMBERS and other & _NUMBERS))


def _only(schema: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What a schema says of values of one type."""
    made = {**schema, "type": kind}
    if "enum" in schema:
        made["enum"] = [one for one in schema["enum"] if kind in types_of({"const": one}, {})]
    return made
