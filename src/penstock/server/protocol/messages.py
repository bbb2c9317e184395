"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: the requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from penstock.sampling import StructuredOutputs
from penstock.server.answers import unheeded
from penstock.server.compaction import Conversation
from penstock.server.config import LEAST_THRESHOLD
from penstock.server.errors import ApiError
from penstock.server.protocol.blocks import (
    Block,
    ToolChoice,
    ToolDefinition,
    messages_of,
    offer_of_tools,
)
from penstock.server.protocol.chat import Message
from penstock.server.protocol.common import (
    MOST_MESSAGES,
    Body,
    CacheControl,
    Effort,
    EngineFields,
    Some,
    UserName,
)
from penstock.server.protocol.compaction import unsealed
from penstock.server.protocol.pictures import ContentPart
from penstock.server.protocol.structure import TextFormat
from penstock.server.protocol.text_part import TextPart
from penstock.server.protocol.tools import MOST_TOOLS
from penstock.server.tools.offer import Offer
from penstock.server.validation import refusal

_THOUGHTS = ("thinking", "redacted_thinking")
MOST_INSTRUCTIONS = 10_000
"""Characters of what a summary is asked for with."""


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Some[Block]

    def conversation(self) -> list[Message]:
        """The same as a chat's messages. Raises ApiError."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        alone = self.content and all(block.type == "compaction" for block in self.content)
        if alone and self.role == "assistant":
            return []  # without a summary, or it would have been taken for what was before
        return messages_of(self.role, self.content)


class Metadata(Body):
    """Who asks."""

    user_id: UserName | None = None


class OutputConfig(Body):
    """`output_config`: the form of an answer, and how much reasoning is behind it."""

    format: TextFormat | None = None
    effort: Effort | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": ()}


class Thinking(Body):
    """`thinking`: whether the model reasons, where its template can be told."""

    type: Literal["enabled", "adaptive", "disabled"]
    hints: ClassVar[Mapping[str, str]] = {
        "budget_tokens": "thinking.budget_tokens",
        "display": "thinking.display",
    }


class Trigger(Body):
    """When older turns are summed up."""

    type: Literal["input_tokens"]
    value: Annotated[int, Field(ge=LEAST_THRESHOLD)]


class Kept(Body):
    """Of how many of the last turns the reasoning is left."""

    type: Literal["all", "thinking_turns"]
    value: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _has_value(self) -> Kept:
        if (self.type == "all") != (self.value is None):
            raise ValueError("thinking_turns, and nothing else, has a value")
        return self


def _as_object(data: Any) -> Any:
    return {"type": "all"} if data == "all" else data


class ThinkingEdit(Body):
    """An edit of `context_management`: reasoning of earlier turns is left out."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Kept | None, BeforeValidator(_as_object)] = None

    @property
    def turns(self) -> int | None:
        """Of how many of the last turns it is left; None: of all."""
        return 1 if self.keep is None else self.keep.value


class CompactEdit(Body):
    """An edit of `context_management`: older turns are summed up."""

    type: Literal["compact_20260112"]
    trigger: Trigger | None = None
    pause_after_compaction: bool | None = None
    instructions: Annotated[str, Field(min_length=1, max_length=MOST_INSTRUCTIONS)] | None = None


class ToolUsesEdit(Body):
    """An edit of `context_management` that only makes prompts shorter: what it would leave out
    stays, whatever it says."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["clear_tool_uses_20250919"]


_EDITS: dict[str, type[Body]] = {
    "compact_20260112": CompactEdit,
    "clear_thinking_20251015": ThinkingEdit,
}
_MOST_EDITS = 16
_IN_VAIN = "clear_tool_uses_20250919"


def _edits(data: Any) -> Any:
    """One of a kind, and none that another server might know."""
    if not isinstance(data, list):
        return data
    if len(data) > _MOST_EDITS:
        raise ValueError(f"has {len(data):,} entries; at most {_MOST_EDITS} are read")
    kinds = [x.get("type") if isinstance(x, dict) else None for x in data]
    for i, kind in enumerate(kinds):
        if kind == _IN_VAIN:
            unheeded(f"context_management.edits ({kind})")
        elif isinstance(kind, str) and kind not in _EDITS:
            raise refusal(
                kind=f"An edit of type {kind[:40]!r}", why=f"{' and '.join(_EDITS)} are done."
            )
        elif kind in kinds[:i]:
            raise ValueError(f"{kind} is there twice")
    return data


class ContextEdits(Body):
    """`context_management`: what becomes of older turns."""

    edits: Annotated[
        list[Annotated[CompactEdit | ThinkingEdit | ToolUsesEdit, Field(discriminator="type")]],
        BeforeValidator(_edits),
    ]

    @property
    def compaction(self) -> CompactEdit | None:
        """How older turns are summed up; None: they aren't, whatever the server does by itself."""
        return next((x for x in self.edits if isinstance(x, CompactEdit)), None)

    @property
    def pauses(self) -> bool:
        """Whether a message ends with the summary."""
        return self.compaction is not None and bool(self.compaction.pause_after_compaction)

    @property
    def thinking_turns(self) -> int | None:
        """Of how many of the last turns reasoning is left; None: of all."""
        edit = next((x for x in self.edits if isinstance(x, ThinkingEdit)), None)
        return None if edit is None else edit.turns


class CountTokensRequest(Body):
    """`POST /v1/messages/count_tokens`."""

    model: str
    messages: Some[Turn] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: str | Some[TextPart] | None = None
    cache_control: CacheControl | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: TextFormat | None = None  # what output_config.format was called before
    context_management: ContextEdits | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "diagnostics": (),
        "mcp_servers": (),
        "user_profile_id": (),
        "workspace_id": (),
        "speed": ("standard",),
    }

    @model_validator(mode="before")
    @classmethod
    def _no_thread(cls, data: Any) -> Any:
        """In words by which Anthropic's clients know that they must send all messages."""
        if isinstance(data, dict) and data.get("thread") is not None:
            raise ApiError(
                400,
                "'thread' isn't supported by Penstock yet. Send all messages with each request.",
                param="thread",
                code="unsupported_parameter",
                details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
            )
        return data

    @property
    def _system(self) -> str | list[ContentPart]:
        given = self.system or ""
        return (
            given
            if isinstance(given, str)
            else [ContentPart(**part.model_dump(exclude_none=True)) for part in given]
        )

    def conversation(self) -> Conversation:
        """The same as a chat's: from the last compaction on, which stands for all before it but
        the system's messages. Raises ApiError.
        """
        turns = self._turns
        at = _compaction(turns)
        made, opened = [], Conversation([])
        if at is not None:
            number, place = at
            blocks = turns[number].content
            assert not isinstance(blocks, str)
            opened = _opened(blocks[place], f"messages[{number}].content[{place}]")
            before = [x for turn in turns[:number] if turn.role == "system"
                      for x in turn.conversation()]  # fmt: skip
            made = [*(before or opened.system), *opened.others]
            rest = blocks[place + 1 :]
            left = [Turn(role="assistant", content=rest)] if rest else []
            turns = [*left, *turns[number + 1 :]]
        made += [message for turn in turns for message in turn.conversation()]
        if self.cache_control is not None and made:
            made[-1] = made[-1].model_copy(update={"cache_control": self.cache_control})
        return Conversation([*self._told, *made], opened.summary)

    def uncompacted(self) -> Conversation:
        """The same with all that was sent: compactions stand for nothing."""
        made = [message for turn in self.messages for message in turn.conversation()]
        return Conversation([*self._told, *made])

    @property
    def _turns(self) -> list[Turn]:
        """The messages without the reasoning that is to be left out."""
        edits = self.context_management
        left = None if edits is None else edits.thinking_turns
        if left is None:
            return list(self.messages)
        found: list[Turn] = []
        for turn in reversed(self.messages):
            blocks = turn.content
            if isinstance(blocks, str) or not any(b.type in _THOUGHTS for b in blocks):
                found.append(turn)
                continue
            left -= 1
            rest = [b for b in blocks if left >= 0 or b.type not in _THOUGHTS]
            if rest:
                found.append(turn.model_copy(update={"content": rest}))
        return found[::-1]

    @property
    def _told(self) -> list[Message]:
        return [] if self.system is None else [Message(role="system", content=self._system)]

    def sealable(self, conversation: Conversation) -> Conversation:
        """What of a conversation a compaction has to keep: `system` comes with each request."""
        if self.system is None:
            return conversation
        return Conversation(conversation.messages[1:], conversation.summary)

    def structure(self) -> tuple[StructuredOutputs | None, str]:
        """The form that the answer must have, and the field that says so. Raises ApiError."""
        new = None if self.output_config is None else self.output_config.format
        if new is not None and self.output_format is not None:
            raise ApiError(
                400,
                "output_format and output_config.format both say what form the answer has. Leave "
                "out the first.",
                param="output_format",
            )
        field = "output_format" if new is None else "output_config.format"
        asked = self.output_format if new is None else new
        return None if asked is None else asked.structure(field), field

    def offer(self) -> Offer:
        """The tools that may be called. Raises ApiError."""
        blocks = (
            x for turn in self.messages if isinstance(turn.content, list) for x in turn.content
        )
        found = {name for block in blocks for name in block.found}
        return offer_of_tools(self.tools or (), self.tool_choice, found)


def _compaction(turns: Sequence[Turn]) -> tuple[int, int] | None:
    """Which block of which turn is the last compaction; one without a summary is none."""
    for number in reversed(range(len(turns))):
        blocks = turns[number].content
        if isinstance(blocks, str) or turns[number].role != "assistant":
            continue
        for place in reversed(range(len(blocks))):
            if blocks[place].type == "compaction" and blocks[place].content is not None:
                return number, place
    return None


def _opened(block: Block, place: str) -> Conversation:
    """What a compaction stands for: its summary, and the turns that it has kept."""
    summary = block.content
    assert isinstance(summary, str)
    if block.encrypted_content is None:
        return Conversation([], summary)
    kept = unsealed(block.encrypted_content, f"{place}.encrypted_content")
    return Conversation(kept.messages, summary)


class MessagesRequest(CountTokensRequest, EngineFields):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Some[str] | None = None
    metadata: Metadata | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountTokensRequest.unsupported,
        "container": (),
        "inference_geo": (),
        "service_tier": ("auto", "standard_only"),
    }
