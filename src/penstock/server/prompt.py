"""A prompt, where it comes from, and how its conversation is written."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from penstock.engine import Pin
from penstock.models.vision.pictures import Picture
from penstock.server.compaction import Spent
from penstock.server.tools.telling import Telling


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt that is ready for the engine."""

    tokens: list[int]
    text: str | None = None
    dropped: int = 0  # messages that were left out to make it fit
    pins: tuple[Pin, ...] = ()  # of its start, to be kept in the cache
    pictures: tuple[Picture, ...] = ()  # that it has
    spent: Spent | None = None  # on summaries in it
    unpinned: int = 0  # parts to keep whose end can't be found, for the template rewrites them


@dataclass(frozen=True, slots=True)
class Source:
    """Where a prompt comes from, for errors in the words of its endpoint."""

    field: str = "prompt"  # of the request
    shorten: str = "Shorten it"  # what is to be done with one that is too long
    advice: str = ""  # for one that is too long, beside making it shorter
    leaving_out: str = ""  # and where old turns are kept
    generates: bool = True  # so that a token at least must fit behind it
    says_too_long: bool = False  # one that is, in Anthropic's words


_KEEP_END = "truncate_prompt_tokens: -1 to keep its end"
_LEAVE_OUT = ', or send truncation: "auto" to leave out old turns'
COMPLETION = Source("prompt", advice=f", or send {_KEEP_END}")
EMBEDDING = Source("input", advice=f", or send {_KEEP_END}", generates=False)
CHAT = Source("messages", advice=f", or send {_KEEP_END}", leaving_out=_LEAVE_OUT)
RESPONSE = Source("input", leaving_out=_LEAVE_OUT)
ANTHROPIC = Source(
    "messages",
    leaving_out=", or start the server with --truncation auto, which leaves out old turns",
    says_too_long=True,
)
CONVERSATION = Source("messages")


def left_by_compaction(source: Source) -> Source:
    """Where older turns were summed up, or would have been."""
    why = "Only older turns are summed up, and the last one stays as it is: shorten that"
    return replace(source, shorten=why)


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation is written."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    telling: Telling = field(default_factory=Telling)
