"""JSON Schema's regular expressions (ECMA-262) as Rust's, which llguidance reads.

The two agree on most of what schemas write, and silently differ on the rest: a dot, `\\s`, `\\d`,
and, inside of a class, `[`, `&&`, `--` and `~~`, which are operators in Rust. So each pattern is
written anew: what means the same stays, what differs is spelled out, what Rust lacks is refused.
"""

from __future__ import annotations

import re
from typing import NoReturn

from penstock.grammar.refusal import Refusal

# ECMA-262, 12.2 and 12.3: white space and line ends.
_SPACES = r"\t-\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
_LINE_ENDS = r"\n\r\u{2028}\u{2029}"
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACES}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_REPEAT = re.compile(r"\{(\d{1,9})(?:(,)(\d{0,9}))?\}")
_UNICODE = re.compile(r"u(?:\{([0-9A-Fa-f]{1,8})\}|([0-9A-Fa-f]{4}))")
_PAIR = re.compile(r"u[dD]([89abAB][0-9A-Fa-f]{2})\\u[dD]([c-fC-F][0-9A-Fa-f]{2})")
_PROPERTY = re.compile(r"[pP]\{([A-Za-z_]+=)?([A-Za-z_]+)\}")
_GROUP = re.compile(r"\?(?::|<[A-Za-z_$][\w$]*>)")


def to_rust(pattern: str) -> str:
    """The same regex for Rust. Raises Refusal."""
    return _Translation(pattern).run()


class _Translation:
    """One pass over a pattern."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.at = 0
        self.out: list[str] = []

    def run(self) -> str:
        while self.at < len(self.pattern):
            self._one()
        return "".join(self.out)

    def _one(self) -> None:
        character = self._next()
        match character:
            case "\\":
                self.out.append(self._escape())
            case "[":
                self.out.append(self._class())
            case ".":
                self.out.append(f"[^{_LINE_ENDS}]")
            case "(":
                self._group()
            case "{":
                self._repeat()
            case "}" | "]":
                self.out.append("\\" + character)
            case "*" | "+" | "?" | "|" | ")" | "^" | "$":
                self.out.append(character)
            case _:
                self.out.append(_literal(ord(character)))

    def _group(self) -> None:
        if self.pattern[self.at : self.at + 1] != "?":
            self.out.append("(?:")
            return
        match = _GROUP.match(self.pattern, self.at)
        if match is None:
            self._refuse("look-around and flags within a pattern can't be followed")
        self.at = match.end()
        self.out.append("(?:")

    def _repeat(self) -> None:
        match = _REPEAT.match(self.pattern, self.at - 1)
        if match is None:  # a brace on its own stands for itself
            self.out.append("\\{")
            return
        self.at = match.end()
        low, comma, high = match.groups()
        self.out.append(f"{{{int(low)}{comma or ''}{int(high) if high else ''}}}")

    def _escape(self) -> str:
        """What an escape outside of a class stands for."""
        following = self.pattern[self.at : self.at + 1]
        if following in ("b", "B"):
            self._refuse(f"\\{following}, a word's boundary, looks around, which can't be followed")
        if following and (following in "123456789" or following == "k"):
            self._refuse(f"\\{following} refers back, which can't be followed")
        inside = self._class_escape()
        if isinstance(inside, int):
            return _literal(inside)
        return f"[{inside}]"

    def _class(self) -> str:
        negated = self.pattern[self.at : self.at + 1] == "^"
        self.at += negated
        parts: list[str] = []
        while True:
            if self.at >= len(self.pattern):
                self._refuse("a class [ isn't closed")
            if self.pattern[self.at] == "]":
                self.at += 1
                break
            low = self._class_atom()
            following = self.pattern[self.at : self.at + 2]
            if following[:1] == "-" and following[1:] not in ("]", ""):
                self.at += 1
                parts.append(self._range(low, self._class_atom()))
            else:
                parts.append(_literal(low) if isinstance(low, int) else low)
        if not parts:  # nothing, or anything
            return r"[\x00-\u{10FFFF}]" if negated else r"[^\x00-\u{10FFFF}]"
        return f"[{'^' if negated else ''}{''.join(parts)}]"

    def _range(self, low: int | str, high: int | str) -> str:
        if isinstance(low, str) or isinstance(high, str):  # "\w-x": the three, as in Annex B
            ends = [_literal(one) if isinstance(one, int) else one for one in (low, high)]
            return ends[0] + "\\-" + ends[1]
        if low > high:
            self._refuse(f"the range {chr(low)}-{chr(high)} goes backwards")
        return f"{_literal(low)}-{_literal(high)}"

    def _class_atom(self) -> int | str:
        character = self._next()
        if character != "\\":
            return ord(character)
        if self.pattern[self.at : self.at + 1] == "b":  # within a class, backspace
            self.at += 1
            return 0x08
        return self._class_escape()

    def _class_escape(self) -> int | str:
        """A character, or the members of a class."""
        if self.at >= len(self.pattern):
            self._refuse("it ends with a backslash")
        if match := _PAIR.match(self.pattern, self.at):
            self.at = match.end()
            high, low = (int(one, 16) for one in match.groups())
            return 0x10000 + ((high - 0x800) << 10) + (low - 0xC00)
        if match := _UNICODE.match(self.pattern, self.at):
            self.at = match.end()
            return self._character(int(match[1] or match[2], 16))
        if match := _PROPERTY.match(self.pattern, self.at):
            self.at = match.end()
            return "\\" + match[0]
        character = self._next()
        if character == "x" and re.match("[0-9A-Fa-f]{2}", self.pattern[self.at : self.at + 2]):
            self.at += 2
            return int(self.pattern[self.at - 2 : self.at], 16)
        if character == "c" and self.pattern[self.at : self.at + 1].isalpha():
            return ord(self._next()) % 32
        if character == "0" and not self.pattern[self.at : self.at + 1].isdigit():
            return 0
        if character in _CLASSES:
            return _CLASSES[character]
        if character.lower() in _CLASSES:
            return f"[^{_CLASSES[character.lower()]}]"
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isalnum():
            self._refuse(f"\\{character} has no meaning")
        return ord(character)

    def _character(self, code: int) -> int:
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            self._refuse(f"U+{code:04X} is no character of its own")
        return code

    def _next(self) -> str:
        self.at += 1
        return self.pattern[self.at - 1]

    def _refuse(self, reason: str) -> NoReturn:
        raise Refusal(f"the pattern {self.pattern!r:.120}, character {self.at}: {reason}")


def _literal(code: int) -> str:
    """A character that stands for itself, in a class or outside."""
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\u{{{code:X}}}"
