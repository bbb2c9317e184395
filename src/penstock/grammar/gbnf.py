"""GBNF, llama.cpp's grammars, as Lark for llguidance.

Three steps: characters to tokens, tokens to a tree, the tree to Lark. A GBNF grammar reads single
characters; llguidance reads lexemes, each as long as it can be, so that a space at the end of one
is lost for the next. A grammar without recursion therefore becomes one lexeme, and in any other
each character is one of its own; a rule whose only recursion stands at its end or beginning is a
repetition, and none.

Source: llama.cpp's grammars/README.md describes the notation.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NoReturn

from penstock.grammar.lark import check_depth
from penstock.grammar.refusal import Refusal

MOST_NESTED: Final = 100
"""Parentheses within each other."""

MOST_CHARACTERS: Final = 200_000
"""Of a recursive grammar, as it is written for the library."""

_RULE = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_-]*[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)+")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]"}


@dataclass(frozen=True, slots=True)
class Text:
    """These characters."""

    value: str


@dataclass(frozen=True, slots=True)
class Characters:
    """One character within these ranges, or outside of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Name:
    """What the rule of this name says."""

    value: str
    line: int


@dataclass(frozen=True, slots=True)
class Row:
    """One after the other."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """At least `low` and at most `high` times; None is without end."""

    item: Node
    low: int
    high: int | None


Node = Text | Characters | Name | Row | Choice | Repeat


def looks_like_gbnf(text: str) -> bool:
    """Whether it has a rule in GBNF's form, `name ::= …`; Lark's is `name: …`."""
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """The same grammar for llguidance. Raises Refusal, with the line."""
    first, lines = to_rules(text)
    return "\n".join([f"start: {first}", *lines, ""])


def to_rules(text: str, prefix: str = "") -> tuple[str, list[str]]:
    """What stands for the whole in Lark, and the lines that say so; names begin with `prefix`."""
    rules, lines = _Parser(text).rules()
    _check_names(rules, lines)
    rules = {name: _without_tail(name, node) for name, node in rules.items()}
    _check_depth(rules)
    _check_ends(rules, lines)
    writer = _Writer(rules, prefix)
    first = writer.reference("root")
    size = sum(map(len, writer.lines))
    if size > MOST_CHARACTERS and not writer.regular:
        raise Refusal(
            f"it takes {size:,} characters to say, character by character; at most "
            f"{MOST_CHARACTERS:,} can be compiled in time"
        )
    return first, writer.lines


@lru_cache(maxsize=64)
def is_regular(text: str) -> bool:
    """Whether a text is a grammar without recursion, which becomes one terminal."""
    try:
        rules, _ = _Parser(text).rules()
    except Refusal:  # which comes once more where it is written
        return False
    return "root" not in _recursive(
        {name: _without_tail(name, node) for name, node in rules.items()}
    )


class _Parser:
    """Reads rules by recursive descent."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.nested = 0
        self.newlines = [match.start() for match in re.finditer("\n", text)]

    def rules(self) -> tuple[dict[str, Node], dict[str, int]]:
        """Each rule's body and line, by name."""
        found: dict[str, Node] = {}
        lines: dict[str, int] = {}
        self._space(newlines=True)
        while self.at < len(self.text):
            line, name = self._line(), self._name()
            self._space(newlines=False)
            if not self.text.startswith("::=", self.at):
                self._refuse(f"after the rule's name {name!r} comes no ::=")
            if name in found:
                self._refuse(f"the rule {name!r} is there already, in line {lines[name]}")
            self.at += 3
            self._space(newlines=True)
            found[name], lines[name] = self._choice(), line
            if self._peek() not in ("", "\r", "\n"):
                self._refuse(f"{self._peek()!r} can't stand here")
            self._space(newlines=True)
        if "root" not in found:
            self._refuse("it has no rule 'root', with which it begins", whole=True)
        return found, lines

    def _choice(self) -> Node:
        options = [self._row()]
        while self._another_option():
            self.at += 1
            self._space(newlines=True)
            options.append(self._row())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _another_option(self) -> bool:
        """Whether "|" follows, perhaps in another line."""
        before = self.at
        self._space(newlines=True)
        if self._peek() == "|":
            return True
        if not self.nested:
            self.at = before
        return False

    def _row(self) -> Node:
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(self._repeated(item))
            self._space(newlines=self.nested > 0)
        return items[0] if len(items) == 1 else Row(tuple(items))

    def _item(self) -> Node | None:
        match self._peek():
            case '"':
                return self._string()
            case "[":
                return self._characters()
            case ".":
                self.at += 1
                return Characters((), negated=True)
            case "(":
                return self._group()
            case "<" | "!":
                self._refuse("tokens by name can't be read in GBNF; in Lark they can")
            case character if _NAME.match(character):
                return Name(self._name(), self._line())
        return None

    def _group(self) -> Node:
        self.nested += 1
        if self.nested > MOST_NESTED:
            self._refuse(f"more than {MOST_NESTED} parentheses lie within each other")
        self.at += 1
        self._space(newlines=True)
        inner = self._choice()
        if self._peek() != ")":
            self._refuse("a parenthesis isn't closed")
        self.at += 1
        self.nested -= 1
        return inner

    def _repeated(self, item: Node) -> Node:
        marks = 0
        while True:
            marks += 1
            if marks > MOST_NESTED:
                self._refuse(f"more than {MOST_NESTED} repetitions of one another")
            self._space(newlines=self.nested > 0)
            character = self._peek()
            if character and character in "*+?":
                self.at += 1
                item = Repeat(item, int(character == "+"), 1 if character == "?" else None)
            elif character == "{":
                item = self._counted(item)
            else:
                return item

    def _counted(self, item: Node) -> Node:
        match = _COUNT.match(self.text, self.at)
        if match is None:
            self._refuse("a repetition is written {m}, {m,} or {m,n}")
        low = int(match[1])
        high = int(match[3]) if match[3] else None if match[2] else low
        if high is not None and high < low:
            self._refuse(f"{match[0]} has its bounds the wrong way round")
        self.at = match.end()
        return Repeat(item, low, high)

    def _string(self) -> Node:
        self.at += 1
        found: list[str] = []
        while self._peek() != '"':
            found.append(chr(self._character("a text isn't closed")))
        self.at += 1
        return Text("".join(found))

    def _characters(self) -> Node:
        self.at += 1
        negated = self._peek() == "^"
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while self._peek() != "]":
            low = high = self._character("a class [ isn't closed")
            if self._peek() == "-" and self.text[self.at + 1 : self.at + 2] != "]":
                self.at += 1
                high = self._character("a class [ isn't closed")
            if high < low:
                self._refuse(f"the range {chr(low)}-{chr(high)} goes backwards")
            ranges.append((low, high))
        self.at += 1
        return Characters(tuple(ranges), negated)

    def _character(self, unclosed: str) -> int:
        character = self._peek()
        if character in ("", "\n", "\r"):
            self._refuse(unclosed)
        if character != "\\":
            self.at += 1
            return ord(character)
        if match := _ESCAPE.match(self.text, self.at):
            self.at = match.end()
            code = int(match[1] or match[2] or match[3], 16)
            if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
                self._refuse(f"U+{code:04X} is no character")
            return code
        following = self.text[self.at + 1 : self.at + 2]
        if following not in _ESCAPES or not following:
            self._refuse(f"the escape \\{following} has no meaning")
        self.at += 2
        return ord(_ESCAPES[following])

    def _name(self) -> str:
        match = _NAME.match(self.text, self.at)
        if match is None:
            self._refuse(f"{self._peek() or 'the end'!r} is where a rule's name should be")
        self.at = match.end()
        return match[0]

    def _space(self, *, newlines: bool) -> None:
        while True:
            if match := _SPACE.match(self.text, self.at):
                self.at = match.end()
            elif newlines and self._peek() in ("\n", "\r"):
                self.at += 1
            else:
                return

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _line(self) -> int:
        return bisect.bisect_left(self.newlines, self.at) + 1

    def _refuse(self, reason: str, *, whole: bool = False) -> NoReturn:
        raise Refusal(reason, "" if whole else f"line {self._line()}")


def _names(node: Node) -> Iterator[Name]:
    match node:
        case Name():
            yield node
        case Row(items) | Choice(items):
            for item in items:
                yield from _names(item)
        case Repeat(item):
            yield from _names(item)


def _check_names(rules: Mapping[str, Node], lines: Mapping[str, int]) -> None:
    for node in rules.values():
        for name in _names(node):
            if name.value not in rules:
                raise Refusal(f"there is no rule {name.value!r}", f"line {name.line}")


def _without_tail(name: str, node: Node) -> Node:
    """A ::= x A | y as x* y, and A ::= A x | y as y x*, where A is nowhere else in x and y."""
    options = node.options if isinstance(node, Choice) else (node,)
    for last in (True, False):
        loops, ends = [], []
        for option in options:
            items = option.items if isinstance(option, Row) else (option,)
            edge = items[-1 if last else 0] if items else None
            if len(items) > 1 and isinstance(edge, Name) and edge.value == name:
                loops.append(Row(items[:-1] if last else items[1:]))
            else:
                ends.append(option)
        rest = Choice((*loops, *ends))
        if loops and ends and all(one.value != name for one in _names(rest)):
            again, once = Repeat(Choice(tuple(loops)), 0, None), Choice(tuple(ends))
            return Row((again, once) if last else (once, again))
    return node


def _check_depth(rules: Mapping[str, Node]) -> None:
    """The writer and the library go into rules by recursion."""
    check_depth(
        {
            name: list(dict.fromkeys(one.value for one in _names(node)))
            for name, node in rules.items()
        },
        {name: 1 + _depth(node) for name, node in rules.items()},
        "root",
    )


def _depth(node: Node) -> int:
    match node:
        case Row(items) | Choice(items):
            return 1 + max(map(_depth, items), default=0)
        case Repeat(item):
            return 1 + _depth(item)
        case _:
            return 0


def _check_ends(rules: Mapping[str, Node], lines: Mapping[str, int]) -> None:
    """Raises Refusal where no finite text follows `root`."""
    ends: set[str] = set()

    def finite(node: Node) -> bool:
        match node:
            case Name(value):
                return value in ends
            case Row(items):
                return all(map(finite, items))
            case Choice(options):
                return any(map(finite, options))
            case Repeat(item, low):
                return low == 0 or finite(item)
            case Characters(ranges, negated):
                return bool(ranges) or negated
            case _:
                return True

    users: dict[str, set[str]] = {}
    for name, node in rules.items():
        for used in _names(node):
            users.setdefault(used.value, set()).add(name)
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in ends and finite(rules[name]):
            ends.add(name)
            waiting.extend(users.get(name, ()))
    if "root" not in ends:
        name = next(name for name in rules if name not in ends)
        raise Refusal(
            f"the rule {name!r} needs itself in each of its alternatives, or a class without "
            "characters, so its text would never end: add an alternative without it",
            f"line {lines[name]}",
        )


class _Writer:
    """Writes a tree as Lark: one terminal where it is regular, else rules of single characters."""

    def __init__(self, rules: Mapping[str, Node], prefix: str) -> None:
        self.rules, self.prefix = rules, prefix
        self.regular = "root" not in _recursive(rules)
        self.lines: list[str] = []
        self.written: dict[str, str] = {}

    def reference(self, name: str) -> str:
        """What the rule is called in Lark; it is written when first needed."""
        if name not in self.written:
            kind, prefix = ("T", self.prefix.upper()) if self.regular else ("r", self.prefix)
            known = self.written[name] = f"{prefix}{kind}{len(self.written)}"
            self.lines.append(f"{known}: {self._body(self.rules[name])}")
        return self.written[name]

    def _body(self, node: Node) -> str:
        match node:
            case Text("") | Repeat(high=0):
                return '""'
            case Text(value):
                written = [f"/{_escaped(one)}/" for one in value]
                return f"/{''.join(map(_escaped, value))}/" if self.regular else " ".join(written)
            case Characters():
                return f"/{_class(node)}/"
            case Name(value):
                return self.reference(value)
            case Row(items):
                return f"({' '.join(map(self._body, items))})" if items else '""'
            case Choice(options):
                return f"({' | '.join(map(self._body, options))})"
            case Repeat(item):
                return f"({self._body(item)}){_count(node)}"


def _recursive(rules: Mapping[str, Node]) -> set[str]:
    """The rules that lead to one that leads to itself."""
    used = {name: {one.value for one in _names(node)} for name, node in rules.items()}
    waiting = {name: len(names) for name, names in used.items()}
    users: dict[str, list[str]] = {}
    for name, names in used.items():
        for one in names:
            users.setdefault(one, []).append(name)
    done = [name for name, count in waiting.items() if not count]
    regular = set(done)
    while done:
        for user in users.get(done.pop(), ()):
            waiting[user] -= 1
            if not waiting[user]:
                regular.add(user)
                done.append(user)
    return set(rules) - regular


def _count(node: Repeat) -> str:
    match node.low, node.high:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case low, high:
            return f"{{{low},{'' if high is None else high}}}"


def _escaped(character: str) -> str:
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\u{{{ord(character):X}}}"


def _class(node: Characters) -> str:
    if not node.ranges:
        return r"[\u{0}-\u{10FFFF}]" if node.negated else r"[^\u{0}-\u{10FFFF}]"
    inner = "".join(
        _escaped(chr(low)) + ("-" + _escaped(chr(high)) if high > low else "")
        for low, high in node.ranges
    )
    return f"[{'^' if node.negated else ''}{inner}]"
