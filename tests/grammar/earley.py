"""GBNF read and recognised by means of their own: nothing here is shared with the converter.

A grammar becomes rules of single characters, with helper rules for groups and repetitions, and
Earley's algorithm (Earley 1970) says whether a text follows them.
"""

from __future__ import annotations

import re

Symbol = str | tuple[bool, tuple[tuple[str, str], ...]]
"""A rule's name, or a character: (negated, ranges)."""

TOKEN = re.compile(
    r'\s+|#.*|(?P<define>::=)|(?P<name>[\w-]+)|(?P<text>"(?:\\.|[^"\\])*")'
    r"|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<count>\{[^}]*\})|(?P<mark>[|()*+?.])"
)
UNIT = re.compile(r"\\x(..)|\\u(....)|\\U(.{8})|\\(.)|(.)", re.DOTALL)


class Grammar:
    def __init__(self, source: str) -> None:
        self.rules: dict[str, list[list[Symbol]]] = {}
        tokens = [(m.lastgroup or "", m[0]) for m in TOKEN.finditer(source) if m.lastgroup]
        starts = [i for i, (kind, _) in enumerate(tokens) if kind == "define"]
        for i, start in enumerate(starts):
            end = starts[i + 1] - 1 if i + 1 < len(starts) else len(tokens)
            body, rest = self._either(tokens[start + 1 : end])
            assert not rest, rest
            self.rules[tokens[start - 1][1]] = body

    def _either(self, tokens: list[tuple[str, str]]) -> tuple[list[list[Symbol]], list]:
        options: list[list[Symbol]] = [[]]
        while tokens and tokens[0][1] != ")":
            kind, text = tokens[0]
            tokens = tokens[1:]
            if text == "|":
                options.append([])
                continue
            unit: list[Symbol]
            if kind == "name":
                unit = [text]
            elif kind == "text":
                unit = [(False, ((c, c),)) for c in units(text[1:-1])]
            elif kind == "set":
                unit = [characters(text[1:-1])]
            elif text == ".":
                unit = [(True, ())]
            else:
                assert text == "("
                inner, tokens = self._either(tokens)
                tokens = tokens[1:]
                unit = [self._helper(inner)]
            while tokens and (tokens[0][0] == "count" or tokens[0][1] in "*+?"):
                unit = [self._repeat(unit, tokens[0][1])]
                tokens = tokens[1:]
            options[-1] += unit
        return options, tokens

    def _helper(self, options: list[list[Symbol]]) -> str:
        name = f"<{len(self.rules)}>"
        self.rules[name] = options
        return name

    def _repeat(self, unit: list[Symbol], how: str) -> str:
        bounds = {"*": "0,", "+": "1,", "?": "0,1"}.get(how, how.strip("{}"))
        low, _, high = bounds.replace(" ", "").partition(",")
        one = self._helper([unit])
        if "," in bounds and not high:
            many = f"<{len(self.rules)}>"
            self.rules[many] = [[], [one, many]]
            return self._helper([[*[one] * int(low), many]])
        top = int(high or low)
        return self._helper([[one] * count for count in range(int(low), top + 1)])

    def accepts(self, text: str) -> bool:
        """Earley: items are (rule, option, dot, origin)."""
        first = ("root", 0, 0, 0)
        rows: list[dict[tuple[str, int, int, int], None]] = [{} for _ in range(len(text) + 1)]
        for option in range(len(self.rules["root"])):
            rows[0]["root", option, 0, 0] = None
        for at, row in enumerate(rows):
            nullable: set[str] = set()
            queue = list(row)
            while queue:
                name, option, dot, origin = queue.pop()
                body = self.rules[name][option]
                if dot == len(body):
                    if origin == at:
                        nullable.add(name)
                    for other in list(rows[origin]):
                        if self._next(other) == name:
                            self._put(row, queue, (*other[:2], other[2] + 1, other[3]))
                    continue
                symbol = body[dot]
                if isinstance(symbol, str):
                    for i in range(len(self.rules[symbol])):
                        self._put(row, queue, (symbol, i, 0, at))
                    if symbol in nullable:
                        self._put(row, queue, (name, option, dot + 1, origin))
                elif at < len(text) and fits(symbol, text[at]):
                    rows[at + 1][name, option, dot + 1, origin] = None
        return any(
            name == first[0] and origin == 0 and dot == len(self.rules[name][option])
            for name, option, dot, origin in rows[-1]
        )

    def _next(self, item: tuple[str, int, int, int]) -> Symbol | None:
        body = self.rules[item[0]][item[1]]
        return body[item[2]] if item[2] < len(body) else None

    @staticmethod
    def _put(row: dict, queue: list, item: tuple[str, int, int, int]) -> None:
        if item not in row:
            row[item] = None
            queue.append(item)


def units(text: str) -> list[str]:
    """The characters that a text's escapes stand for."""
    named = {"n": "\n", "t": "\t", "r": "\r"}
    return [
        chr(int(m[1] or m[2] or m[3], 16))
        if m[1] or m[2] or m[3]
        else m[5] or named.get(m[4], m[4])
        for m in UNIT.finditer(text)
    ]


def characters(inner: str) -> Symbol:
    negated = inner.startswith("^")
    inner = inner[negated:]
    escaped = [m.start() for m in UNIT.finditer(inner)]
    found = units(inner)
    ranges, i = [], 0
    while i < len(found):
        dash = i + 2 < len(found) and inner[escaped[i + 1]] == "-"
        ranges.append((found[i], found[i + 2] if dash else found[i]))
        i += 3 if dash else 1
    return (negated, tuple(ranges))


def fits(symbol: Symbol, character: str) -> bool:
    negated, ranges = symbol
    return negated != any(low <= character <= high for low, high in ranges)
