"""What stands in a structural tag: which parts are regular, and how a part may begin.

Nothing is checked here: a part that isn't one is refused where it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from penstock.grammar import gbnf, lexemes
from penstock.grammar.lexemes import First
from penstock.grammar.refusal import Refusal

Part = str | int
"""Some text, or a special token."""

NOTHING: Final[First] = frozenset()
_LOOKED_AT: Final = 32  # parts, for how what follows begins


class Ahead:
    """Looks at parts before they are written.

    pieces: cuts a text at special tokens; body: a regular part as a terminal's body, and the
    terminals that it names.
    """

    def __init__(
        self,
        pieces: Callable[[str], list[Part]],
        body: Callable[[Any], tuple[str, tuple[str, ...]]],
    ) -> None:
        self._pieces, self._body = pieces, body

    def regular(self, form: Any) -> bool:
        """Whether a part is a regular language, of text alone."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if kind == "const_string":
            value = form.get("value")
            return isinstance(value, str) and not any(
                isinstance(one, int) for one in self._pieces(value)
            )
        if kind in ("sequence", "or"):
            elements = form.get("elements")
            return (
                isinstance(elements, list) and bool(elements) and all(map(self.regular, elements))
            )
        if kind in ("optional", "star", "plus", "repeat"):
            return self.regular(form.get("content"))
        if kind == "grammar":
            text = form.get("grammar")
            return isinstance(text, str) and gbnf.is_regular(text)
        return kind == "regex"

    def first(self, parts: Sequence[Any]) -> tuple[First, bool]:
        """(how these may begin; whether they may be empty), as a lexeme before must know it."""
        found = NOTHING
        for i, part in enumerate(parts):
            one, empty = (lexemes.ANY, True) if i == _LOOKED_AT else self.first_of(part)
            found |= one
            if not empty or i == _LOOKED_AT:
                return found, empty
        return found, True

    def first_of(self, form: Any) -> tuple[First, bool]:
        """The same of one part."""
        kind = form.get("type", "tag") if isinstance(form, Mapping) else None
        if self.regular(form):
            try:
                return lexemes.of_regular(*self._body(form))
            except Refusal:  # which comes once more where it is written
                return lexemes.ANY, True
        inner = _listed(form, "elements" if kind in ("sequence", "or") else "tags")
        match kind:
            case "const_string" | "tag":
                begin = self.lead(form.get("value" if kind == "const_string" else "begin"))
                return (begin, False) if begin is not None else self.first([form.get("content")])
            case "token" | "any_text":  # a special token is never text; free text may lose some
                return NOTHING, kind == "any_text"
            case "json_schema":
                return lexemes.of_json(form.get("json_schema")), False
            case "sequence":
                return self.first(inner)
            case "or" | "tags_with_separator":
                found = [self.first_of(one) for one in inner]
                empty = kind != "or" or any(empty for _, empty in found)
                return NOTHING.union(*(one for one, _ in found)), empty
            case "optional" | "star" | "plus" | "repeat":
                first, empty = self.first_of(form.get("content"))
                return first, empty or kind in ("optional", "star") or not form.get("min", 1)
            case "triggered_tags":
                triggers = [one for one in _listed(form, "triggers") if isinstance(one, str)]
                leads = [self.lead(one) or NOTHING for one in triggers]
                return NOTHING.union(*leads), True
        return lexemes.ANY, True

    def lead(self, value: Any) -> First | None:
        """How a text or a marker begins; None for an empty one."""
        if value == "":
            return None
        pieces = self._pieces(value) if isinstance(value, str) else [0]
        return lexemes.of_text(pieces[0]) if isinstance(pieces[0], str) else NOTHING


def _listed(form: Any, name: str) -> Sequence[Any]:
    value = form.get(name) if isinstance(form, Mapping) else None
    return value if isinstance(value, list) else []
