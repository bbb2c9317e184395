"""The length of the shortest text that a regex matches: too long a one could never be written."""

from __future__ import annotations

import re
from typing import Final

from penstock.grammar.refusal import Refusal

MOST_CHARACTERS: Final = 50_000
"""Each takes a state of the lexer, which has as many; (a{1000}){1000} takes a second to begin."""

TOKEN: Final = re.compile(
    r"""\\(?:[pPuUx]\{[^}]*\}|.)
      |\[\^?\]?(?:\\.|\[[^\]]*\]|[^\]\\])*\]
      |\((?:\?(?:P?<[^>=!]*>|[a-zA-Z-]*:?))?
      |\{\s*(?P<low>\d+)\s*(?:,\s*\d*\s*)?\}
      |.""",
    re.VERBOSE | re.DOTALL,
)


def check_shortest(regex: str) -> None:
    """Raises Refusal where even the shortest text is too long."""
    found = shortest(regex)
    if found > MOST_CHARACTERS:
        raise Refusal(
            f"the shortest text that matches it has {found:,} characters; at most "
            f"{MOST_CHARACTERS:,} can be followed"
        )


def shortest(regex: str) -> int:
    """In characters, in Rust's syntax; about, for what isn't a regex."""
    # One frame a parenthesis: the shortest of the alternatives that are over, the length of this
    # one but for its last item, and of that.
    frames: list[tuple[int | None, int, int]] = [(None, 0, 0)]
    for match in TOKEN.finditer(regex):
        token, (best, before, last) = match[0], frames[-1]
        if token.startswith("("):
            frames.append((None, 0, 0))
        elif token == ")" and len(frames) > 1:
            frames.pop()
            inner = before + last if best is None else min(best, before + last)
            best, before, last = frames[-1]
            frames[-1] = (best, before + last, inner)
        elif token == "|":
            whole = before + last
            frames[-1] = (whole if best is None else min(best, whole), 0, 0)
        elif token in ("*", "?"):
            frames[-1] = (best, before, 0)
        elif match["low"] is not None:
            frames[-1] = (best, before, last * int(match["low"][:9]))
        elif token not in ("+", "^", "$"):
            frames[-1] = (best, before + last, 1)
    best, before, last = frames[0]
    return before + last if best is None else min(best, before + last)
