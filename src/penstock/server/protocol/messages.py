"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: the requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.sampling import StructuredOutputs
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
    EngineFields,
    Some,
    UserName,
)
from penstock.server.protocol.pictures import ContentPart
from penstock.server.protocol.structure import TextFormat
from penstock.server.protocol.text_part import TextPart
from penstock.server.protocol.tools import MOST_TOOLS
from penstock.server.tools.offer import Offer


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Some[Block]

    def conversation(self) -> list[Message]:
        """The same as a chat's messages. Raises ApiError."""
        if isinstance(self.content, str):
            return [Message(role=self.role, content=self.content)]
        return messages_of(self.role, self.content)


class Metadata(Body):
    """Who asks."""

    user_id: UserName | None = None


class OutputConfig(Body):
    """`output_config`: the form of an answer."""

    format: TextFormat | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"effort": (), "task_budget": ()}


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
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context_management": ({"edits": []},),
        "diagnostics": (),
        "mcp_servers": (),
        "thinking": ({"type": "disabled"},),
        "user_profile_id": (),
        "workspace_id": (),
        "speed": ("standard",),
    }

    @property
    def _system(self) -> str | list[ContentPart]:
        given = self.system or ""
        return (
            given
            if isinstance(given, str)
            else [ContentPart(**part.model_dump(exclude_none=True)) for part in given]
        )

    def conversation(self) -> list[Message]:
        """The same as a chat's messages."""
        system = [] if self.system is None else [Message(role="system", content=self._system)]
        turns = [message for turn in self.messages for message in turn.conversation()]
        if self.cache_control is not None:
            turns[-1] = turns[-1].model_copy(update={"cache_control": self.cache_control})
        return system + turns

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
        return offer_of_tools(self.tools or (), self.tool_choice)


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
