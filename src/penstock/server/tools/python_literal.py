"""Python's literals as JSON: what models write between a call's parentheses.

`ast.literal_eval` would read them too, but not JSON's own names (true, null), which models mix in,
and it warns of strings such as '\\d'. Source: the Python language reference, "Lexical analysis".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64  # of lists, tuples and dictionaries in each other

_SPACE = re.compile(r"\s*")
_STRING = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_NAME = re.compile(r"[A-Za-z]+")
_NAMES = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v",
                  "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}  # fmt: skip


def as_json(text: str) -> str:
    """A literal's JSON. Raises ValueError for anything else."""
    value, end = _value(text, _skip(text, 0), 0)
    if _skip(text, end) != len(text):
        raise ValueError(f"{text[end : end + 40]!r} follows a literal")
    made = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return made.encode("utf-16", "surrogatepass").decode("utf-16")  # JSON's pairs of escapes


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # of any text
    return match.end()


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """(the value at a place, where it ends)."""
    character = text[at : at + 1]
    if depth > MAX_DEPTH:
        raise ValueError(f"lists and dictionaries are nested deeper than {MAX_DEPTH}")
    if character in ("'", '"'):
        return _strings(text, at)
    if character == "[":
        return _items(text, at + 1, "]", depth)
    if character == "(":
        return _items(text, at + 1, ")", depth)
    if character == "{":
        return _dictionary(text, at + 1, depth)
    if match := _NUMBER.match(text, at):
        return _number(match.group()), match.end()
    match = _NAME.match(text, at)
    if match is not None and match.group() in _NAMES:
        return _NAMES[match.group()], match.end()
    raise ValueError(f"{text[at : at + 40]!r} isn't a literal")


def _number(text: str) -> int | float:
    digits = text.lstrip("+-")
    if not digits.isdecimal():  # beyond floats, the largest one
        return max(-sys.float_info.max, min(sys.float_info.max, float(text)))
    if len(digits) > 1 and digits[0] == "0":
        raise ValueError(f"{text[:40]} begins with 0")
    return int(text)


def _strings(text: str, at: int) -> tuple[str, int]:
    """One string, or several that stand behind each other."""
    parts = []
    while match := _STRING.match(text, at):
        body = match[1] if match[1] is not None else match[2]
        parts.append(_ESCAPE.sub(_unescaped, body))
        at = match.end()
        following = _skip(text, at)
        if text[following : following + 1] not in ("'", '"'):
            return "".join(parts), at
        at = following
    raise ValueError(f"the string {text[at : at + 40]!r} doesn't end")


def _unescaped(match: re.Match[str]) -> str:
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if match[group] is not None:
            return chr(int(match[group], base))
    return _PLAIN_ESCAPES.get(match[5], match[0])


def _items(text: str, at: int, close: str, depth: int) -> tuple[Any, int]:
    found: list[Any] = []

    def read(at: int) -> int:
        value, at = _value(text, at, depth + 1)
        found.append(value)
        return at

    end, trailing = _separated(text, at, close, read)
    if close == ")" and len(found) == 1 and not trailing:
        return found[0], end  # parentheses
    return found, end


def _dictionary(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}

    def read(at: int) -> int:
        key, at = _value(text, at, depth + 1)
        at = _skip(text, at)
        if text[at : at + 1] != ":" or isinstance(key, list | dict):
            raise ValueError(f"{text[at : at + 40]!r} isn't a dictionary's member")
        value, at = _value(text, _skip(text, at + 1), depth + 1)
        found[key if isinstance(key, str) else json.dumps(key)] = value
        return at

    end, _ = _separated(text, at, "}", read)
    return found, end


def _separated(text: str, at: int, close: str, read: Callable[[int], int]) -> tuple[int, bool]:
    """Read what commas separate; (where it ends, whether there is a comma at the end)."""
    trailing = False
    while True:
        at = _skip(text, at)
        if text[at : at + 1] == close:
            return at + 1, trailing
        at = _skip(text, read(at))
        trailing = text[at : at + 1] == ","
        if trailing:
            at += 1
        elif text[at : at + 1] != close:
            raise ValueError(f"{text[at : at + 40]!r} follows an item")
