"""Reading calls out of text that arrives in pieces.

A family's reader is written as if the whole text were there: `read` is a generator that yields
where it needs more. What is decided never depends on how the text was cut, so a stream says the
same as the whole. What turns out not to be a call is a part of the answer, as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from penstock.server.tools.events import Arguments, Begin, Broken, End, Event, Parsed, Text, collect
from penstock.server.tools.json_scanner import JsonScanner

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The tools that a request offers: name → JSON schema of the arguments."""

_SPACE = re.compile(r"\s*")
_MOST_NAME = 256  # characters of a tool's name
_ARGUMENTS = ("arguments", "parameters")
_ENVELOPE = frozenset(("name", "type", "id", *_ARGUMENTS))


@dataclass(slots=True)
class _Member:
    """Of the object around a call's name and arguments, while it is read."""

    key: str = ""
    start: int = 0


class CallReader:
    """Turns text into events. A family says in `read` what its calls look like.

    Only tools that are offered can be called. bare: nothing but that tells a call from an answer,
    so an object with other keys isn't one.
    """

    bare = False

    def __init__(self, offered: Schemas | None = None) -> None:
        self.offered: Schemas = offered or {}
        self.calls = 0
        self._text = ""
        self._at = 0  # what is before this was read
        self._ended = False
        self._events: list[Event] = []
        self._gap = ""  # white space behind the answer so far; shown when more follows
        self._shown = False
        self._called_last = False  # nothing was shown since
        self._fed = 0  # characters so far
        self.settled = 0  # of them, up to the end of what was shown; calls may be among these
        self._raw: list[str] = []  # of what may be a call
        self._begun = False
        self._reading = self.read()

    def feed(self, text: str) -> list[Event]:
        """What is known now."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._fed += len(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""
        self._ended = True
        return self._advance()

    def parse(self, text: str) -> Parsed:
        """A whole text."""
        return collect(self.feed(text) + self.finish())

    def read(self) -> Reading[None]:
        """Read all of the text."""
        raise NotImplementedError

    def _advance(self) -> list[Event]:
        next(self._reading, None)
        events, self._events = self._events, []
        return events

    # ── text ─────────────────────────────────────────────────────────────────────────────────

    def text_until(self, marks: Marks) -> Reading[str | None]:
        """Show text up to the first of the marks, and read that too; None: there is none."""
        while True:
            found = marks.search(self._text, self._at)
            if found is not None:
                self._show(self._take(found.start()))
                self._raw = [self._take(found.end())]
                return found.group()
            held = 0 if self._ended else marks.held(self._text, self._at)
            self._show(self._take(len(self._text) - held))
            if self._ended:
                self._end_text()
                return None
            yield

    def until(self, mark: str, most: int | None = None) -> Reading[str | None]:
        """Read up to a mark, and it too; what is before it. None: it doesn't come.

        most: characters that may stand before it.
        """
        searched = 0
        while True:
            found = self._text.find(mark, self._at + searched)
            before = (found if found >= 0 else len(self._text) - len(mark)) - self._at
            if most is not None and before > most:
                return None
            if found >= 0:
                text = self._take(found)
                self._raw += [text, self._take(found + len(mark))]
                return text
            if self._ended:
                self._raw.append(self._take(len(self._text)))
                return None
            searched = max(0, len(self._text) - self._at - len(mark) + 1)
            yield

    def literal(self, text: str) -> Reading[bool]:
        """Read exactly this, if it comes next."""
        while True:
            there = self._text[self._at : self._at + len(text)]
            if there == text:
                self._raw.append(self._take(self._at + len(text)))
                return True
            if self._ended or not text.startswith(there):
                return False
            yield

    def back(self, count: int) -> None:
        """Read the mark's last characters once more."""
        self._at -= count
        (mark,) = self._raw
        self._raw = [mark[: len(mark) - count]]

    def peek(self) -> Reading[str]:
        """The next character, which stays; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def space(self) -> Reading[None]:
        """Read white space inside of a call."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match is not None  # of any text
            if match.end() > self._at:
                self._raw.append(self._take(match.end()))
            if self._at < len(self._text) or self._ended:
                return
            yield

    def take_matching(self, pattern: re.Pattern[str], most: int) -> Reading[str]:
        """Read the longest run of characters that the pattern (of one character) matches."""
        start = len(self._raw)
        length = 0
        while True:
            end = self._at
            while end < len(self._text) and length < most and pattern.match(self._text[end]):
                end, length = end + 1, length + 1
            self._raw.append(self._take(end))
            if self._at < len(self._text) or self._ended or length == most:
                return "".join(self._raw[start:])
            yield

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        return text

    def _show(self, text: str) -> None:
        """A part of the answer, but for the white space at its end."""
        if not text:
            return
        text = self._gap + text
        if not self._shown and self.calls:
            text = text.lstrip()
        body = text.rstrip()
        self._gap = text[len(body) :]
        if body:
            self._events.append(Text(body))
            self._settle()

    def _settle(self) -> None:
        self._shown, self._called_last = True, False
        self.settled = self._fed - (len(self._text) - self._at) - len(self._gap)

    def _end_text(self) -> None:
        """White space at the very end belongs to the answer, unless it only follows a call."""
        if self._gap and not self._called_last:
            self._events.append(Text(self._gap))
        self._gap = ""

    # ── calls ────────────────────────────────────────────────────────────────────────────────

    def begin(self, name: str) -> None:
        """A call's name is known, and that its arguments are an object so far."""
        self._begun = True
        self._events.append(Begin(name))

    def argue(self, text: str) -> None:
        """A part of the arguments."""
        if text:
            self._events.append(Arguments(text))

    def end(self) -> None:
        """The arguments are whole."""
        self.calls += 1
        self._begun, self._called_last = False, True
        self._events.append(End())
        self._raw = []

    def refuse(self) -> None:
        """What was read since the last mark isn't a call."""
        raw, self._raw = "".join(self._raw), []
        if not self._begun:
            self._show(raw)
            return
        self._begun = False
        body = raw.rstrip()
        self._events.append(Broken(self._gap + body))
        self._gap = raw[len(body) :]
        self._settle()

    def closing(self, mark: str) -> Reading[bool]:
        """Read what ends a call, behind white space, if it is there."""
        self._raw = []
        yield from self.space()
        if (yield from self.literal(mark)):
            return True
        self._gap += "".join(self._raw)
        self._raw = []
        return False

    def is_name(self, name: object) -> bool:
        """Whether a call may have this name."""
        if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
            return False
        if any(0xD800 <= ord(character) < 0xE000 for character in name):
            return False
        return name in self.offered

    def call_of_object(self) -> Reading[bool]:
        """Read `{"name": …, "arguments": {…}}`; whether it was a call.

        The keys may be in any order. Arguments may be missing, or be an object written as text.
        What is wrong behind name and arguments is left to be read as something else.
        """
        scanner, body = JsonScanner(), ""
        member, name, whole = _Member(), None, None
        sent: int | None = None  # up to where the arguments were passed on
        ended = False
        while True:
            piece = self._scan(scanner)
            body += piece
            if sent is not None:
                stop = len(body)
                self.argue(body[sent:stop])
                sent = stop
            if scanner.failed or (self._ended and self._at == len(self._text) and not scanner.done):
                return ended
            if scanner.mark == "key":
                member.key = _key_of(body)
                if self.bare and member.key not in _ENVELOPE:
                    return False
            elif scanner.mark == "value":
                member.start = len(body)
                streams = member.key in _ARGUMENTS and name is not None and not ended
                if streams and self._text[self._at] == "{":
                    assert name is not None
                    self.begin(name)
                    sent = len(body)
            elif scanner.mark == "end":
                value = body[member.start :]
                if sent is not None:
                    sent, ended = None, True
                    self.end()
                elif member.key in _ARGUMENTS and not ended and whole is None:
                    whole = _as_object(value)
                    if whole is None:
                        return False
                elif member.key == "name" and name is None:
                    name = json.loads(value)
                    if not self.is_name(name):
                        return False
                if name is not None and whole is not None and not ended:
                    ended = True
                    self._tell(name, whole)
            if scanner.done:
                if not ended and name is not None:
                    ended = True
                    self._tell(name, "{}")
                return ended
            if self._at == len(self._text):
                yield

    def _tell(self, name: str, arguments: str) -> None:
        self.begin(name)
        self.argue(arguments)
        self.end()

    def object_of_arguments(self) -> Reading[bool]:
        """Read a JSON object, passing it on as it comes; whether it was one."""
        scanner = JsonScanner()
        while True:
            self.argue(self._scan(scanner))
            if scanner.done or scanner.failed:
                return scanner.done
            if self._at == len(self._text):
                if self._ended:
                    return False
                yield

    def _scan(self, scanner: JsonScanner) -> str:
        piece = self._take(scanner.feed(self._text, self._at))
        self._raw.append(piece)
        return piece


class Marks:
    """Texts that are looked for."""

    def __init__(self, *texts: str) -> None:
        ordered = sorted(texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered)))
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=1) - 1

    def search(self, text: str, at: int) -> re.Match[str] | None:
        """The first of them."""
        return self._pattern.search(text, at)

    def held(self, text: str, at: int) -> int:
        """How many characters at the end may begin one of them."""
        most = min(self._longest, len(text) - at)
        ends = (n for n in range(most, 0, -1) if text[len(text) - n :] in self._beginnings)
        return next(ends, 0)


def _key_of(body: str) -> str:
    """The key that ends a part of an object."""
    start = body.rindex('"', 0, len(body) - 1)
    if body[start - 1] == "\\":  # a quote within a key, which none has that is known
        return ""
    return str(json.loads(body[start:]))


def _as_object(value: str) -> str | None:
    """Arguments that aren't passed on as they come: as an object's text, or None."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        value = json.loads(value).strip() or "{}"
        scanner = JsonScanner()
        end = scanner.feed(value, 0)
        while scanner.mark and not scanner.done:
            end = scanner.feed(value, end)
        return value if scanner.done and end == len(value) else None
    return value if value.startswith("{") else None
