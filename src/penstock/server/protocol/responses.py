"""`/v1/responses`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.server.errors import ApiError, unsupported
from penstock.server.protocol.chat import Message, TextPart
from penstock.server.protocol.common import (
    MOST_MESSAGES,
    Body,
    EngineFields,
    SamplingFields,
    Some,
    UserName,
)
from penstock.server.validation import refusal

MOST_METADATA = 16  # as in the API


def _few(data: Any) -> Any:
    if isinstance(data, dict) and len(data) > MOST_METADATA:
        raise ValueError(f"has {len(data):,} entries; at most {MOST_METADATA} are kept")
    return data


LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for


class InputItem(Body):
    """A message among the input."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Some[TextPart] | None = None
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"phase": ()}

    @model_validator(mode="before")
    @classmethod
    def _only_messages(cls, data: Any) -> Any:
        """Before its fields, which are another kind's."""
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "message":
            raise refusal(kind=f"An item of type {kind[:40]!r}", why="Only messages are read.")
        return data

    def message(self) -> Message:
        """The same as a chat's message. Raises ApiError for what isn't one."""
        if self.role is None:
            raise ApiError(400, "A message of the input has no role.", param="input")
        return Message(role=self.role, content=self.content)


class TextOptions(Body):
    """`text`: how the answer is written."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "format": ({"type": "text"},),
        "verbosity": ("medium",),
    }


class ReasoningOptions(Body):
    """`reasoning`: none, as answers say that come back."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "effort": ("none",),
        "summary": (),
        "generate_summary": (),
    }


class ResponsesRequest(SamplingFields, EngineFields):
    """`POST /v1/responses`."""

    model: str | None = None
    input: str | Annotated[Some[InputItem], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    user: UserName | None = None
    prompt_cache_key: UserName | None = None  # a hint for a fleet: here every prompt is looked up
    safety_identifier: UserName | None = None
    store: bool | None = None  # nothing is stored; true would promise that
    chat_template_kwargs: dict[str, Any] | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (),
        "background_options": (),
        "context_management": (),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "parallel_tool_calls": (True,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_logprobs": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "stream_options": ({"include_obfuscation": False},),
        "tool_choice": ("none", "auto"),
        "tools": (),
    }

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities beside each token's own; None for none at all."""
        other = next((x for x in self.include or () if x != LOGPROBS), None)
        if other is not None:
            raise unsupported("include", kind=f"What {other[:60]!r} asks for")
        return 0 if self.include and self.top_logprobs is None else self.top_logprobs

    def messages(self) -> list[Message]:
        """The conversation. Raises ApiError for what can't be one."""
        if self.store:
            raise unsupported("store", "Responses aren't kept.")
        messages = []
        if self.instructions:
            messages.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += [item.message() for item in self.input]
        if not messages or (isinstance(self.input, list) and not self.input):
            raise ApiError(400, "The input is empty.", param="input")
        return messages
