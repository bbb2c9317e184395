"""A JSON schema as llguidance takes it.

llguidance refuses keywords that it can't hold a text to. What it would read differently than JSON
Schema does is written anew here, or refused with its place: regular expressions, formats, what
never ends, and counts that repeated keys would meet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from penstock.grammar import places
from penstock.grammar.chains import check_chains
from penstock.grammar.ecma import to_rust
from penstock.grammar.formats import pattern_of
from penstock.grammar.logic import rewrite
from penstock.grammar.matcher import first_line
from penstock.grammar.numbers import settle
from penstock.grammar.refusal import Refusal, pointer
from penstock.grammar.shortest import check_shortest
from penstock.grammar.sizes import check_count, check_size
from penstock.grammar.subschemas import Path, Schema, children, reachable, resolve
from penstock.sampling.structured import StructuredOutputs

MOST_NESTED: Final = 100
MOST_PATTERNS: Final = 32

WHITESPACE: Final = r"\x20|(?:\r?\n){1,2}(?:\x20{0,32}|\t{0,8})"
"""A space; or one or two line ends and an indentation. Unbounded, it is what a model can write
for ever at a high temperature."""


_ESCAPES: Final = 'nrbtf\\"'
"""What may stand behind a backslash: nothing that could be written without one, or a key that has
a schema of its own could be spelt as another one. So no control characters, which need \\u."""

_CONTROL: Final = re.compile(r"\\u00[01]|\x7f")
"""In a schema that has some itself."""


@dataclass(frozen=True, slots=True)
class Whitespace:
    """What may stand between the parts of a JSON text."""

    pattern: str | None

    @classmethod
    def of(cls, spec: StructuredOutputs) -> Whitespace:
        """As the request says; a pattern is one regex for each place."""
        if spec.disable_any_whitespace or spec.whitespace_pattern == "":
            return cls(None)
        return cls(spec.whitespace_pattern or WHITESPACE)

    def options(self) -> dict[str, object]:
        """The library's."""
        always = {"lenient": False, "coerce_one_of": False}
        if self.pattern is not None:
            return {**always, "whitespace_flexible": True, "whitespace_pattern": self.pattern}
        spaced = {"item_separator": ", ", "key_separator": ": "}
        return {**always, **spaced, "whitespace_flexible": False}


def with_options(schema: Schema, whitespace: Whitespace) -> dict[str, Any]:
    """A prepared schema that says how its text is laid out."""
    body = schema if isinstance(schema, dict) else {}
    options = whitespace.options()
    if not _CONTROL.search(json.dumps(body, ensure_ascii=False)):
        options["json_allowed_escapes"] = _ESCAPES
    return {**body, "x-guidance": options}


def prepare(document: Schema) -> Schema:
    """The schema that llguidance is given. Changes `document`. Raises Refusal with a place."""
    if document is False:
        raise Refusal("no value follows the schema false", "#")
    if document is True:
        return {}
    _check_nesting(document)
    if "x-guidance" in document:
        raise Refusal(
            "x-guidance isn't read: whitespace_pattern and disable_any_whitespace say how a text "
            "is laid out",
            "#/x-guidance",
        )
    check_size(document)
    rewrite(document)
    check_count(document)
    for path, schema in list(reachable(document)):
        try:
            _check(schema)
            settle(schema)
            _spell_out(schema)
        except Refusal as refusal:
            raise refusal.at(pointer(path)) from refusal
    check_chains(document)
    _cut_what_never_ends(document)
    return document


def explain(document: Schema, detail: str) -> tuple[str, str, str]:
    """Our reason, the place, and the library's words, for its message about a prepared schema."""
    said = first_line(detail)
    if match := re.search(r"Unsatisfiable schema: ([^\n]*)", detail):
        place, why = places.of_nothing(document, first_line(match[1]))
        return f"no value follows it ({why})", place, said
    if "regex" in detail and (wrong := places.of_a_regex(document)):
        return f"the pattern isn't one that can be followed: {wrong[1]}", wrong[0], ""
    for pattern, reason in _MESSAGES:
        if match := re.search(pattern, detail):
            named = match.groupdict().get("key")
            return reason.format(**match.groupdict()), _place(document, named, match), said
    return "the library refuses it", "", said


_MESSAGES: Final = (
    (
        r'Unimplemented keys: \["(?P<key>[^"]+)"',
        "{key!r} can't be held to while a text is written",
    ),
    (r"Unknown format: (?P<format>.*)", "the format {format!r} can't be held to"),
    (r"oneOf constraints are not supported", "oneOf has options that more than one value may meet"),
    (
        r"Unable to determine if regex is empty",
        "whether a text follows its pattern, its length and its format together takes too long to "
        "find out",
    ),
    (
        r"can't determine if patternProperty",
        "whether two of its patterns meet the same name takes too long to find out",
    ),
    (r"Failed to generate regex for float range", "a bound is too large or has too many digits"),
    (r"Resource '(?P<uri>[^']*)' is not present", "$ref names {uri!r}, which isn't within it"),
    (
        r"Pointer '(?P<pointer>[^']*)' does not exist",
        "$ref names {pointer!r}, where nothing is, or a part within not, if or oneOf, which are "
        "written otherwise",
    ),
    (r"schema too large", "it is larger than can be compiled in time"),
    (r"too big|too deep|too large", "it is larger than can be compiled in time"),
    (r"circular references with sibling keys", "a $ref that leads to itself has other keys beside"),
    (r"are not disjoint", "two of its patternProperties meet the same name"),
    (
        r"min/maxProperties only supported",
        "minProperties and maxProperties need all properties required",
    ),
)
_KEYS_OF = {"oneOf": "oneOf", "min/max": "maxProperties", "not disjoint": "patternProperties"}


def _place(document: Schema, key: str | None, match: re.Match[str]) -> str:
    """Where the first part is that the message can be about."""
    if place := places.of_a_pattern(document, match.string):
        return place
    if place := places.of_a_range(document, match.string):
        return place
    found = match.groupdict()
    for path, schema in reachable(document):
        if key is not None and key in schema:
            return pointer((*path, key))
        if "format" in found and schema.get("format") == found["format"]:
            return pointer((*path, "format"))
        if "pointer" in found and str(schema.get("$ref")).endswith(found["pointer"]):
            return pointer((*path, "$ref"))
        if "uri" in found and str(schema.get("$ref", "")).split("#")[0] not in ("", "#"):
            return pointer((*path, "$ref"))
        for words, keyword in _KEYS_OF.items():
            if words in match[0] and keyword in schema:
                return pointer((*path, keyword))
    return ""


def _check_nesting(document: Schema) -> None:
    """Raises Refusal for what the library would go into too deep."""
    waiting: list[tuple[Path, Any, int]] = [((), document, 0)]
    while waiting:
        path, value, depth = waiting.pop()
        if depth > MOST_NESTED:
            raise Refusal(
                f"its parts lie more than {MOST_NESTED} deep within each other", pointer(path[:4])
            )
        if isinstance(value, dict):
            waiting += [((*path, key), one, depth + 1) for key, one in value.items()]
        elif isinstance(value, list):
            waiting += [((*path, i), one, depth + 1) for i, one in enumerate(value)]


def _check(schema: dict[str, Any]) -> None:
    """Raises Refusal for what the library takes and can't hold to, or not in time."""
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict) and len(patterns) > MOST_PATTERNS:
        raise Refusal(
            f"{len(patterns):,} patterns; an object may have {MOST_PATTERNS}", "/patternProperties"
        )
    lowest, required = schema.get("minProperties"), schema.get("required")
    count = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(lowest, int) and lowest >= 2 and lowest - count >= 2:
        raise Refusal(
            f"at least {lowest} properties, of which {count} are required: a text could meet that "
            "with the same key twice",
            "/minProperties",
        )


def _spell_out(schema: dict[str, Any]) -> None:
    """Write patterns as Rust reads them, and formats as patterns."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _translated(schema["pattern"], "/pattern")
    if isinstance(schema.get("patternProperties"), dict):
        schema["patternProperties"] = {
            _translated(key, pointer(("patternProperties", key))[1:]): value
            for key, value in schema["patternProperties"].items()
        }
    if isinstance(schema.get("format"), str):
        try:
            found = pattern_of(schema["format"])
        except Refusal as refusal:
            raise refusal.at("/format") from refusal
        del schema["format"]
        if found is not None:
            schema["allOf"] = [*schema.get("allOf", []), {"pattern": found}]
    if schema.get("uniqueItems") is False or schema.get("maxItems") in (0, 1):
        schema.pop("uniqueItems", None)


def _translated(pattern: str, place: str) -> str:
    try:
        written = to_rust(pattern)
        check_shortest(written)
        return written
    except Refusal as refusal:
        raise refusal.at(place) from refusal


def _cut_what_never_ends(document: dict[str, Any]) -> None:
    """Put false where a part needs itself within itself: no value that ends follows it."""
    nodes = {id(schema): schema for _, schema in reachable(document)}
    if not any("$ref" in schema for schema in nodes.values()):
        return
    ends: set[int] = set()

    def finite(schema: Any) -> bool:
        return schema is not False and (not isinstance(schema, dict) or id(schema) in ends)

    users: dict[int, list[int]] = {}
    for key, schema in nodes.items():
        for part in (*(one for _, one in children(schema)), _named(document, schema)):
            users.setdefault(id(part), []).append(key)
    waiting = dict.fromkeys(reversed(nodes))
    while waiting:  # the last first: what they need is often there already
        fresh: dict[int, None] = {}
        for one in waiting:
            if one not in ends and _ends(document, nodes[one], finite):
                ends.add(one)
                fresh.update(dict.fromkeys(users.get(one, ())))
        waiting = {one: None for one in fresh if one not in ends}
    if id(document) not in ends:
        if found := places.seen(document):
            raise Refusal(f"no value follows it ({found[1]})", found[0])
        raise Refusal("each of its values would hold another one within it, without end", "#")
    for schema in nodes.values():
        for holder, at, child in list(_places(schema)):
            if isinstance(child, dict) and id(child) not in ends:
                holder[at] = False


def _named(document: dict[str, Any], schema: dict[str, Any]) -> Schema | None:
    return resolve(document, schema["$ref"]) if "$ref" in schema else None


def _ends(document: dict[str, Any], schema: dict[str, Any], finite: Any) -> bool:
    """Whether some finite value follows it, as far as is known."""
    if "$ref" in schema and not finite(resolve(document, schema["$ref"])):
        return False
    if not all(map(finite, schema.get("allOf", ()))):
        return False
    for key in ("anyOf", "oneOf"):
        if schema.get(key) and not any(map(finite, schema[key])):
            return False
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(kind not in ("object", "array") for kind in kinds):
        return True
    return ("object" in kinds and _object_ends(schema, finite)) or (
        "array" in kinds and _array_ends(schema, finite)
    )


def _object_ends(schema: dict[str, Any], finite: Any) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    return all(
        finite(properties.get(name, schema.get("additionalProperties", True))) for name in required
    )


def _array_ends(schema: dict[str, Any], finite: Any) -> bool:
    least = schema.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    return all(map(finite, first[:least])) and (least <= len(first) or finite(rest))


def _places(schema: dict[str, Any]) -> Iterator[tuple[Any, str | int, Any]]:
    """Each subschema with what holds it, and the key there."""
    for path, child in children(schema):
        holder: Any = schema
        for one in path[:-1]:
            holder = holder[one]
        yield holder, path[-1], child
