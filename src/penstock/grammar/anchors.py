"""A regex that is looked for in a text, as one that matches all of the text."""

from __future__ import annotations

from penstock.grammar.refusal import Refusal
from penstock.grammar.shortest import TOKEN


def whole(regex: str) -> str:
    """Of the texts in which a regex is found, in Rust's syntax. Raises Refusal."""
    branches: list[list[str]] = [[]]
    depth = 0
    for match in TOKEN.finditer(regex):
        token = match[0]
        depth += token.startswith("(") - (token == ")")
        if token == "|" and depth == 0:
            branches.append([])
        else:
            branches[-1].append(token)
    return "|".join(map(_branch, branches))


def _branch(tokens: list[str]) -> str:
    first = tokens[:1] == ["^"]
    last = tokens[-1:] == ["$"]
    inner = tokens[first : len(tokens) - last]
    if "^" in inner or "$" in inner:
        raise Refusal("^ and $ can be followed at a pattern's beginning and end alone")
    before, after = "" if first else "(?s:.*)", "" if last else "(?s:.*)"
    return f"{before}(?:{''.join(inner)}){after}"
