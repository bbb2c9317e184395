"""Where one part of a text ends and the next begins, for parts that are regular.

The library reads a text in lexemes, each as long as it can be. One that could go on with what
belongs to the part behind it takes that too, and then the part never comes. Whether it could is a
question of regular languages, which the library's own automata answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from penstock.grammar.matcher import new_matcher
from penstock.grammar.refusal import Refusal

if TYPE_CHECKING:
    import llguidance

First: TypeAlias = frozenset[int]
"""Bytes with which a text may begin."""

ANY: Final[First] = frozenset(range(256))
_FUEL: Final = 2_000_000  # tens of milliseconds
_JSON: Final = {
    "object": b"{", "array": b"[", "string": b'"', "null": b"n", "boolean": b"tf",
    "number": b"-0123456789", "integer": b"-0123456789",
}  # fmt: skip


def of_text(text: str) -> First:
    """Of one text; nothing for the empty one."""
    return frozenset(text.encode("utf-8", "replace")[:1])


def of_json(schema: Any) -> First:
    """Of the values of a schema, and perhaps more."""
    named = schema.get("type") if isinstance(schema, dict) else None
    kinds = [named] if isinstance(named, str) else named
    if not isinstance(kinds, list) or not all(one in _JSON for one in kinds):
        kinds = list(_JSON)
    return frozenset(b"".join(_JSON[kind] for kind in kinds))


@lru_cache(maxsize=1024)
def of_regular(body: str, lines: tuple[str, ...]) -> tuple[First, bool]:
    """(of a terminal's texts; whether one is empty). lines: the terminals that it names."""
    found = _begun(body, lines)
    return (ANY, True) if found is None else found


@lru_cache(maxsize=1024)
def takes_more(body: str, lines: tuple[str, ...], first: First) -> bool:
    """Whether a whole text of a terminal may go on with one of these bytes, as far as is known."""
    if not first:
        return False
    one = _class(first)
    # The second is exact; the first is cheap, and mostly enough.
    for text in (rf"/(?s:.*){one}(?s:.*)/", rf"(WHOLE /{one}(?s:.*)/)"):
        found = _begun(f"WHOLE & {text}", (*lines, f"WHOLE: {body}"))
        if found is not None and not found[0]:
            return False
    return _begun(body, lines) is not None  # or it is refused for what it is


def _class(first: Iterable[int]) -> str:
    """A regex for a character that begins with one of these bytes."""
    plain = "".join(f"\\u{{{one:X}}}" for one in sorted(first) if one < 0x80)
    wide = r"\u{80}-\u{10FFFF}" if any(one >= 0x80 for one in first) else ""
    return f"[{plain}{wide}]"


@lru_cache(maxsize=1)
def _tokenizer() -> llguidance.LLTokenizer:
    import llguidance

    return llguidance.LLTokenizer("byte")


def _begun(body: str, lines: Sequence[str]) -> tuple[First, bool] | None:
    """(bytes that may come first, whether nothing need come); None where that can't be said in
    time, or the part isn't a regex.
    """
    import llguidance

    text = "\n".join(["start: FIRST", f"FIRST: {body}", *lines, ""])
    limits = llguidance.LLParserLimits(initial_lexer_fuel=_FUEL, verbose_errors=False)
    grammar = json.dumps({"grammars": [{"lark_grammar": text}]})
    try:
        matcher = new_matcher(_tokenizer(), grammar, limits)
    except Refusal:
        return None
    if matcher.is_error():
        return None
    empty = matcher.is_accepting()
    bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    found = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256])
    return frozenset(found.tolist()), empty
