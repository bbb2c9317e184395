"""What the conversations' endpoints share where a request offers tools or its model thinks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

from fastapi import Request

from penstock.sampling import StructuredOutputs
from penstock.server.admission import Ticket
from penstock.server.answers import unheeded
from penstock.server.called import Called
from penstock.server.conversation import Prompts
from penstock.server.errors import ApiError
from penstock.server.prompt import PromptText, Rendering
from penstock.server.protocol.chat import Message
from penstock.server.routes.common import service_of
from penstock.server.service import Service
from penstock.server.tools import harmony
from penstock.server.tools.constraint import (
    Part,
    behind_analysis,
    behind_reasoning,
    calls,
    check_size,
    constrains,
    shut,
    structured,
    text_or_calls,
)
from penstock.server.tools.events import (
    Arguments,
    Begin,
    Broken,
    Call,
    End,
    Event,
    Reasoning,
    Text,
    collect,
)
from penstock.server.tools.offer import Offer
from penstock.server.tools.plan import AnswerReader, Plan
from penstock.server.tools.reasoning import ThinkTags

_SMALL_BYTES = 1 << 11  # of a body: the tools in it are read in less time than a thread takes
_LARGE_BYTES = 1 << 15  # of a body: what it asks for is written out beside the event loop
_LOOSE_S = 5.0  # for finding out which schemas can't be followed
_TAIL_TOKENS = 16  # of a prompt, in which the opening tag of reasoning may stand


@dataclass(frozen=True, slots=True)
class Answering:
    """How a request's answers are read. inside: of reasoning, which the prompt has opened;
    shows_reasoning: or leaves it out."""

    plan: Plan
    inside: bool
    called: Called
    request_id: str
    shows_reasoning: bool = True

    def check(self, call: Call) -> None:
        """A call is whole: it is looked at beside the event loop."""
        function = next((x for x in self.plan.offer.callable if x.name == call.name), None)
        if function is not None:
            self.called.check(self.request_id, function, call.arguments)

    def reader(self) -> AnswerReader:
        """Of one answer."""
        return self.plan.answer(self.inside)


class Offering(Protocol):
    """A request that may offer tools."""

    def offer(self) -> Offer:
        """What may be called. Raises ApiError."""


async def plan_of(request: Request, ticket: Ticket, rendering: Rendering, body: Offering) -> Plan:
    """How tools are told of and read, found out beside the event loop. Raises ApiError."""
    service = service_of(request)
    template, own = rendering.chat_template, service.config.chat_template

    def plan() -> Plan:
        return service.tooling.plan(template, body.offer())

    if template is own and ticket.size <= _SMALL_BYTES:  # a template that was looked at before
        return plan()
    return await service.compute(ticket, plan, slow=template is not own)


def telling(rendering: Rendering, plan: Plan) -> Rendering:
    """The rendering with what is told of tools."""
    return replace(rendering, telling=plan.telling)


def answering(
    service: Service,
    ticket: Ticket,
    plan: Plan,
    prompt: PromptText,
    goes_on: Message | None = None,
    *,
    skips_special: bool = True,
) -> Answering:
    """How answers to a prompt are read.

    goes_on: the last message, where it is to be continued; skips_special: tokens in an answer.
    """
    if not skips_special:
        plan = replace(plan, hidden=())
    inside = _is_inside(service.prompts, plan.tags, prompt, goes_on)
    return Answering(plan, inside, service.called, ticket.caller.request_id)


def _is_inside(
    prompts: Prompts, tags: ThinkTags | None, prompt: PromptText, goes_on: Message | None
) -> bool:
    """Whether the answer begins within reasoning."""
    if tags is None:
        return False
    if goes_on is not None:
        return tags.left_open("".join(text for text, _ in goes_on.passages()))
    tail = prompt.text
    if tail is None:
        ids = prompt.tokens[-_TAIL_TOKENS:]
        tail = prompts.tokenizer.decode(ids, skip_special_tokens=False)
    return tags.opened_by(tail)


async def sampling_of(
    service: Service,
    ticket: Ticket,
    how: Answering,
    structure: Callable[[], tuple[StructuredOutputs | None, str]],
) -> dict[str, Any]:
    """The sampling parameters that follow: the form of the answer, and what text it shows.

    structure: the form that the request asks for itself, and its field. Raises ApiError.
    """
    large = ticket.size > _LARGE_BYTES
    asked, field = await service.compute(ticket, structure) if large else structure()
    chosen: dict[str, Any] = {}
    if how.plan.sees_special:
        chosen["skip_special_tokens"] = False
    make = _form(how, asked, field)
    if make is not None:
        chosen["structured_outputs"] = await _compiled(service, ticket, how.plan.offer, make)
    elif asked is not None:
        await service.compile(ticket, asked, field)
        chosen["structured_outputs"] = asked
    return chosen


def _form(
    how: Answering, asked: StructuredOutputs | None, field: str
) -> Callable[[Collection[str]], Part] | None:
    """The answer's form as a structural tag, if it needs one; of the tools with loose schemas."""
    plan, offer = how.plan, how.plan.offer
    form = plan.family.form
    content = None if asked is None else _content(asked)
    if not constrains(offer):
        thinks = plan.tags is not None or plan.family.thinks
        if asked is None or not (offer.active or thinks):
            return None
        if content is None and not offer.active:
            return None
    if offer.mode == "required" and offer.active and asked is not None:
        unheeded(field)  # a call must be made, whose form its tool decides: so does vLLM
        asked = content = None
    if offer.mode == "auto" and offer.active and asked is not None and content is None:
        raise ApiError(
            400,
            f"{field} of this kind leaves no room for calls of tools. Send a JSON schema or a "
            "regex, tool_choice: 'none', or no tools.",
            param=field,
        )

    offered = cache(lambda: shut(offer))

    def make(loose: Collection[str]) -> Part:
        offer = offered()
        check_size(form, offer)
        if offer.active and offer.mode == "required":
            part = calls(form, offer, loose)
        elif content is not None and offer.active:
            part = {"type": "or", "elements": [calls(form, offer, loose), _final(plan, content)]}
        elif content is not None:
            part = _final(plan, content)
        elif plan.family.thinks:  # a call has a message of its own
            free = {*loose, *(x.name for x in offer.callable if not x.strict)}
            said = _final(plan, {"type": "any_text"})
            part = {"type": "or", "elements": [calls(form, offer, free), said]}
        else:
            part = text_or_calls(form, offer, loose)
        if plan.family.thinks:
            before = f"{harmony.CHANNEL}analysis{harmony.MESSAGE}"
            after = f"{harmony.END}{harmony.START}assistant"
            return behind_analysis(part, before, after)
        return behind_reasoning(part, plan.tags, how.inside)

    return make


def _content(asked: StructuredOutputs) -> Part | None:
    """A form as a part of a structural tag, or None for one that isn't."""
    if asked.disable_any_whitespace or asked.whitespace_pattern is not None:
        return None
    if asked.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if asked.kind == "regex":
        return {"type": "regex", "pattern": asked.text}
    return (
        None
        if asked.kind != "json"
        else {"type": "json_schema", "json_schema": json.loads(asked.text)}
    )


def _final(plan: Plan, content: Part) -> Part:
    if not plan.family.thinks:
        return content
    begin = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
    return {"type": "tag", "begin": begin, "content": content, "end": ""}


async def _compiled(
    service: Service, ticket: Ticket, offer: Offer, make: Callable[[Collection[str]], Part]
) -> StructuredOutputs:
    """The form, in which what can't be held to its schema is any object, unless it is strict."""

    async def compiled(loose: Collection[str]) -> StructuredOutputs:
        form = await service.compute(ticket, lambda: structured(make(loose)), slow=True)
        await service.compile(ticket, form, "tools")
        return form

    try:
        return await compiled(())
    except ApiError as error:
        loose = await _loose(service, ticket, offer)
        if not loose:
            raise error
    return await compiled(loose)


async def _loose(service: Service, ticket: Ticket, offer: Offer) -> set[str]:
    """Tools whose schemas can't be followed, or not be compiled in time.

    Raises ApiError for one that is strict.
    """
    loose = set()
    end = time.monotonic() + _LOOSE_S
    for function in offer.callable if offer.active else ():
        parameters = function.parameters
        if not parameters:
            continue
        if not function.strict and time.monotonic() > end:
            loose.add(function.name)
            continue
        place = f"{function.place}.{function.schema_field}"
        try:
            alone = await service.compute(ticket, partial(_object_of, parameters), slow=True)
            await service.compile(ticket, alone, place)
        except ApiError as error:
            if function.strict:
                said = error.message.replace("structured_outputs.json", place)
                raise ApiError(
                    400, said, param=place, code="invalid_function_parameters"
                ) from error
            loose.add(function.name)
    return loose


def _object_of(parameters: dict[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(json={"type": "object", **parameters})


class Calls:
    """Turns an answer's events into OpenAI's deltas of a message."""

    def __init__(self, how: Answering) -> None:
        self._how = how
        self._reader = how.reader()
        self._new_id = how.plan.family.new_id
        self._begun = -1  # index of the call that began last
        self._name, self._arguments = "", list[str]()  # of that call
        self.ended = set[int]()  # indices of calls that are whole

    def deltas(self, text: str, ended: bool) -> list[dict[str, Any]]:
        """Of new text; several, where they can't be one."""
        events = self._reader.feed(text)
        if ended:
            events += self._reader.finish()
        made: list[dict[str, Any]] = []
        for event in events:
            delta = self._delta(event)
            if delta is None:
                continue
            if made and _joined(made[-1], delta):
                continue
            made.append(delta)
        return made

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Text(text) | Broken(text):
                return {"content": text}
            case Reasoning(text) if self._how.shows_reasoning:
                return {"reasoning_content": text, "reasoning": text}
            case Begin(name):
                self._begun += 1
                self._name, self._arguments = name, []
                function = {"name": name, "arguments": ""}
                call = {"index": self._begun, "id": self._new_id(), "type": "function"}
                return {"tool_calls": [call | {"function": function}]}
            case Arguments(text):
                self._arguments.append(text)
                call = {"index": self._begun, "function": {"arguments": text}}
                return {"tool_calls": [call]}
            case End():
                self.ended.add(self._begun)
                self._how.check(Call(self._name, "".join(self._arguments)))
        return None


def in_older_words(said: dict[str, Any]) -> dict[str, Any]:
    """A message or a delta as the API had it for `functions`: one call, without an id."""
    if "tool_calls" not in said:
        return said
    function = said["tool_calls"][0]["function"]
    kept = {name: value for name, value in said.items() if name != "tool_calls"}
    return {**kept, "function_call": function}


def _joined(last: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Whether more arguments of the same call were put into the delta before."""
    if "tool_calls" not in last or "tool_calls" not in delta:
        return False
    (before,), (call,) = last["tool_calls"], delta["tool_calls"]
    if "id" in call or "id" in before or before["index"] != call["index"]:
        return False
    before["function"]["arguments"] += call["function"]["arguments"]
    return True


def message_of(text: str, how: Answering) -> tuple[dict[str, Any], bool]:
    """(a whole answer as OpenAI's message, whether it calls)."""
    if not how.plan.reads:
        return {"role": "assistant", "content": text, "refusal": None}, False
    reader = how.reader()
    found = collect(reader.feed(text) + reader.finish())
    empty = not found.content and bool(found.calls or found.reasoning)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if empty else found.content,
        "refusal": None,
    }
    if found.reasoning and how.shows_reasoning:
        message |= {"reasoning_content": found.reasoning, "reasoning": found.reasoning}
    for call in found.calls:
        how.check(call)
    if found.calls:
        message["tool_calls"] = [
            {
                "id": how.plan.family.new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in found.calls
        ]
    return message, bool(found.calls)
