"""`/v1/chat/completions`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.server.errors import ApiError, unsupported
from penstock.server.protocol.common import (
    Body,
    CacheControl,
    EngineFields,
    SamplingFields,
    Some,
    StreamOptions,
)

TEXT_PARTS = ("text", "input_text", "output_text")


class TextPart(Body):
    """A part of a message's content."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    logprobs: list[Any] | None = None  # of an earlier answer that is sent back: nothing to read
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = dict.fromkeys(
        (
            "image_url", "input_audio", "file", "video_url", "audio_url", "image", "annotations",
            "citations",
        ), ()
    )  # fmt: skip

    def read(self) -> str:
        """Its text. Raises ApiError for another kind of content."""
        if self.type not in TEXT_PARTS:
            raise unsupported(f"content of type {self.type[:40]}", "Only text is read.")
        if self.text is None:
            raise ApiError(400, "A part of type 'text' has no text.", param="messages")
        return self.text


class FunctionCall(Body):
    """What an earlier answer called."""

    name: str
    arguments: str


class ToolCall(Body):
    """An earlier answer's call of a tool."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Some[TextPart] | None = None
    name: str | None = None
    tool_calls: Some[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "refusal": (),
        "audio": (),
        "annotations": (),
        "function_call": (),
    }

    def passages(self) -> list[tuple[str, CacheControl | None]]:
        """(text, whether the prompt is to be kept up to its end), one after the other."""
        if not isinstance(self.content, list):
            return [(self.content or "", self.cache_control)]
        parts = [(part.read(), part.cache_control) for part in self.content]
        return [*parts, ("", self.cache_control)]

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: content as one text."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.read() for part in content)
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        if content is None and not self.tool_calls:
            raise ApiError(400, f"A message of the {self.role} has no content.", param="messages")
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, field)) is not None:
                plain[field] = value
        if self.tool_calls:
            plain["tool_calls"] = [x.model_dump(exclude_none=True) for x in self.tool_calls]
        return plain


class TemplateFields(Body):
    """How a conversation becomes a prompt."""

    messages: Some[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Some[dict[str, Any]] | None = None


class ChatRequest(SamplingFields, EngineFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    request_id: str | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "best_of": (1,),
        "function_call": ("none", "auto"),
        "functions": (),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "kv_transfer_params": (),
        "length_penalty": (1.0,),
        "logits_processors": (),
        "metadata": (),
        "modalities": (["text"],),
        "mm_processor_kwargs": (),
        "moderation": (),
        "parallel_tool_calls": (True,),
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
        "store": (),
        "structural_tag": (),
        "structured_outputs": (),
        "tool_choice": ("none", "auto"),
        "tools": (),
        "use_beam_search": (),
        "verbosity": ("medium",),
        "vllm_xargs": (),
        "web_search_options": (),
    }

    @property
    def limit(self) -> int | None:
        """Most tokens to generate. Raises ApiError where two fields disagree."""
        old, new = self.max_tokens, self.max_completion_tokens
        if None not in (old, new) and old != new:
            raise ApiError(
                400,
                f"max_tokens is {old} and max_completion_tokens {new}. Give one of them.",
                param="max_tokens",
            )
        return old if new is None else new
