"""Structural tags: free text in which certain words begin a part that follows a schema.

Both of vLLM's forms are read: the older one, `structures` and `triggers`, and the newer `format`, a
tree of parts as xgrammar documents it. Either becomes one Lark grammar: text before a trigger is a
lazy lexeme, which ends where the trigger first stands. A special token's name within `begin`, `end`
or a trigger stands for that token, the only way in which one may come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.grammar import gbnf, lark, schema
from penstock.grammar.refusal import Refusal, pointer
from penstock.grammar.vocabulary import Vocabulary
from penstock.sampling.structured import MOST_CHARACTERS

MOST_NESTED: Final = 50
MOST_PARTS: Final = 3_000
MOST_TRIGGERS: Final = 500  # each tag's beginning is held against every one
_TEXT: Final = r"(?s:.*)"
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order", "any_whitespace"),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "any_text": ("excludes",),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("min", "max", "content"),
    "tag": ("begin", "content", "end"),
    "token": ("token",),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
_OPEN: Final = ("any_text", "triggered_tags")
"""Parts whose text ends only where something else says so."""

Part = str | int
"""Some text, or a special token."""


def to_lark(document: Mapping[str, Any], vocabulary: Vocabulary) -> str:
    """The grammar of a structural tag. Raises Refusal with the place."""
    builder = _Builder(vocabulary)
    if "structures" in document:
        form, path = _older(document), tuple[str | int, ...]()
    else:
        _known(document, ("type", "format"), ())
        form, path = _field(document, "format", Mapping, ()), ("format",)
    body = builder.write(form, path, None)
    return "\n".join([f"start: {body}", f"TEXT: /{_TEXT}/", *builder.lines, ""])


def _older(document: Mapping[str, Any]) -> dict[str, Any]:
    """The first form in terms of the second."""
    _known(document, ("type", "structures", "triggers"), ())
    tags = []
    for i, one in enumerate(_field(document, "structures", Sequence, ())):
        path = ("structures", i)
        if not isinstance(one, Mapping):
            raise Refusal("an object with begin, schema and end must be here", pointer(path))
        _known(one, ("begin", "schema", "end"), path)
        content = {"type": "json_schema", "json_schema": one.get("schema", {})}
        begin, end = (_field(one, name, str, path) for name in ("begin", "end"))
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    triggers = _field(document, "triggers", Sequence, ())
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Builder:
    """Writes parts as Lark, from the outside in."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.lines: list[str] = []
        self.count = self.characters = 0
        names = {vocabulary.tokenizer.id_to_token(i): i for i in sorted(vocabulary.special_ids)}
        self.special = {name: i for name, i in names.items() if name and vocabulary.has(i)}
        longest = sorted(self.special, key=len, reverse=True)
        self.split = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None

    def write(self, form: Any, path: tuple[str | int, ...], ends: list[list[Part]] | None) -> str:
        """A part, and with `ends` what closes it: then one of them is a piece of it."""
        if len(path) > 2 * MOST_NESTED:
            raise Refusal(f"more than {MOST_NESTED} parts lie within each other", pointer(path[:4]))
        self.count += 1
        if self.count > MOST_PARTS:
            raise Refusal(
                f"more than {MOST_PARTS:,} parts can't be compiled in time", pointer(path)
            )
        kind = _field(form, "type", str, path) if isinstance(form, Mapping) else None
        if kind not in _FIELDS:
            known = ", ".join(_FIELDS)
            raise Refusal(f"the type {kind!r} can't be followed; known are {known}", pointer(path))
        _known(form, ("type", *_FIELDS[kind]), path)
        if kind in _OPEN:
            return getattr(self, f"_{kind}")(form, path, ends)  # type: ignore[no-any-return]
        if kind == "sequence":
            return self._sequence(form, path, ends)
        body = str(getattr(self, f"_{kind}")(form, path))
        return body if ends is None else f"{body} {self._ends(ends)}"

    def _const_string(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return self._parts(self._pieces(_field(form, "value", str, path)))

    def _json_schema(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        if form.get("style", "json") != "json" or form.get("any_order", False):
            raise Refusal(
                "only the style json in the schema's order can be followed", pointer(path)
            )
        place = (*path, "json_schema")
        given = form.get("json_schema")
        if not isinstance(given, (Mapping, bool)):
            raise Refusal("a schema must be here", pointer(place))
        try:
            prepared = schema.prepare(json.loads(json.dumps(given)))
        except Refusal as refusal:
            inner = refusal.place.removeprefix("#")
            raise Refusal(refusal.reason, pointer(place) + inner, refusal.detail) from refusal
        free = _field(form, "any_whitespace", bool, path, default=True)
        space = schema.Whitespace(schema.WHITESPACE if free else None)
        body = schema.with_options(prepared, space)
        return self._rule(f"%json {json.dumps(body)}")

    def _regex(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return lark.regex(self._read(form, "pattern", path))

    def _grammar(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        text = self._read(form, "grammar", path)
        try:
            first, lines = gbnf.to_rules(text, prefix=f"g{len(self.lines)}_")
        except Refusal as refusal:
            raise Refusal(f"{refusal.place}: {refusal.reason}", pointer(path)) from refusal
        self.lines += lines
        return first

    def _read(self, form: Mapping[str, Any], name: str, path: tuple[str | int, ...]) -> str:
        """A regex or a grammar, as long as all of them are short enough."""
        text = str(_field(form, name, str, path))
        self.characters += len(text)
        if self.characters > MOST_CHARACTERS["grammar"]:
            raise Refusal(
                f"the regexes and grammars up to here have {self.characters:,} characters; at most "
                f"{MOST_CHARACTERS['grammar']:,} are read",
                pointer((*path, name)),
            )
        return text

    def _token(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return self._parts([self._token_id(form, path)])

    def _optional(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return f"({self._inner(form, path)})?"

    def _star(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return f"({self._inner(form, path)})*"

    def _plus(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return f"({self._inner(form, path)})+"

    def _repeat(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        low, high = (_field(form, name, int, path) for name in ("min", "max"))
        if low < 0 or (high != -1 and high < low):
            raise Refusal(f"from {low} to {high} times can't be", pointer(path))
        return f"({self._inner(form, path)}){{{low},{'' if high == -1 else high}}}"

    def _inner(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return self.write(form.get("content"), (*path, "content"), None)

    def _or(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        elements = _field(form, "elements", Sequence, path)
        options = [self.write(one, (*path, "elements", i), None) for i, one in enumerate(elements)]
        if not options:
            raise Refusal("one of nothing can't be chosen", pointer(path))
        return f"({' | '.join(options)})"

    def _sequence(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], ends: list[list[Part]] | None
    ) -> str:
        elements = _field(form, "elements", Sequence, path)
        written = []
        for i, one in enumerate(elements):
            place, last = (*path, "elements", i), i == len(elements) - 1
            kind = one.get("type") if isinstance(one, Mapping) else None
            if kind in _OPEN and not last:
                raise Refusal(f"{kind} has no end here: put it last, or into a tag", pointer(place))
            written.append(self.write(one, place, ends if last else None))
        if not elements and ends is not None:
            written.append(self._ends(ends))
        return f"({' '.join(written)})" if written else '""'

    def _tag(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return f"{self._parts(self._begin(form, path))} {self._after_begin(form, path)}"

    def _begin(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> list[Part]:
        return self._marker(form.get("begin"), (*path, "begin"))

    def _after_begin(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        end = form.get("end")
        many = end if isinstance(end, list) else [end]
        ends = [self._marker(one, (*path, "end")) for one in many]
        if not ends:
            raise Refusal("a tag needs an end; it may be an empty text", pointer((*path, "end")))
        return self.write(form.get("content"), (*path, "content"), ends)

    def _any_text(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], ends: list[list[Part]] | None
    ) -> str:
        excluded = _field(form, "excludes", list, path, default=[])
        if not all(isinstance(one, str) and one for one in excluded):
            raise Refusal("excludes must be a list of texts", pointer((*path, "excludes")))
        return self._until(ends, excluded)

    def _until(self, ends: list[list[Part]] | None, excluded: Sequence[str] = ()) -> str:
        """Any text up to the first of the ends, or of any length."""
        text = f"/{_TEXT}/"
        if excluded:
            words = "|".join(_quoted(one) for one in excluded)
            text += f" & ~/{_TEXT}(?:{words}){_TEXT}/"
        if ends is None or any(one == [] for one in ends):
            return self._terminal(text)
        options = []
        for end in ends:
            if isinstance(end[0], int):
                options.append(f"{self._terminal(text)} {self._parts(end)}")
            else:
                options.append(f"{self._lazy(end[0], text)} {self._parts(end[1:])}")
        return f"({' | '.join(options)})"

    def _triggered_tags(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], ends: list[list[Part]] | None
    ) -> str:
        triggers = _field(form, "triggers", list, path)
        if len(triggers) > MOST_TRIGGERS:
            raise Refusal(
                f"{len(triggers):,} triggers; at most {MOST_TRIGGERS} can be compiled in time",
                pointer((*path, "triggers")),
            )
        if form.get("excludes"):
            raise Refusal("excludes can't be followed here", pointer((*path, "excludes")))
        at_once, later = self._tags(form, path, triggers)
        first, only_one = (
            _field(form, name, bool, path, default=False)
            for name in ("at_least_one", "stop_after_first")
        )
        close = self._until(ends)
        if only_one:
            after = "" if ends is None else self._ends(ends)
            return f"({at_once} {after})" if first else f"({later} {after} | {close})"
        return f"({at_once} {later}* {close})" if first else f"({later}* {close})"

    def _tags(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], triggers: list[Any]
    ) -> tuple[str, str]:
        """The tags where one must begin, and after text that ends with a trigger."""
        at_once, later = [], []
        for i, tag in enumerate(_field(form, "tags", Sequence, path)):
            place = (*path, "tags", i)
            self._check_tag(tag, place)
            begin = self._begin(tag, place)
            rest = self._rule(self._after_begin(tag, place))
            at_once.append(f"{self._parts(begin)} {rest}")
            if begin and isinstance(begin[0], int):
                later.append(f"TEXT {self._parts(begin)} {rest}")
                continue
            name = str(begin[0]) if begin else ""
            fitting = [
                one for one in triggers if isinstance(one, str) and one and name.startswith(one)
            ]
            if len(fitting) != 1:
                raise Refusal(
                    f"{len(fitting)} of the triggers stand at the beginning of {name!r}, and one "
                    "must",
                    pointer((*place, "begin")),
                )
            after = [name[len(fitting[0]) :], *begin[1:]]
            later.append(f"{self._lazy(fitting[0])} {self._parts(after)} {rest}")
        if not later:
            raise Refusal("there are no tags", pointer((*path, "tags")))
        return f"({' | '.join(at_once)})", f"({' | '.join(later)})"

    def _tags_with_separator(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        separator = self._parts(self._pieces(_field(form, "separator", str, path)))
        tags = []
        for i, tag in enumerate(_field(form, "tags", Sequence, path)):
            self._check_tag(tag, (*path, "tags", i))
            tags.append(self._tag(tag, (*path, "tags", i)))
        if not tags:
            raise Refusal("there are no tags", pointer((*path, "tags")))
        one = self._rule(" | ".join(tags))
        first, only_one = (
            _field(form, name, bool, path, default=False)
            for name in ("at_least_one", "stop_after_first")
        )
        body = one if only_one else f"{one} ({separator} {one})*"
        return f"({body})" if first else f"({body})?"

    def _check_tag(self, tag: Any, path: tuple[str | int, ...]) -> None:
        if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
            raise Refusal("a tag must be here", pointer(path))
        _known(tag, ("type", *_FIELDS["tag"]), path)

    def _marker(self, value: Any, path: tuple[str | int, ...]) -> list[Part]:
        """What stands at a tag's beginning or end."""
        if isinstance(value, Mapping) and value.get("type") == "token":
            _known(value, ("type", "token"), path)
            return [self._token_id(value, path)]
        if not isinstance(value, str):
            raise Refusal("a text or a token must be here", pointer(path))
        return self._pieces(value)

    def _token_id(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> int:
        token = form.get("token")
        found = self.special.get(token) if isinstance(token, str) else token
        if isinstance(found, bool) or not isinstance(found, int) or not self.vocabulary.has(found):
            raise Refusal(f"the model has no token {token!r}", pointer((*path, "token")))
        return found

    def _pieces(self, text: str) -> list[Part]:
        """A text, cut at the names of special tokens."""
        parts = self.split.split(text) if self.split else [text]
        return [self.special.get(part, part) for part in parts if part]

    def _parts(self, parts: Sequence[Part]) -> str:
        written = [
            f"<[{one}]>" if isinstance(one, int) else lark.literal(one)
            for one in parts
            if one != ""
        ]
        return " ".join(written)

    def _ends(self, ends: list[list[Part]]) -> str:
        return f"({' | '.join(self._parts(one) or chr(34) * 2 for one in ends)})"

    def _rule(self, body: str) -> str:
        self.lines.append(f"p{len(self.lines)}: {body}")
        return f"p{len(self.lines) - 1}"

    def _terminal(self, body: str) -> str:
        self.lines.append(f"P{len(self.lines)}: {body}")
        return f"P{len(self.lines) - 1}"

    def _lazy(self, word: str, text: str = "TEXT") -> str:
        before = text if text == "TEXT" else self._terminal(text)
        self.lines.append(f"l{len(self.lines)}[lazy]: {before} {lark.literal(word)}")
        return f"l{len(self.lines) - 1}"


def _quoted(text: str) -> str:
    """A text as a regex between slashes."""
    return "".join(
        one if one.isascii() and one.isalnum() else f"\\u{{{ord(one):X}}}" for one in text
    )


def _known(form: Mapping[str, Any], names: tuple[str, ...], path: tuple[str | int, ...]) -> None:
    for name in form:
        if name not in names:
            raise Refusal(
                f"{name!r} can't be followed; known are {', '.join(names)}", pointer(path)
            )


def _field(
    form: Mapping[str, Any],
    name: str,
    kind: Any,
    path: tuple[str | int, ...],
    default: Any = None,
) -> Any:
    value = form.get(name, default)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if not fits or (kind is Sequence and isinstance(value, str)):
        wanted = {str: "a text", int: "a whole number", bool: "true or false", Mapping: "an object"}
        raise Refusal(f"{name} must be {wanted.get(kind, 'a list')}", pointer((*path, name)))
    return value
