"""How one request's tools and reasoning are dealt with: chosen from its template and its offer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ChatTemplateError
from penstock.server.config import ServerConfig
from penstock.server.errors import ApiError
from penstock.server.tools import forms
from penstock.server.tools.events import Begin, Broken, End, Event, Text
from penstock.server.tools.families import (
    HERMES,
    REASONING_PARSERS,
    TOOL_PARSERS,
    Family,
    family_of,
    tags_of,
)
from penstock.server.tools.offer import Offer
from penstock.server.tools.plain import PlainReader, SpecialFilter
from penstock.server.tools.reader import CallReader
from penstock.server.tools.reasoning import ThinkReader, ThinkTags
from penstock.server.tools.telling import Telling
from penstock.tokenizer import Tokenizer
from penstock.tokenizer.tool_calls import writes_calls, writes_system


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one request. hidden: special tokens that an answer doesn't show although it has them."""

    family: Family
    offer: Offer
    tags: ThinkTags | None
    telling: Telling
    hidden: tuple[str, ...] = ()
    sees_special: bool = False

    @property
    def reads(self) -> bool:
        """Whether an answer's text is anything but its content."""
        return self.offer.active or self.tags is not None or self.family.thinks

    def answer(self, inside: bool) -> AnswerReader:
        """A reader of one answer. inside: of reasoning, which the prompt has opened."""

        def calls() -> CallReader:
            if self.offer.active or self.family.thinks:
                return self.family.reader(self.offer.schemas)
            return PlainReader()

        reader: CallReader | ThinkReader
        tags = self.tags
        reader = calls() if tags is None else ThinkReader(tags, inside, calls(), calls())
        return AnswerReader(reader, SpecialFilter(self.hidden), self.offer.parallel)


class AnswerReader:
    """Turns an answer's text into events; not more than one call where only one may be made."""

    def __init__(
        self, reader: CallReader | ThinkReader, hidden: SpecialFilter, parallel: bool
    ) -> None:
        self._reader = reader
        self._hidden = hidden
        self._parallel = parallel
        self._whole = 0  # calls
        self._leaving_out = False

    def feed(self, text: str) -> list[Event]:
        """What is known now."""
        return list(self._allowed(self._reader.feed(self._hidden.feed(text))))

    def finish(self) -> list[Event]:
        """The text has ended: what was held back."""
        events = self._reader.feed(self._hidden.feed("", ended=True))
        return list(self._allowed(events + self._reader.finish()))

    def _allowed(self, events: list[Event]) -> Iterator[Event]:
        for event in events:
            if isinstance(event, Begin):
                self._leaving_out = self._whole > 0 and not self._parallel
            if not self._leaving_out:
                self._whole += isinstance(event, End)
                yield event
            elif isinstance(event, End | Broken):
                self._leaving_out = False
                if isinstance(event, Broken):  # no call, but a part of the answer
                    yield Text(event.text)


class Tooling:
    """What a server knows of its model's tools and reasoning."""

    def __init__(self, tokenizer: Tokenizer | None, config: ServerConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        ids = () if tokenizer is None else sorted(tokenizer.special_ids)
        names = [tokenizer.id_to_token(x) for x in ids] if tokenizer is not None else []
        self._special = frozenset(name for name in names if name)

    def plan(self, chat_template: str | None, offer: Offer) -> Plan:
        """For a request with this template and offer. Raises ApiError."""
        self._check_allowed(offer)
        source = self._source(chat_template, offer)
        family, known = self._family(source)
        tags = None if family.thinks else self._tags(source)
        marks = set(family.marks) if offer.active or family.thinks else set()
        if tags is not None:
            marks |= {tags.open, tags.close}
        special = bool(marks & self._special)
        return Plan(
            family,
            offer,
            tags,
            self._telling(source, offer, family, known, chat_template),
            tuple(sorted(self._special - marks)) if special else (),
            special,
        )

    def describe(self) -> dict[str, str]:
        """What was chosen for the model's own template, for the log."""
        source = self._source(self._config.chat_template, Offer())
        family, known = self._family(source)
        tags = self._tags(source)
        thinks = "channels" if family.thinks else "none" if tags is None else tags.open
        return {
            "tools": family.name if known else f"{family.name}, told by us",
            "reasoning": thinks,
        }

    @property
    def reasons(self) -> bool:
        """Whether the model reasons, by the server's own template."""
        return self.describe()["reasoning"] != "none"

    def _check_allowed(self, offer: Offer) -> None:
        if offer.active and offer.mode == "auto" and not self._config.enable_auto_tool_choice:
            raise ApiError(
                400,
                "tool_choice is 'auto', which this server was told not to take "
                "(--no-enable-auto-tool-choice). Send 'required', 'none' or a function's name.",
                param="tool_choice",
            )

    def _source(self, chat_template: str | None, offer: Offer) -> str:
        if self._tokenizer is None:
            return ""
        made = self._tokenizer.template_source(chat_template, has_tools=offer.active)
        return made or ""

    def _family(self, source: str) -> tuple[Family, bool]:
        """(the family, whether the template's own form is the family's)."""
        chosen = self._config.tool_call_parser
        if chosen != "auto":
            return TOOL_PARSERS[chosen], True
        found = family_of(source)
        return (HERMES, False) if found is None else (found, True)

    def _tags(self, source: str) -> ThinkTags | None:
        chosen = self._config.reasoning_parser
        return tags_of(source) if chosen == "auto" else REASONING_PARSERS[chosen]

    def _telling(
        self, source: str, offer: Offer, family: Family, known: bool, chat_template: str | None
    ) -> Telling:
        written = bool(source) and writes_calls(source)
        form = family.form if family.form.arguments == "json" else forms.HERMES
        foreign = offer.active and not known
        history = None if written and not foreign else form
        if not offer.active:
            return Telling(history=history)
        tools = tuple(function.for_template() for function in offer.functions)
        if known and self._reads_tools(chat_template):
            return Telling(tools, history=history, size=offer.size)
        told = forms.instructions(tools, form)
        return Telling((), told, writes_system(source), history, offer.size)

    def _reads_tools(self, chat_template: str | None) -> bool:
        assert self._tokenizer is not None  # or there was no template
        try:
            source = self._tokenizer.template_source(chat_template, has_tools=True)
            return "tools" in self._tokenizer.template_variables(source)
        except ChatTemplateError:  # which will say so when it is rendered
            return True
