"""Reading a JSON object while it arrives: where it ends, where it goes wrong, what its members are.

RFC 8259, character by character but for what strings hold. Numbers and names (true, false, null)
are looked at when they end.
"""

from __future__ import annotations

import math
import re
from typing import Literal

MAX_DEPTH = 64
"""Of objects and lists in each other, as in requests: what is answered must be readable again."""

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
_VALID = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_MOST_SCALAR = 512  # characters of a number
_HEX = frozenset("0123456789abcdefABCDEF")

_State = Literal[
    "value", "value_or_end", "key", "key_or_end", "colon", "after", "string", "escape", "scalar"
]
Mark = Literal["key", "value", "end"]


def _is_scalar(text: str) -> bool:
    """Whether it is a number that can be, or a name."""
    if _VALID.fullmatch(text) is None:
        return False
    return text[0] in "tfn" or not math.isinf(float(text))


class JsonScanner:
    """Reads one object.

    `mark` says at which place of a member of the object `feed` has stopped: behind its key, before
    its value, behind its value.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self.mark: Mark | None = None
        self._stack: list[str] = []
        self._state: _State = "value"
        self._is_key = False
        self._hex = 0  # digits of \uXXXX that are still to come
        self._code = ""  # those that came
        self._high = False  # half a surrogate pair came, whose other half must follow
        self._scalar = ""

    def feed(self, text: str, at: int) -> int:
        """Read from `at` on, up to a mark, the end, or what is wrong there; where that is."""
        self.mark = None
        while at < len(text) and not (self.done or self.failed or self.mark):
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        state = self._state
        if state == "string":
            return self._string(text, at)
        if state == "escape":
            return self._escape(text, at)
        if state == "scalar":
            return self._read_scalar(text, at)
        match = _SPACE.match(text, at)
        assert match is not None  # of any text
        if match.end() > at:
            if not self._stack:
                self.failed = True
                return at
            return match.end()
        return self._punctuation(text, at)

    def _punctuation(self, text: str, at: int) -> int:
        """One character that isn't in a string or a number."""
        character, state = text[at], self._state
        if state in ("value", "value_or_end"):
            if state == "value_or_end" and character == "]":
                return self._close(at)
            return self._value(character, at)
        if state in ("key", "key_or_end") and character == '"':
            self._state, self._is_key = "string", True
        elif state == "key_or_end" and character == "}":
            return self._close(at)
        elif state == "colon" and character == ":":
            self._state = "value"
            if len(self._stack) == 1:
                self._scalar = "?"  # a mark is due before the value
        elif state == "after" and character == ",":
            self._state = "key" if self._stack[-1] == "{" else "value"
        elif state == "after" and character == {"{": "}", "[": "]"}[self._stack[-1]]:
            return self._close(at)
        else:
            self.failed = True
            return at
        return at + 1

    def _value(self, character: str, at: int) -> int:
        if self._scalar:  # stop here once
            self._scalar, self.mark = "", "value"
            return at
        if not self._stack and character != "{":
            self.failed = True
        elif character in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append(character)
            self._state = "key_or_end" if character == "{" else "value_or_end"
        elif character == '"':
            self._state, self._is_key = "string", False
        elif character in "-0123456789tfn":
            self._state = "scalar"
            return at
        else:
            self.failed = True
        return at if self.failed else at + 1

    def _close(self, at: int) -> int:
        self._stack.pop()
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._state = "after"
        self.done = not self._stack
        if len(self._stack) == 1:
            self.mark = "end"

    def _string(self, text: str, at: int) -> int:
        match = _PLAIN.match(text, at)
        assert match is not None  # of any text
        if self._high and (match.end() > at or text[at] != "\\"):
            self.failed = True
            return at
        at = match.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = "escape"
        elif text[at] != '"':
            self.failed = True
            return at
        elif self._is_key:
            self._state = "colon"
            self.mark = "key" if len(self._stack) == 1 else None
        else:
            self._end_value()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        character = text[at]
        if self._hex:
            self._hex -= 1
            self._code += character
            self.failed = character not in _HEX or (not self._hex and not self._pairs())
        elif character == "u":
            self._hex, self._code = 4, ""
        else:
            self.failed = self._high or character not in '"\\/bfnrt'
        if self.failed:
            return at
        if not self._hex:
            self._state = "string"
        return at + 1

    def _pairs(self) -> bool:
        """Whether the code just read may stand here: a pair's halves stand together, or nobody
        could write the text down.
        """
        code = int(self._code, 16)
        low = 0xDC00 <= code < 0xE000
        right = low == self._high
        self._high = 0xD800 <= code < 0xDC00
        return right

    def _read_scalar(self, text: str, at: int) -> int:
        match = _SCALAR.match(text, at)
        assert match is not None  # of any text
        end = min(match.end(), at + _MOST_SCALAR + 1 - len(self._scalar))
        self._scalar += text[at:end]
        if len(self._scalar) > _MOST_SCALAR:
            self.failed = True
        elif end < len(text):
            self.failed = not _is_scalar(self._scalar)
            self._scalar = ""
            if not self.failed:
                self._end_value()
        return end
