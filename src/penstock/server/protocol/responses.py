"""`/v1/responses`: the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock.sampling import StructuredOutputs
from penstock.server.answers import unheeded
from penstock.server.compaction import Conversation
from penstock.server.errors import ApiError, unsupported
from penstock.server.protocol.chat import FunctionCall, Message, ToolCall, readable
from penstock.server.protocol.common import (
    MOST_MESSAGES,
    Body,
    ContextManagements,
    Effort,
    EngineFields,
    SamplingFields,
    Some,
    UserName,
)
from penstock.server.protocol.compaction import unsealed
from penstock.server.protocol.pictures import ContentPart
from penstock.server.protocol.structure import TextFormat
from penstock.server.protocol.tools import MOST_TOOLS, Mode, in_forms, only_functions
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
from penstock.server.validation import refusal

_NOT_KEPT = "Nothing is kept here: send the items themselves, as clients do with store: false."
MOST_METADATA = 16  # as in the API


def _few(data: Any) -> Any:
    if isinstance(data, dict) and len(data) > MOST_METADATA:
        raise ValueError(f"has {len(data):,} entries; at most {MOST_METADATA} are kept")
    return data


LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for …
ENCRYPTED = "reasoning.encrypted_content"  # … and what clients always do: reasoning comes as text
_ELSEWHERE = ("namespace", "web_search", "web_search_preview")
"""Tools that agents offer to any model, whether or not its server has them."""


def _here(tools: Any) -> Any:
    """Those that a model here can call; the others might as well not have been chosen."""
    if not isinstance(tools, list):
        return tools
    kept: list[Any] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if tool is None:
            raise ValueError(f"[{i}] is null; send an object")
        if kind in _ELSEWHERE:
            unheeded(f"tools ({kind})")
            tool = None
        kept.append(tool)
    return kept


_THOUGHTS = ("reasoning_text", "summary_text")
_KINDS = ("message", "function_call", "function_call_output", "reasoning", "compaction")


class ItemPart(ContentPart):
    """A part of an item: text, a picture, or reasoning that is sent back."""

    holds: ClassVar[Mapping[str, str]] = {
        **ContentPart.holds,
        **dict.fromkeys(_THOUGHTS, "text"),
    }


class InputItem(Body):
    """A message among the input, an earlier call, what came of it, reasoning, or a compaction."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Some[ItemPart] | None = None
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: Annotated[str, AfterValidator(readable)] | None = None
    output: str | Some[ContentPart] | None = None
    summary: Some[ItemPart] | None = None
    encrypted_content: str | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "phase": (),
        "created_by": (),
        "namespace": (),
        "caller": (),
    }

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        """Before its fields, which are another kind's."""
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _KINDS:
            why = "Messages, calls of functions, their output, reasoning and compactions are read."
            if kind == "item_reference":
                why = _NOT_KEPT
            raise refusal(kind=f"An item of type {kind[:40]!r}", why=why)
        return data

    @model_validator(mode="after")
    def _has_all(self) -> InputItem:
        needed = {
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "compaction": ("encrypted_content",),
        }
        if self.encrypted_content and self.type != "compaction":
            raise refusal("encrypted_content")
        for name in needed.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type!r} has no {name}")
        fields = ("content", "output", "summary")
        lists = (x for x in (getattr(self, name) for name in fields) if isinstance(x, list))
        if any(part.picture is not None for parts in lists for part in parts) and (
            self.type != "message" or self.role not in ("user", None)
        ):
            whose = f"an item of type {self.type!r}" if self.role is None else f"the {self.role}"
            raise ValueError(f"{whose} has no pictures; send them as a message of the user")
        return self

    def message(self) -> Message:
        """The same as a chat's message. Raises ApiError for what isn't one."""
        if self.type == "function_call":
            function = FunctionCall(name=self.name or "", arguments=self.arguments or "")
            return Message(
                role="assistant", tool_calls=[ToolCall(id=self.call_id, function=function)]
            )
        if self.type == "function_call_output":
            return Message(role="tool", content=self.output, tool_call_id=self.call_id)
        if self.type == "reasoning":
            return Message(role="assistant", reasoning_content=self._thought())
        if self.role is None:
            raise ApiError(400, "A message of the input has no role.", param="input")
        parts = self.content if isinstance(self.content, list) else []
        if any(part.type in _THOUGHTS for part in parts):
            raise ApiError(400, "A message of the input has no reasoning_text.", param="input")
        return Message(role=self.role, content=self.content)  # type: ignore[arg-type]

    def _thought(self) -> str:
        content = self.content or self.summary or []
        return content if isinstance(content, str) else "\n".join(x.read() for x in content)


def joined(messages: list[Message]) -> list[Message]:
    """The assistant's reasoning, text and calls, which are items of their own, as one turn."""
    made: list[Message] = []
    for message in messages:
        last = made[-1] if made else None
        if last is None or message.role != "assistant" or last.role != "assistant":
            made.append(message)
        elif message.tool_calls:
            calls = [*(last.tool_calls or ()), *message.tool_calls]
            made[-1] = last.model_copy(update={"tool_calls": calls})
        elif last.content is None and not last.tool_calls:  # reasoning before what is said
            thoughts = [x.reasoning_content for x in (last, message) if x.reasoning_content]
            made[-1] = message.model_copy(update={"reasoning_content": "\n".join(thoughts) or None})
        else:
            made.append(message)
    return [x for x in made if x.content is not None or x.tool_calls or x.role != "assistant"]


class ResponseTool(Body):
    """A function that may be called."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "async": (),
        "defer_loading": (),
        "output_schema": (),
    }

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        """Before its fields, which are another kind's."""
        return only_functions(data)


class NamedFunctionTool(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str

    def choice(self) -> Choice:
        """The same for the offer."""
        return Choice(named=self.name, param="tool_choice.name")


class AllowedFunctionTools(Body):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)]

    def choice(self) -> Choice:
        """The same for the offer."""
        names = tuple(tool.name for tool in self.tools)
        return Choice(self.mode, allowed=names, param="tool_choice.tools")


_FUNCTION = '{"type": "function", "name": …}'
_FORMS = (
    f"'none', 'auto', 'required', {_FUNCTION}, or {{\"type\": \"allowed_tools\", \"mode\": "
    f'"auto" or "required", "tools": [{_FUNCTION}]}}'
)


class TextOptions(Body):
    """`text`: how the answer is written."""

    format: TextFormat | None = None
    hints: ClassVar[Mapping[str, str]] = {"verbosity": "text.verbosity"}


class ReasoningOptions(Body):
    """`reasoning`: how much of it. It is shown itself, not summed up."""

    effort: Effort | None = None
    hints: ClassVar[Mapping[str, str]] = {
        "summary": "reasoning.summary",
        "generate_summary": "reasoning.generate_summary",
    }


class Inputs(Body):
    """What an answer, or a compaction, is made from."""

    input: str | Annotated[Some[InputItem], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None

    def conversation(self) -> Conversation:
        """The instructions, then the input: from its last compaction on, which stands for all
        before it but the system's messages. Raises ApiError for what can't be a conversation.
        """
        first = [Message(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return Conversation([*first, Message(role="user", content=self.input)])
        items = self.input
        at = next((i for i in reversed(range(len(items))) if items[i].type == "compaction"), None)
        if at is None:
            turns = [*first, *_turns(items)]
            if not (items and turns):
                raise ApiError(400, "The input is empty.", param="input")
            return Conversation(turns)
        place = f"input[{at}].encrypted_content"
        opened = unsealed(items[at].encrypted_content or "", place)
        before = [x.message() for x in items[:at] if x.role in ("system", "developer")]
        head = [*first, *(before or opened.system)]
        return Conversation([*head, *opened.others, *_turns(items[at + 1 :])], opened.summary)

    def sealable(self, conversation: Conversation) -> Conversation:
        """What of a conversation an item has to keep: instructions come with each request."""
        if not self.instructions:
            return conversation
        return Conversation(conversation.messages[1:], conversation.summary)


def _turns(items: Sequence[InputItem]) -> list[Message]:
    return joined([item.message() for item in items])


class Asking(Inputs):
    """What decides on an answer's prompt."""

    model: str | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: (
        Annotated[
            list[ResponseTool | None],
            Field(fail_fast=True, max_length=MOST_TOOLS),
            BeforeValidator(_here),
        ]
        | None
    ) = None
    tool_choice: Annotated[
        Mode | NamedFunctionTool | AllowedFunctionTools | None,
        in_forms({"function": NamedFunctionTool, "allowed_tools": AllowedFunctionTools}, _FORMS),
    ] = None
    parallel_tool_calls: bool | None = None

    def offer(self) -> Offer:
        """The tools that may be called. Raises ApiError."""
        functions = [
            Function(f"tools[{i}]", x.name, x.description, x.parameters, bool(x.strict))
            for i, x in enumerate(self.tools or ())
            if x is not None
        ]
        choice = self.tool_choice
        chosen = Choice(choice) if choice is None or isinstance(choice, str) else choice.choice()
        return offer_of(functions, chosen, self.parallel_tool_calls is not False)


class InputTokensRequest(Asking):
    """`POST /v1/responses/input_tokens`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "conversation": (),
        "previous_response_id": (),
    }
    hints: ClassVar[Mapping[str, str]] = {"personality": "personality"}


class ResponsesRequest(SamplingFields, EngineFields, Asking):
    """`POST /v1/responses`."""

    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_few)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    context_management: ContextManagements | None = None
    user: UserName | None = None
    prompt_cache_key: UserName | None = None  # a hint for a fleet: here every prompt is looked up
    safety_identifier: UserName | None = None
    store: bool | None = None  # nothing is stored; true would promise that
    client_metadata: dict[str, Any] | None = None  # labels, as Codex sends them
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (),
        "background_options": (),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_logprobs": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "stream_options": ({"include_obfuscation": False},),
    }

    @property
    def num_logprobs(self) -> int | None:
        """Top log-probabilities beside each token's own; None for none at all."""
        included = self.include or ()
        other = next((x for x in included if x not in (LOGPROBS, ENCRYPTED)), None)
        if other is not None:
            raise unsupported("include", kind=f"What {other[:60]!r} asks for")
        if ENCRYPTED in included:
            unheeded(f"include ({ENCRYPTED})")
        return 0 if LOGPROBS in included and self.top_logprobs is None else self.top_logprobs

    def structure(self) -> tuple[StructuredOutputs | None, str]:
        """The form that the answer must have, and the field that says so. Raises ApiError."""
        asked = None if self.text is None else self.text.format
        return None if asked is None else asked.structure("text.format"), "text.format"

    def conversation(self) -> Conversation:
        """As of any input. Raises ApiError."""
        if self.store:
            raise unsupported("store", _NOT_KEPT)
        return super().conversation()


class CompactRequest(EngineFields, Inputs):
    """`POST /v1/responses/compact`."""

    model: str | None = None
    prompt_cache_key: UserName | None = None  # a hint for a fleet: here every prompt is looked up
    chat_template_kwargs: dict[str, Any] | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "image": (),
        "kv_transfer_params": (),
        "previous_response_id": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
    }
