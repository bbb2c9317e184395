"""What is found in a model's text, in the order in which it is found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """A part of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of what was thought before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """A call of a tool begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of the arguments, which together are a JSON object."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The call that began last is whole."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The call that began last isn't one: this is a part of the answer, as the model wrote it."""

    text: str


Event: TypeAlias = Text | Reasoning | Begin | Arguments | End | Broken


@dataclass(slots=True)
class Call:
    """A whole call. arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclass(slots=True)
class Parsed:
    """A whole output."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def collect(events: Iterable[Event]) -> Parsed:
    """What the events say together."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    name, arguments = "", list[str]()
    for event in events:
        match event:
            case Text(text) | Broken(text):
                content.append(text)
            case Reasoning(text):
                reasoning.append(text)
            case Begin(name):
                arguments = []
            case Arguments(text):
                arguments.append(text)
            case End():
                calls.append(Call(name, "".join(arguments)))
    return Parsed("".join(content), "".join(reasoning), calls)
