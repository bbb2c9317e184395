"""Structural tags: free text in which certain words begin a part that follows a schema.

Both of vLLM's forms are read: the older one, `structures` and `triggers`, and the newer `format`, a
tree of parts as xgrammar documents it. Either becomes one Lark grammar: text before a trigger is a
lazy lexeme, which ends where the trigger first stands. Regexes, and what stands beside them and is
regular too, become one lexeme, which a tag's end ends where it first can. A special token's name
within `begin`, `end` or a trigger stands for that token, the only way in which one may come.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.grammar import gbnf, lark, lexemes, schema
from penstock.grammar.ahead import NOTHING, Ahead, Part
from penstock.grammar.lexemes import First
from penstock.grammar.refusal import Refusal, pointer
from penstock.grammar.tag_fields import TEXT, field, known, never_first, texts, without
from penstock.grammar.vocabulary import Vocabulary
from penstock.sampling.structured import MOST_CHARACTERS

MOST_NESTED: Final = 50
MOST_PARTS: Final = 3_000
MOST_TRIGGERS: Final = 500  # each tag's beginning is held against every one
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema", "style", "any_order", "any_whitespace"),
    "regex": ("pattern", "also", "excludes"),
    "grammar": ("grammar",),
    "any_text": ("excludes", "never_first"),
    "sequence": ("elements",),
    "or": ("elements",),
    "optional": ("content",),
    "star": ("content",),
    "plus": ("content",),
    "repeat": ("min", "max", "content"),
    "tag": ("begin", "content", "end"),
    "token": ("token",),
    "triggered_tags": (
        "triggers",
        "tags",
        "at_least_one",
        "stop_after_first",
        "excludes",
        "never_first",
    ),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
_OPEN: Final = ("any_text", "triggered_tags")
"""Parts whose text ends only where something else says so."""


def to_lark(document: Mapping[str, Any], vocabulary: Vocabulary) -> str:
    """The grammar of a structural tag. Raises Refusal with the place."""
    builder = _Builder(vocabulary)
    if "structures" in document:
        form, path = _older(document), tuple[str | int, ...]()
    else:
        known(document, ("type", "format"), ())
        form, path = field(document, "format", Mapping, ()), ("format",)
    body = builder.write(form, path, None, NOTHING)
    return "\n".join([f"start: {body}", f"TEXT: /{TEXT}/", *builder.lines, ""])


def _older(document: Mapping[str, Any]) -> dict[str, Any]:
    """The first form in terms of the second."""
    known(document, ("type", "structures", "triggers"), ())
    tags = []
    for i, one in enumerate(field(document, "structures", Sequence, ())):
        path = ("structures", i)
        if not isinstance(one, Mapping):
            raise Refusal("an object with begin, schema and end must be here", pointer(path))
        known(one, ("begin", "schema", "end"), path)
        content = {"type": "json_schema", "json_schema": one.get("schema", {})}
        begin, end = (field(one, name, str, path) for name in ("begin", "end"))
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    triggers = field(document, "triggers", Sequence, ())
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


class _Builder:
    """Writes parts as Lark, from the outside in."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.lines: list[str] = []
        self.terminals: list[str] = []  # of them, those that a regex may name
        self.count = self.characters = 0
        self.within = False  # a terminal
        self.follow = NOTHING  # what may come behind the part that is being written
        self.ahead = Ahead(self._pieces, self._body)
        names = {vocabulary.tokenizer.id_to_token(i): i for i in sorted(vocabulary.special_ids)}
        self.special = {name: i for name, i in names.items() if name and vocabulary.has(i)}
        longest = sorted(self.special, key=len, reverse=True)
        self.split = re.compile("(" + "|".join(map(re.escape, longest)) + ")") if longest else None

    def write(
        self,
        form: Any,
        path: tuple[str | int, ...],
        ends: list[list[Part]] | None,
        follow: First,
    ) -> str:
        """A part, and with `ends` what closes it: then one of them is a piece of it.

        follow: how what stands behind all of that may begin.
        """
        before, self.follow = self.follow, follow
        try:
            return self._write(form, path, ends)
        finally:
            self.follow = before

    def _write(self, form: Any, path: tuple[str | int, ...], ends: list[list[Part]] | None) -> str:
        if len(path) > 2 * MOST_NESTED:
            raise Refusal(f"more than {MOST_NESTED} parts lie within each other", pointer(path[:4]))
        self.count += 1
        if self.count > MOST_PARTS:
            raise Refusal(
                f"more than {MOST_PARTS:,} parts can't be compiled in time", pointer(path)
            )
        kind = field(form, "type", str, path) if isinstance(form, Mapping) else None
        if kind not in _FIELDS:
            listed = ", ".join(_FIELDS)
            raise Refusal(f"the type {kind!r} can't be followed; known are {listed}", pointer(path))
        known(form, ("type", *_FIELDS[kind]), path)
        if (
            kind not in ("const_string", "sequence")
            and not self.within
            and self.ahead.regular(form)
        ):
            self.count -= 1  # which is counted there
            return self._lexeme([(form, path)], ends)
        if kind in _OPEN:
            return getattr(self, f"_{kind}")(form, path, ends)  # type: ignore[no-any-return]
        if kind == "sequence":
            return self._sequence(form, path, ends)
        body = str(getattr(self, f"_{kind}")(form, path))
        return body if ends is None else f"{body} {self._ends(ends)}"

    def _lexeme(
        self,
        parts: Sequence[tuple[Any, tuple[str | int, ...]]],
        ends: list[list[Part]] | None,
    ) -> str:
        """Regular parts as one terminal; what closes them ends it where it first can."""
        self.within = True
        body = " ".join(self.write(one, place, None, NOTHING) for one, place in parts)
        self.within = False
        place = parts[-1][1]
        if ends is None:
            return self._greedy(body, place)
        options, text = [], ""
        for end in ends:
            if not end:
                options.append(self._greedy(body, place))
            elif isinstance(end[0], int):
                text = text or self._terminal(body)
                options.append(f"{text} {self._parts(end)}")
            else:
                text = text or self._terminal(body)
                options.append(f"{self._lazy(end[0], text)} {self._parts(end[1:])}")
        return f"({' | '.join(options)})"

    def _greedy(self, body: str, path: tuple[str | int, ...]) -> str:
        """A terminal that is as long as it can be. Raises Refusal where that may be too long."""
        if lexemes.takes_more(body, tuple(self.terminals), self.follow):
            raise Refusal(
                "what it matches may go on with what the part behind it begins with, which then "
                "never comes: let it match less, or put it into a tag whose end is a text",
                pointer(path),
            )
        return self._terminal(body)

    def _body(self, form: Any) -> tuple[str, tuple[str, ...]]:
        """A regular part within a terminal, and the terminals that it names; nothing is kept."""
        scratch = copy.copy(self)
        scratch.lines, scratch.terminals, scratch.within = [], [], True
        return scratch.write(form, (), None, NOTHING), tuple(scratch.lines)

    def _const_string(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return self._parts(self._pieces(field(form, "value", str, path))) or lark.literal("")

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
        free = field(form, "any_whitespace", bool, path, default=True)
        space = schema.Whitespace(schema.WHITESPACE if free else None)
        body = schema.with_options(prepared, space)
        return self._rule(f"%json {json.dumps(body)}")

    def _regex(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        patterns = [self._read(form, "pattern", path)]
        for i, one in enumerate(texts(form, "also", path)):
            patterns.append(self._read({"also": one}, "also", (*path, "also", i)))
        written = " & ".join(map(lark.regex, patterns)) + without(form, path)
        if len(patterns) == 1 and "excludes" not in form:
            return written
        if lexemes.of_regular(written, ()) == (NOTHING, False):
            raise Refusal("no text matches all of it", pointer(path))
        return f"({written})"

    def _grammar(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        text = self._read(form, "grammar", path)
        try:
            first, lines = gbnf.to_rules(text, prefix=f"g{len(self.lines)}_")
        except Refusal as refusal:
            raise Refusal(f"{refusal.place}: {refusal.reason}", pointer(path)) from refusal
        self.lines += lines
        if self.within:
            self.terminals += lines
        return first

    def _read(self, form: Mapping[str, Any], name: str, path: tuple[str | int, ...]) -> str:
        """A regex or a grammar, as long as all of them are short enough."""
        text = str(field(form, name, str, path))
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
        return f"({self._inner(form, path, again=True)})*"

    def _plus(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        return f"({self._inner(form, path, again=True)})+"

    def _repeat(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        low, high = (field(form, name, int, path) for name in ("min", "max"))
        if low < 0 or (high != -1 and high < low):
            raise Refusal(f"from {low} to {high} times can't be", pointer(path))
        inner = self._inner(form, path, again=high != 1)
        if high == 0:
            return lark.literal("")
        return f"({inner}){{{low},{'' if high == -1 else high}}}"

    def _inner(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], again: bool = False
    ) -> str:
        """A part's content. again: which may follow itself."""
        content = form.get("content")
        follow = self.follow
        if again and not self.within:
            follow |= self.ahead.first([content])[0]
        return self.write(content, (*path, "content"), None, follow)

    def _or(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        elements = field(form, "elements", Sequence, path)
        options = [
            self.write(one, (*path, "elements", i), None, self.follow)
            for i, one in enumerate(elements)
        ]
        if not options:
            raise Refusal("one of nothing can't be chosen", pointer(path))
        return f"({' | '.join(options)})"

    def _sequence(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], ends: list[list[Part]] | None
    ) -> str:
        elements = field(form, "elements", Sequence, path)
        written: list[str] = []
        at = 0
        while at < len(elements):
            until = at if self.within else self._run(elements, at)
            last = max(until, at + 1) == len(elements)
            behind = elements[max(until, at + 1) :]
            follow = NOTHING if self.within else self._behind(behind)
            closed = ends if last else None
            if until > at:
                parts = [(elements[i], (*path, "elements", i)) for i in range(at, until)]
                before, self.follow = self.follow, follow
                written.append(self._lexeme(parts, closed))
                self.follow = before
                at = until
                continue
            one, place = elements[at], (*path, "elements", at)
            kind = one.get("type") if isinstance(one, Mapping) else None
            if kind in _OPEN and not last:
                raise Refusal(f"{kind} has no end here: put it last, or into a tag", pointer(place))
            written.append(self.write(one, place, closed, follow))
            at += 1
        if not elements and ends is not None:
            written.append(self._ends(ends))
        return f"({' '.join(written)})" if written else '""'

    def _run(self, elements: Sequence[Any], at: int) -> int:
        """Up to where the parts from here on are one lexeme; texts alone need none."""
        until = at
        while until < len(elements) and self.ahead.regular(elements[until]):
            until += 1
        constant = all(one["type"] == "const_string" for one in elements[at:until])
        return at if constant else until

    def _behind(self, parts: Sequence[Any]) -> First:
        """How what comes may begin: these parts, and what comes behind them."""
        first, empty = self.ahead.first(parts)
        return first | self.follow if empty else first

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
        texts = [str(one[0]) for one in ends if one and isinstance(one[0], str)]
        follow = NOTHING.union(*map(lexemes.of_text, texts))
        if [] in ends:
            follow |= self.follow
        return self.write(form.get("content"), (*path, "content"), ends, follow)

    def _any_text(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], ends: list[list[Part]] | None
    ) -> str:
        return self._until(ends, without(form, path) + never_first(form, path))

    def _until(self, ends: list[list[Part]] | None, but: str = "") -> str:
        """Any text up to the first of the ends, or of any length. but: what it isn't, in Lark."""
        text = self._terminal(f"/{TEXT}/{but}")
        if ends is None or any(one == [] for one in ends):
            return text
        options = []
        for end in ends:
            if isinstance(end[0], int):
                options.append(f"{text} {self._parts(end)}")
            else:
                options.append(f"{self._lazy(end[0], text)} {self._parts(end[1:])}")
        return f"({' | '.join(options)})"

    def _triggered_tags(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], ends: list[list[Part]] | None
    ) -> str:
        triggers = field(form, "triggers", list, path)
        if len(triggers) > MOST_TRIGGERS:
            raise Refusal(
                f"{len(triggers):,} triggers; at most {MOST_TRIGGERS} can be compiled in time",
                pointer((*path, "triggers")),
            )
        if form.get("excludes"):
            raise Refusal("excludes can't be followed here", pointer((*path, "excludes")))
        never = never_first(form, path)
        start = self._terminal(f"/{TEXT}/{never}") if never else "TEXT"
        at_once, first_one, later = self._tags(form, path, triggers, start)
        first, only_one = (
            field(form, name, bool, path, default=False)
            for name in ("at_least_one", "stop_after_first")
        )
        close = self._until(ends, never if only_one else "")
        if only_one:
            after = "" if ends is None else self._ends(ends)
            return f"({at_once} {after})" if first else f"({first_one} {after} | {close})"
        if first:
            return f"({at_once} {later}* {close})"
        if never:
            return f"({first_one} {later}* {close} | {self._until(ends, never)})"
        return f"({later}* {close})"

    def _tags(
        self, form: Mapping[str, Any], path: tuple[str | int, ...], triggers: list[Any], start: str
    ) -> tuple[str, str, str]:
        """The tags where one must begin, and after text that ends with a trigger: first `start`,
        and any later.
        """
        at_once, first_one, later = list[str](), list[str](), list[str]()
        texts = [one for one in triggers if isinstance(one, str) and one]
        follow = NOTHING.union(*map(lexemes.of_text, texts))
        for i, tag in enumerate(field(form, "tags", Sequence, path)):
            place = (*path, "tags", i)
            self._check_tag(tag, place)
            begin = self._begin(tag, place)
            before, self.follow = self.follow, self.follow | follow
            rest = self._rule(self._after_begin(tag, place))
            self.follow = before
            at_once.append(f"{self._parts(begin)} {rest}")
            if begin and isinstance(begin[0], int):
                after = f"{self._parts(begin)} {rest}"
                first_one.append(f"{start} {after}")
                later.append(f"TEXT {after}")
                continue
            name = str(begin[0]) if begin else ""
            fitting = [one for one in texts if name.startswith(one)]
            if len(fitting) != 1:
                raise Refusal(
                    f"{len(fitting)} of the triggers stand at the beginning of {name!r}, and one "
                    "must",
                    pointer((*place, "begin")),
                )
            after = f"{self._parts([name[len(fitting[0]) :], *begin[1:]])} {rest}"
            later.append(f"{self._lazy(fitting[0], 'TEXT')} {after}")
            if start != "TEXT":
                first_one.append(f"{self._lazy(fitting[0], start)} {after}")
        if not later:
            raise Refusal("there are no tags", pointer((*path, "tags")))
        lists = (at_once, later if start == "TEXT" else first_one, later)
        written = [f"({' | '.join(one)})" for one in lists]
        return written[0], written[1], written[2]

    def _tags_with_separator(self, form: Mapping[str, Any], path: tuple[str | int, ...]) -> str:
        between = field(form, "separator", str, path)
        separator = self._parts(self._pieces(between))
        listed = field(form, "tags", Sequence, path)
        lead = self.ahead.lead(between)
        before = self.follow
        self.follow |= self.ahead.first_of(form)[0] if lead is None else lead
        tags = []
        for i, tag in enumerate(listed):
            self._check_tag(tag, (*path, "tags", i))
            tags.append(self._tag(tag, (*path, "tags", i)))
        self.follow = before
        if not tags:
            raise Refusal("there are no tags", pointer((*path, "tags")))
        one = self._rule(" | ".join(tags))
        first, only_one = (
            field(form, name, bool, path, default=False)
            for name in ("at_least_one", "stop_after_first")
        )
        body = one if only_one else f"{one} ({separator} {one})*"
        return f"({body})" if first else f"({body})?"

    def _check_tag(self, tag: Any, path: tuple[str | int, ...]) -> None:
        if not isinstance(tag, Mapping) or tag.get("type", "tag") != "tag":
            raise Refusal("a tag must be here", pointer(path))
        known(tag, ("type", *_FIELDS["tag"]), path)

    def _marker(self, value: Any, path: tuple[str | int, ...]) -> list[Part]:
        """What stands at a tag's beginning or end."""
        if isinstance(value, Mapping) and value.get("type") == "token":
            known(value, ("type", "token"), path)
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

    def _lazy(self, word: str, text: str) -> str:
        """A terminal up to where a word first ends it."""
        self.lines.append(f"l{len(self.lines)}[lazy]: {text} {lark.literal(word)}")
        return f"l{len(self.lines) - 1}"
