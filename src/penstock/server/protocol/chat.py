"""`/v1/chat/completions`: the request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock.server.body import read_json
from penstock.server.errors import ApiError
from penstock.server.protocol.beams import BeamFields
from penstock.server.protocol.common import (
    MOST_MESSAGES,
    Body,
    CacheControl,
    ContextManagements,
    Effort,
    EngineFields,
    Some,
    StreamOptions,
    UserName,
)
from penstock.server.protocol.pictures import ContentPart
from penstock.server.protocol.structure import StructureFields
from penstock.server.protocol.text_part import TextPart
from penstock.server.protocol.tools import ToolFields
from penstock.tokenizer.tool_calls import ToolCallForm


def _read_arguments(given: str | dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, which the API has as JSON text. Raises ValueError for other text."""
    if isinstance(given, dict):
        return given
    if not given.strip():
        return {}
    try:
        value = read_json(given.encode())
    except ApiError as error:
        reason = error.message.partition(": ")[2]
        raise ValueError(f"must be a JSON object as text, but can't be read: {reason}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object as text, not {given[:60]!r}")
    return value


def readable(given: str | dict[str, Any]) -> str | dict[str, Any]:
    """The same arguments. Raises ValueError for what isn't a JSON object."""
    _read_arguments(given)
    return given


class FunctionCall(Body):
    """What an earlier answer called."""

    name: str
    arguments: Annotated[str | dict[str, Any], AfterValidator(readable)]

    def for_template(self, form: ToolCallForm) -> dict[str, Any]:
        """The call with its arguments as the template wants them."""
        given = self.arguments
        arguments: Any = _read_arguments(given)
        if form.arguments_as_text:
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        return {"name": self.name, "arguments": arguments}


class ToolCall(Body):
    """An earlier answer's call of a tool."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def for_template(self, form: ToolCallForm) -> dict[str, Any]:
        """The call as chat templates read it."""
        function = self.function.for_template(form)
        plain = {"id": self.id, "type": self.type, "function": function, "index": self.index}
        return {name: value for name, value in plain.items() if value is not None}


_LEGACY_ID = "function0"
"""Of calls that have none, in nine letters, as Mistral's templates want them."""


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Some[ContentPart] | None = None
    name: str | None = None
    tool_calls: Some[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's newer name
    cache_control: CacheControl | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "refusal": (),
        "audio": (),
        "annotations": (),
    }

    @model_validator(mode="after")
    def _sees_only_as_user(self) -> Message:
        if self.role != "user" and self.has_pictures:
            raise ValueError(f"a message of the {self.role} has no pictures; send them as the user")
        return self

    @model_validator(mode="before")
    @classmethod
    def _in_new_words(cls, data: Any) -> Any:
        """The older API's `function_call`, and what came of it, as `tool_calls` and a tool's."""
        if not isinstance(data, dict):
            return data
        if data.get("role") == "function":
            data = {"tool_call_id": _LEGACY_ID, **data, "role": "tool"}
        called = data.get("function_call")
        if called is None:
            return data
        if data.get("tool_calls"):
            raise ValueError("function_call and tool_calls say the same; send tool_calls alone")
        kept = {name: value for name, value in data.items() if name != "function_call"}
        return {**kept, "tool_calls": [{"id": _LEGACY_ID, "type": "function", "function": called}]}

    @property
    def has_pictures(self) -> bool:
        """Which take long to unpack."""
        parts = self.content if isinstance(self.content, list) else ()
        return any(part.picture is not None for part in parts)

    def passages(self) -> list[tuple[str, CacheControl | None]]:
        """(text, whether the prompt is to be kept up to its end), one after the other."""
        if not isinstance(self.content, list):
            return [(self.content or "", self.cache_control)]
        parts = [(part.read(), part.cache_control) for part in self.content]
        return [*parts, ("", self.cache_control)]

    def for_template(self, form: ToolCallForm) -> dict[str, Any]:
        """The message as chat templates read it: content as one text, or where there are pictures
        as parts, each of which has what it is of.

        form: how the template wants calls of tools.
        """
        content: Any = self.content
        if isinstance(content, list):
            if self.has_pictures:
                content = [_part_for_template(part) for part in content]
            else:
                content = "\n".join(part.read() for part in content)
        if self.tool_calls and not content:
            content = form.content
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        for field in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, field)) is not None:
                plain[field] = value
        if self.reasoning is not None and self.reasoning_content is None:
            plain["reasoning_content"] = self.reasoning
        if self.tool_calls:
            plain["tool_calls"] = [call.for_template(form) for call in self.tool_calls]
        return plain


def _part_for_template(part: ContentPart) -> dict[str, Any]:
    if part.picture is None:
        return {"type": "text", "text": part.read()}
    return {"type": "image", "picture": part.picture}


class TemplateFields(Body):
    """How a conversation becomes a prompt."""

    messages: Some[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Some[dict[str, Any]] | None = None


class Expected(Body):
    """What the answer is expected to be, or much like it: it is guessed by. OpenAI's."""

    type: Literal["content"]
    content: str | Some[TextPart]

    @model_validator(mode="after")
    def _has_text(self) -> Expected:
        if not self.text:
            raise ValueError("has no text. Leave prediction out where nothing is expected")
        return self

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.read() for part in self.content)


class RetentionRatio(Body):
    """OpenAI's Realtime API's: of what fits, the share that is left where it was too much."""

    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Field(gt=0, le=1)]


def _truncation(data: Any) -> Any:
    if data is None or data in ("disabled", "auto") or isinstance(data, dict):
        return data
    raise ValueError(
        f"{data!r:.60} isn't a way to shorten conversations; send 'disabled', 'auto' or "
        '{"type": "retention_ratio", "retention_ratio": a share above 0, 1 at most}'
    )


class ChatRequest(BeamFields, StructureFields, EngineFields, TemplateFields, ToolFields):
    """`POST /v1/chat/completions`."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Annotated[
        Literal["disabled", "auto"] | RetentionRatio | None, BeforeValidator(_truncation)
    ] = None
    context_management: ContextManagements | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    user: UserName | None = None
    prediction: Expected | None = None
    prompt_cache_key: UserName | None = None  # a hint for a fleet: here every prompt is looked up
    safety_identifier: UserName | None = None
    request_id: str | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None  # vLLM's: whether an answer shows it
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None  # vLLM's; -1: no end
    metadata: dict[str, str] | None = None  # labels of what is stored
    hints: ClassVar[Mapping[str, str]] = {
        "session_id": "",  # says where prompts of one kind go, as prompt_cache_key does
        "store": "store",
        "verbosity": "verbosity",
    }
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "best_of": (1,),
        "logits_processors": (),
        "modalities": (["text"],),
        "mm_processor_kwargs": (),
        "moderation": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
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

    @property
    def limit_field(self) -> str:
        """Which of the two fields says so."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
