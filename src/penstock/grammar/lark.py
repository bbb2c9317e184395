"""Lark as llguidance reads it: writing its literals, and checks that its compiler leaves out.

The library compiles rules by recursion, so a long chain of rules would overflow the stack and end
the process; and it takes a rule that needs itself in each alternative, whose text never ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.grammar.depth import too_deep
from penstock.grammar.numbers import check_lowest
from penstock.grammar.refusal import Refusal

LONGEST_CHAIN: Final = 500
"""Of rules and parentheses, each within the one before: 2,500 overflowed a stack of 8 MB."""

MOST_ITEMS: Final = 40_000
"""Of all rules: names, texts, regexes and the marks between them."""

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*|//[^\n]*)
      |(?P<newline>\n)
      |(?P<string>"(?:[^"\\\n]|\\.)*"i?)
      |(?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
      |(?P<special><[^>\s]+>)
      |(?P<directive>%[a-z_]+)
      |(?P<embedded>@[A-Za-z_0-9-]+)
      |(?P<count>\{[0-9, \t]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
      |(?P<name>[?!]*[A-Za-z_][A-Za-z_0-9-]*)
      |(?P<arrow>->)
      |(?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_HEAD = re.compile(r"[?!]?([A-Za-z_][A-Za-z_0-9-]*)(?:\.-?\d+)?[ \t]*(?:\[([^\]\n]*)\])?[ \t]*:")


def literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=True) if text else '""'


def regex(pattern: str) -> str:
    """A regex between slashes."""
    escaped, after_backslash = [], False
    for character in pattern:
        if character == "/" and not after_backslash:
            escaped.append("\\/")
        elif character == "\n":
            escaped.append("n" if after_backslash else "\\n")
        else:
            escaped.append(character)
        after_backslash = character == "\\" and not after_backslash
    if after_backslash:
        raise Refusal("the regex ends with a backslash", detail="")
    return f"/{''.join(escaped) or '(?:)'}/"  # without anything in it, it would be a comment


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's name, its line, what stands in brackets, and its body's tokens: (kind, text)."""

    name: str
    line: int
    options: str
    body: Sequence[tuple[str, str]]


def check(text: str) -> None:
    """Raises Refusal for a grammar whose compiler would overflow, or whose text never ends."""
    rules = {rule.name: rule for rule in read(text)}
    for name, rule in rules.items():
        if match := re.search(r"\b(max_tokens|temperature|stop)\s*=", rule.options):
            raise Refusal(
                f"the rule {name!r} asks for {match[1]}, which can't be followed: tokens "
                "would have to be taken back",
                f"line {rule.line}",
            )
    items = sum(len(rule.body) for rule in rules.values())
    if items > MOST_ITEMS:
        raise Refusal(
            f"its rules have {items:,} items; at most {MOST_ITEMS:,} can be compiled in time. Put "
            "words into one terminal (its name in capitals), as a regex"
        )
    names = {name: _names(rule, rules) for name, rule in rules.items()}
    check_depth(names, {name: _weight(rule) for name, rule in rules.items()})
    if "start" not in rules:
        return  # the library says so
    endless = set(rules) - _that_end(rules)
    if "start" in endless:
        name = _culprit(names, endless)
        raise Refusal(
            f"the rule {name!r} needs itself in each of its alternatives, so its text would never "
            "end: add one without it",
            f"line {rules[name].line}",
        )


def read(text: str) -> Iterator[Rule]:
    """The rules of a grammar, roughly: enough to see which need which."""
    position, line = 0, 1
    name, first, options, body = "", 1, "", list[tuple[str, str]]()
    fresh = True  # at the beginning of a line, where a rule may begin
    depth = 0
    while position < len(text):
        if fresh and depth == 0 and (head := _HEAD.match(text, position)):
            if name:
                yield Rule(name, first, options, body)
            name, first, options, body = head[1], line, head[2] or "", []
            position, fresh = head.end(), False
            continue
        token = _TOKEN.match(text, position)
        assert token is not None  # the last alternative takes any character
        kind = str(token.lastgroup)
        end = token.end()
        if kind == "directive" and token[0] in ("%json", "%regex", "%llguidance", "%lark"):
            end, value = _after_object(text, end)
            try:
                check_lowest(value)
            except Refusal as refusal:
                raise refusal.at(f"line {line}") from refusal
        if kind == "directive" and token[0] in ("%ignore", "%import", "%llguidance", "%declare"):
            if name:
                yield Rule(name, first, options, body)
            name = ""
        line += text.count("\n", position, end)
        position = end
        fresh = kind == "newline" or (fresh and kind == "space")
        if kind in ("space", "newline"):
            continue
        depth += token[0] == "("
        depth -= token[0] == ")"
        body.append((kind, token[0].lstrip("?!") if kind == "name" else token[0]))
    if name:
        yield Rule(name, first, options, body)


def _after_object(text: str, position: int) -> tuple[int, Any]:
    """(where a JSON value ends that begins after white space here, the value); else `position`."""
    start = position + len(text[position:]) - len(text[position:].lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return position, None
    return end, value


def _names(rule: Rule, rules: Mapping[str, Rule]) -> list[str]:
    return list(dict.fromkeys(text for kind, text in rule.body if kind == "name" and text in rules))


def check_depth(
    names: Mapping[str, Sequence[str]], weights: Mapping[str, int], first: str = "start"
) -> None:
    """Raises Refusal for rules that lie too deep within each other.

    names: the rules that each rule uses; weights: the levels that its own body adds.
    """
    roots = [name for name in (first, *names) if name in names]
    if found := too_deep(roots, names.__getitem__, LONGEST_CHAIN, weights.__getitem__):
        path, depth = found
        raise Refusal(
            f"{len(path)} rules and their parentheses lie {depth} deep within each other, from "
            f"{path[0]!r} to {path[-1]!r}; at most {LONGEST_CHAIN} may"
        )


def _weight(rule: Rule) -> int:
    """One, and the deepest of its parentheses."""
    depth = deepest = 0
    for _, text in rule.body:
        depth += (text in ("(", "[")) - (text in (")", "]"))
        deepest = max(deepest, depth)
    return 1 + deepest


def _that_end(rules: Mapping[str, Rule]) -> set[str]:
    """The rules that some finite text follows: the least fixed point."""
    users: dict[str, set[str]] = {}
    for name, rule in rules.items():
        for used in _names(rule, rules):
            users.setdefault(used, set()).add(name)
    ends: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in ends and _Body(rules[name].body, ends, rules).ends():
            ends.add(name)
            waiting.extend(users.get(name, ()))
    return ends


class _Body:
    """Whether a rule's body can end, given the rules that can."""

    def __init__(
        self, tokens: Sequence[tuple[str, str]], ends: set[str], rules: Mapping[str, Rule]
    ) -> None:
        self.tokens, self.known, self.rules = tokens, ends, rules

    def ends(self) -> bool:
        # One frame a parenthesis: whether an alternative ended, whether this one still can, and
        # whether its last item can.
        frames = [[False, True, True]]
        for kind, text in self.tokens:
            top = frames[-1]
            if text in ("(", "["):
                frames.append([False, True, True])
            elif text in (")", "]") and len(frames) > 1:
                closed = frames.pop()
                inner = closed[0] or (closed[1] and closed[2]) or text == "]"
                self._item(frames[-1], inner)
            elif text == "|":
                top[0] = top[0] or (top[1] and top[2])
                top[1] = top[2] = True
            elif text in ("?", "*") or (kind == "count" and re.match(r"\{\s*[0,]|~\s*0", text)):
                top[2] = True
            elif kind == "name":
                self._item(top, text in self.known or text not in self.rules)
        top = frames[0]
        return top[0] or (top[1] and top[2])

    @staticmethod
    def _item(frame: list[bool], can_end: bool) -> None:
        frame[1] = frame[1] and frame[2]
        frame[2] = can_end


def _culprit(names: Mapping[str, Sequence[str]], endless: set[str]) -> str:
    """Of the rules that never end, one that lies on a circle."""
    seen: list[str] = []
    name = "start"
    while name not in seen:
        seen.append(name)
        name = next(one for one in names[name] if one in endless)
    return name
