"""Qwen3-Coder's XML, which Nemotron 3 and Step 3.5 have too.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

What a parameter's text stands for, its schema says: a string is written as it is, anything else as
JSON or, as templates print it, as Python. Source: the chat template and model card of Qwen3-Coder.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from penstock.grammar.subschemas import resolve
from penstock.server.tools.flat import flat
from penstock.server.tools.hermes import CLOSE, OPEN
from penstock.server.tools.reader import CallReader, Marks, Reading

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_STARTS = Marks(OPEN, FUNCTION)
_MOST_NAME = 256
_MOST_REFERENCES = 16  # behind each other
_MOST_BRANCHES = 256  # of a value's schema; each property may lead to the same thousands
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
          dict: "object", type(None): "null"}  # fmt: skip
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Qwen3CoderReader(CallReader):
    """Reads blocks of parameters; each is passed on when it is whole."""

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (mark := (yield from self.text_until(_STARTS))) is not None:
            if mark == OPEN:
                yield from self.space()
                if not (yield from self.literal(FUNCTION)):
                    self.refuse()
                    continue
            if (yield from self._function()):
                yield from self.closing(CLOSE)
            else:
                self.refuse()

    def _function(self) -> Reading[bool]:
        name = yield from self.until(">", _MOST_NAME)
        if name is None or not self.is_name(name):
            return False
        self.begin(name)
        self.argue("{")
        schema, separator = self.offered[name], ""
        properties = flat(schema).properties
        while True:
            yield from self.space()
            if (yield from self.literal(FUNCTION_END)):
                self.argue("}")
                self.end()
                return True
            if not (yield from self.literal(PARAMETER)):
                return False
            key = yield from self.until(">", _MOST_NAME)
            text = None if key is None else (yield from self.until(PARAMETER_END))
            if key is None or text is None:
                return False
            value = read_value(
                text.removeprefix("\n").removesuffix("\n"), types_of(properties.get(key), schema)
            )
            self.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """JSON's types that a schema names, by whatever keyword; nothing where it names none."""
    return kinds_of(schema, root) or frozenset()


def kinds_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The same; None where any may be, and nothing where none can."""
    found = _Kinds(root).of(schema)
    return _Kinds(root, hints=True).of(schema) if found is None else found


class _Kinds:
    """Looks for types in schemas that may lead back to themselves.

    hints: what a schema without a type means is its type.
    """

    def __init__(self, root: Mapping[str, Any], *, hints: bool = False) -> None:
        self.root, self.hints = root, hints
        self.left = _MOST_BRANCHES
        self.within = set[int]()

    def of(self, schema: Any) -> frozenset[str] | None:
        """The types; None where any may be."""
        self.left -= 1
        if not isinstance(schema, Mapping) or self.left < 0 or id(schema) in self.within:
            return None
        if len(self.within) == _MOST_REFERENCES:
            return None
        self.within.add(id(schema))
        found = self._own(schema)
        if "$ref" in schema:
            found = _both(found, self.of(resolve(self.root, schema["$ref"])))
        for one in itertools.islice(schema.get("allOf") or (), _MOST_BRANCHES):
            found = _both(found, self.of(one))
        for key in ("anyOf", "oneOf"):
            branches = [self.of(x) for x in itertools.islice(schema.get(key) or (), _MOST_BRANCHES)]
            known = [branch for branch in branches if branch is not None]
            if known and len(known) == len(branches):
                found = _both(found, frozenset[str]().union(*known))
        self.within.remove(id(schema))
        return found

    def _own(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        named = schema.get("type")
        found = None
        if named is not None:
            found = frozenset([named] if isinstance(named, str) else named)
        if "enum" in schema or "const" in schema:
            values = schema.get("enum") or [schema.get("const")]
            found = _both(found, frozenset(_TYPES[kind] for kind in set(map(type, values))))
        if found is None and self.hints:
            found = next((kinds for key, kinds in _HINTS.items() if key in schema), None)
        return found


_HINTS = {
    "properties": frozenset(("object",)),
    "items": frozenset(("array",)),
    "prefixItems": frozenset(("array",)),
}
"""What a schema without a type means."""


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    """The types in both; an integer is a number."""
    if one is None or other is None:
        return other if one is None else one
    wider = [{*kinds, "integer"} if "number" in kinds else kinds for kinds in (one, other)]
    shared = frozenset(wider[0] & wider[1])
    return shared - {"integer"} if "number" in shared else shared


def read_value(text: str, types: Collection[str]) -> str:
    """A parameter's value as JSON, from what stands between its lines."""
    said = _PYTHON.get(text.strip(), text.strip())
    if set(types) <= {"string"} or ("string" in types and not (said == "null" and "null" in types)):
        return json.dumps(text, ensure_ascii=False)
    try:
        found = json.loads(said, parse_constant=_refuse, parse_float=_finite)
        made = json.dumps(found, ensure_ascii=False, allow_nan=False)
        made.encode()  # half a surrogate pair is read, but can't be written
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return made if _LARGEST in made else said


def _finite(text: str) -> float:
    """A number; the largest there is for one beyond."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(text)))


_LARGEST = repr(sys.float_info.max)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")
