"""Gemma 4's form: a call's arguments nearly as JSON, with bare keys and a token for quotes.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>

Several stand directly behind each other. Nothing is escaped in a string, which the next quote ends.
Objects and lists lie within each other as in JSON, and JSON itself is read too; templates print
Python's None for null. A word without quotes is a text. Source: the chat templates of Gemma 4.
"""

from __future__ import annotations

import json
import math
import re
import sys

from penstock.server.tools.json_scanner import MAX_DEPTH
from penstock.server.tools.reader import CallReader, Marks, Reading

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CALL = "call:"
_OPEN, _QUOTE = Marks(OPEN), Marks(QUOTE)
_NAME = re.compile(r"[^\s{}<]")
_KEY = re.compile(r'[^:,{}\[\]"<\n]')
_MOST_NAME = 256
_SCALAR = re.compile(r"[-+.\w]")
_MOST_SCALAR = 512
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_WORD = re.compile(r"[^\W\d][\w\-]*")
_NAMES = {"true": "true", "false": "false", "null": "null",
          "True": "true", "False": "false", "None": "null"}  # fmt: skip


class Gemma4Reader(CallReader):
    """Reads calls; their arguments are passed on as they come, put into JSON."""

    def read(self) -> Reading[None]:
        """Read all of the text."""
        while (yield from self.text_until(_OPEN)) is not None:
            if (yield from self._call()):
                yield from self.closing(CLOSE)
            else:
                self.refuse()

    def _call(self) -> Reading[bool]:
        yield from self.space()
        if not (yield from self.literal(CALL)):
            return False
        yield from self.space()
        name = yield from self.take_matching(_NAME, _MOST_NAME)
        yield from self.space()
        if not self.is_name(name) or (yield from self.peek()) != "{":
            return False
        self.begin(name)
        if not (yield from self._value(0)):
            return False
        self.end()
        return True

    def _value(self, depth: int) -> Reading[bool]:
        """Any value. depth: of the objects and lists around it."""
        first = yield from self.peek()
        if first in ("{", "["):
            return depth < MAX_DEPTH and (yield from self._members(first, depth + 1))
        if first == "<":
            return (yield from self.literal(QUOTE)) and (yield from self._quoted())
        if first == '"':
            text = yield from self._json_text()
            made = None if text is None else json.dumps(text, ensure_ascii=False)
        else:
            made = _scalar((yield from self.take_matching(_SCALAR, _MOST_SCALAR)))
        if made is None:
            return False
        self.argue(made)
        return True

    def _members(self, opening: str, depth: int) -> Reading[bool]:
        """An object's members, or a list's items."""
        closing = "}" if opening == "{" else "]"
        yield from self.literal(opening)
        self.argue(opening)
        yield from self.space()
        if (yield from self.literal(closing)):
            self.argue(closing)
            return True
        while True:
            yield from self.space()
            if opening == "{" and not (yield from self._key()):
                return False
            yield from self.space()
            if not (yield from self._value(depth)):
                return False
            yield from self.space()
            if (yield from self.literal(closing)):
                self.argue(closing)
                return True
            if not (yield from self.literal(",")):
                return False
            self.argue(", ")

    def _key(self) -> Reading[bool]:
        """A member's name, with quotes of either kind or none, and the colon."""
        first = yield from self.peek()
        key: str | None
        if first == '"':
            key = yield from self._json_text()
        elif first == "<":
            quoted = yield from self.literal(QUOTE)
            key = (yield from self.until(QUOTE, _MOST_NAME)) if quoted else None
        else:
            key = (yield from self.take_matching(_KEY, _MOST_NAME)).rstrip() or None
        if key is None:
            return False
        yield from self.space()
        if not (yield from self.literal(":")):
            return False
        self.argue(f"{json.dumps(key, ensure_ascii=False)}: ")
        return True

    def _quoted(self) -> Reading[bool]:
        """The rest of a string up to the token that ends it."""
        self.argue('"')
        while True:
            found = _QUOTE.search(self._text, self._at)
            held = 0 if self._ended else _QUOTE.held(self._text, self._at)
            piece = self._take(found.start() if found else len(self._text) - held)
            self._raw.append(piece)
            self.argue(json.dumps(piece, ensure_ascii=False)[1:-1])
            if found:
                self._raw.append(self._take(found.end()))
                self.argue('"')
                return True
            if self._ended:
                return False
            yield

    def _json_text(self) -> Reading[str | None]:
        """What a string says that is quoted as JSON's; None where it doesn't end or says nothing
        that can be written.
        """
        parts = [self._take(self._at + 1)]
        self._raw.append(parts[0])
        escaped = ended = False
        while not ended:
            end = self._at
            while end < len(self._text) and not ended:
                character = self._text[end]
                ended = character == '"' and not escaped
                escaped = character == "\\" and not escaped
                end += 1
            parts.append(self._take(end))
            self._raw.append(parts[-1])
            if not ended:
                if self._ended:
                    return None
                yield
        try:
            text = str(json.loads("".join(parts), strict=False))
            text.encode()  # half a surrogate pair is read, but can't be written
        except ValueError:
            return None
        return text


def _scalar(text: str) -> str | None:
    """JSON of what stands without quotes: a number, a name, or a word that is a text."""
    if text in _NAMES:
        return _NAMES[text]
    if _NUMBER.fullmatch(text) and len(text) < _MOST_SCALAR:
        if math.isinf(value := float(text)):  # beyond floats, the largest one
            return repr(math.copysign(sys.float_info.max, value))
        return text
    return json.dumps(text, ensure_ascii=False) if _WORD.fullmatch(text) else None
