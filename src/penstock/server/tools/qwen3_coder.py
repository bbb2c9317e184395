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
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

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
            value = _value(text.removeprefix("\n").removesuffix("\n"), _types(schema, key))
            self.argue(f"{separator}{json.dumps(key, ensure_ascii=False)}: {value}")
            separator = ", "


def _types(schema: Mapping[str, Any], key: str) -> set[str]:
    """JSON's types that a parameter may have, as far as its schema says."""
    properties = schema.get("properties")
    one = properties.get(key) if isinstance(properties, Mapping) else None
    return set(types_of(one, schema))


def types_of(schema: Any, root: Mapping[str, Any]) -> Iterator[str]:
    """JSON's types that a schema names, by `type`, its values or its branches."""
    waiting, seen = [schema], set[int]()  # a schema may lead back to itself
    for each in itertools.islice(waiting, _MOST_BRANCHES):  # which grows
        one = resolved(each, root)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        named = one.get("type")
        yield from [named] if isinstance(named, str) else named or ()
        if named is None:
            values = one.get("enum") or [one[key] for key in ("const",) if key in one]
            yield from (_TYPES[kind] for kind in set(map(type, values)))
        branches = itertools.chain(one.get("anyOf") or (), one.get("oneOf") or ())
        waiting += itertools.islice(branches, _MOST_BRANCHES)


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """What a reference leads to, or the schema itself."""
    for _ in range(_MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _value(text: str, types: set[str]) -> str:
    """A parameter's value as JSON."""
    said = _PYTHON.get(text.strip(), text.strip())
    if types <= {"string"} or ("string" in types and not (said == "null" and "null" in types)):
        return json.dumps(text, ensure_ascii=False)
    try:
        found = json.loads(said, parse_constant=_refuse)
        # half a surrogate pair and 1e999 are read, but can't be written
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return said


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} isn't JSON")
