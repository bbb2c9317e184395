"""not, oneOf, if, dependencies and propertyNames in terms of anyOf and allOf.

llguidance has no negation. A part of a schema can often be negated by itself: what isn't a string
of three letters is no string, or a shorter one, or a longer one. Where every part can, the whole is
said exactly; where one can't (a pattern, a format, items), the keyword stays and is refused.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable
from typing import Any, Final

from penstock.grammar.disjoint import Disjoint
from penstock.grammar.subschemas import Schema, reachable, resolve

MOST_NEGATED: Final = 2_000
"""Parts of one schema: a negation can double what it negates."""

KINDS: Final = ("null", "boolean", "number", "string", "array", "object")
_UNSAID: Final = frozenset(
    "pattern format multipleOf items prefixItems additionalItems contains uniqueItems "
    "unevaluatedItems additionalProperties patternProperties propertyNames unevaluatedProperties "
    "dependencies dependentRequired dependentSchemas if then else oneOf $dynamicRef $recursiveRef"
    "".split()
)
_TRIVIAL: Final = frozenset(("additionalProperties", "items", "additionalItems", "uniqueItems"))


class Unsayable(Exception):  # noqa: N818 — not an error: the keyword stays as it is
    """The negation of this can't be written."""


def rewrite(document: dict[str, Any]) -> None:
    """Say the same without them, in place, where that can be said."""
    writer = _Rewriting(document)
    done: set[int] = set()
    fresh = True
    while fresh:  # what is written may hold more of them
        schemas = [schema for _, schema in reachable(document) if id(schema) not in done]
        fresh = bool(schemas)
        for schema in schemas:
            done.add(id(schema))
            writer.kept.append(schema)  # so that no other object gets its id
            writer.one(schema)


class _Rewriting:
    """Of one document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.kept: list[Any] = []
        self.disjoint = Disjoint(document)
        self.negated = 0

    def one(self, schema: dict[str, Any]) -> None:
        """Rewrite what stands in this schema itself."""
        for rule in (self._not, self._one_of, self._if, self._dependencies, self._names):
            try:
                rule(schema)
            except (Unsayable, RecursionError):
                continue

    def _not(self, schema: dict[str, Any]) -> None:
        if "not" in schema:
            _add(schema, self.negate(schema["not"]))
            del schema["not"]

    def _one_of(self, schema: dict[str, Any]) -> None:
        options = schema.get("oneOf")
        if not isinstance(options, list) or not options:
            return
        apart = self.disjoint.all(options)
        written = []
        for i, option in enumerate([] if apart else options):
            others = [
                self.negate(other)
                for j, other in enumerate(options)
                if j != i and not self.disjoint(option, other)
            ]
            written.append({"allOf": [option, *others]} if others else option)
        written = options if apart else written
        del schema["oneOf"]
        if "anyOf" in schema:
            _add(schema, {"anyOf": written})
        else:
            schema["anyOf"] = written

    def _if(self, schema: dict[str, Any]) -> None:
        if "if" not in schema or not ("then" in schema or "else" in schema):
            for name in ("if", "then", "else"):  # alone they say nothing
                schema.pop(name, None)
            return
        condition = schema["if"]
        options = [
            {"allOf": [copy.deepcopy(condition), schema.get("then", True)]},
            {"allOf": [self.negate(condition), schema.get("else", True)]},
        ]
        for name in ("if", "then", "else"):
            schema.pop(name, None)
        _add(schema, {"anyOf": options})

    def _dependencies(self, schema: dict[str, Any]) -> None:
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            if not isinstance(schema.get(key), dict):
                continue
            for name, needed in schema.pop(key).items():
                then = {"required": needed} if isinstance(needed, list) else needed
                if isinstance(needed, str):  # draft 3
                    then = {"required": [needed]}
                _add(schema, {"anyOf": [{"properties": {name: False}}, then]})

    def _names(self, schema: dict[str, Any]) -> None:
        names = schema.get("propertyNames")
        if names is True or names == {}:
            del schema["propertyNames"]
            return
        if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
            return
        if not set(names) <= {"type", "pattern", "description"} or "pattern" not in names:
            return
        if names.get("type", "string") != "string":
            return
        del schema["propertyNames"]
        schema["patternProperties"] = {names["pattern"]: schema.get("additionalProperties", True)}
        schema["additionalProperties"] = False

    def negate(self, schema: Schema, within: tuple[str, ...] = ()) -> Schema:
        """A schema that exactly the other values follow. Raises Unsayable."""
        self.negated += 1
        if self.negated > MOST_NEGATED:
            raise Unsayable
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not _says_nothing(schema):
            raise Unsayable
        options: list[Any] = []
        for key, value in schema.items():
            options += self._negations(key, value, within)
        if True in options:
            return True
        options = [one for one in options if one is not False]
        if not options:
            return False
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _negations(self, key: str, value: Any, within: tuple[str, ...]) -> list[Any]:
        """What doesn't follow one keyword of a schema."""
        match key:
            case "type":
                return _not_of_type(value)
            case "const":
                return _not_one_of([value])
            case "enum":
                return _not_one_of(value)
            case "not":
                return [copy.deepcopy(value)]
            case "allOf":
                return [self.negate(one, within) for one in value]
            case "anyOf":
                return [{"allOf": [self.negate(one, within) for one in value]}]
            case "$ref":
                target = resolve(self.document, value)
                if target is None or value in within or len(within) > 20:
                    raise Unsayable
                return [self.negate(target, (*within, value))]
            case "required" if isinstance(value, list):
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                return [
                    {
                        "type": "object",
                        "properties": {name: self.negate(one, within)},
                        "required": [name],
                    }
                    for name, one in value.items()
                ]
        return _beyond(key, value)


def _says_nothing(schema: dict[str, Any]) -> bool:
    """Whether the keywords that can't be negated are met by every value."""
    return (
        all(
            schema[key] is False if key == "uniqueItems" else schema[key] in (True, {})
            for key in _UNSAID & set(schema)
            if key in _TRIVIAL
        )
        and _UNSAID & set(schema) <= _TRIVIAL
    )


def _add(schema: dict[str, Any], more: Schema) -> None:
    schema["allOf"] = [*schema.get("allOf", []), more]


def _others(kinds: Iterable[str]) -> list[Any]:
    rest = [kind for kind in KINDS if kind not in kinds]
    return [{"type": rest}] if rest else []


def _not_of_type(value: Any) -> list[Any]:
    kinds = value if isinstance(value, list) else [value]
    if "integer" in kinds and "number" not in kinds:
        raise Unsayable
    return _others(kinds)


def _beyond(key: str, value: Any) -> list[Any]:
    """What doesn't keep a bound; nothing for a keyword that sets none."""
    pairs = {
        "minimum": ("number", "exclusiveMaximum", 0),
        "maximum": ("number", "exclusiveMinimum", 0),
        "exclusiveMinimum": ("number", "maximum", 0),
        "exclusiveMaximum": ("number", "minimum", 0),
        "minLength": ("string", "maxLength", -1),
        "maxLength": ("string", "minLength", 1),
        "minItems": ("array", "maxItems", -1),
        "maxItems": ("array", "minItems", 1),
        "minProperties": ("object", "maxProperties", -1),
        "maxProperties": ("object", "minProperties", 1),
    }
    if key not in pairs:
        return []
    kind, other, step = pairs[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unsayable
    if value + step < 0 and step:
        return []  # at least 0: always so
    return [{"type": kind, other: value + step if step else value}]


def _not_one_of(values: Any) -> list[Any]:
    """Every value but these."""
    if not isinstance(values, list) or any(isinstance(one, (list, dict)) for one in values):
        raise Unsayable
    options: list[Any] = []
    numbers = sorted({one for one in values if _is_number(one)})
    texts = sorted({one for one in values if isinstance(one, str)})
    kinds = ["null"] if None in values else []
    booleans = [one for one in (True, False) if any(one is value for value in values)]
    if booleans:
        kinds.append("boolean")
        options += [{"const": one} for one in (True, False) if one not in booleans]
    if numbers:
        kinds.append("number")
        edges = [None, *numbers, None]
        for low, high in itertools.pairwise(edges):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            given = {key: one for key, one in bounds.items() if one is not None}
            options.append({"type": "number", **given})
    if texts:
        kinds.append("string")
        options.append({"type": "string", "pattern": f"^(?:{_unlike(texts)})$"})
    return [*options, *_others(kinds)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _unlike(texts: list[str]) -> str:
    """A regex for every other text: one that leaves their tree of beginnings, or stops in it."""
    if len(texts) > 200 or max(map(len, texts)) > 200:
        raise Unsayable
    branches: dict[str, list[str]] = {}
    for text in texts:
        if text:
            branches.setdefault(text[0], []).append(text[1:])
    ways = [] if "" in texts else [""]
    known = "".join(_escaped(one) for one in branches)
    ways.append(f"[^{known}][^]*" if branches else "[^]+")
    ways += [f"{_escaped(one)}(?:{_unlike(rest)})" for one, rest in branches.items()]
    return "|".join(ways)


def _escaped(character: str) -> str:
    code = ord(character)
    if code > 0xFFFF:
        pair = character.encode("utf-16-be").hex()
        return f"\\u{pair[:4]}\\u{pair[4:]}"
    return f"\\u{code:04x}"
