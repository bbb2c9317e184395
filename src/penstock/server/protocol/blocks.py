"""Blocks of Anthropic's messages: text, calls of tools, what came of them, reasoning."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from penstock.server.errors import ApiError
from penstock.server.protocol.chat import FunctionCall, Message, ToolCall
from penstock.server.protocol.common import Body, CacheControl, Some
from penstock.server.protocol.pictures import ContentPart, ImageSource
from penstock.server.protocol.text_part import TextPart
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
from penstock.server.validation import refusal

_FIELDS: dict[str, tuple[str, ...]] = {
    "text": ("text",),
    "image": ("source",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "compaction": (),
}
"""Kinds of blocks, and what each must have."""


class ResultPart(TextPart):
    """A part of what came of a call: text, or the name of a tool that was found by it."""

    holds: ClassVar[Mapping[str, str]] = {**TextPart.holds, "tool_reference": "tool_name"}
    why: ClassVar[str] = "Text and references to tools are read."
    tool_name: str | None = None

    def read(self) -> str:
        """Its text."""
        if self.tool_name is None:
            return self.text or ""
        return f"The tool {self.tool_name} can be called now."


class Block(TextPart):
    """A part of a message's content."""

    holds: ClassVar[Mapping[str, str]] = dict.fromkeys(_FIELDS, "")  # more than a field each
    why: ClassVar[str] = "Text, pictures, calls, their results, reasoning and compactions are read."
    text: str | None = None
    id: str | None = None  # of a call
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of a call's result
    content: str | Some[ResultPart] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None  # of reasoning; nothing is checked here
    data: str | None = None  # of reasoning that nobody can read
    source: ImageSource | None = None  # of a picture
    encrypted_content: str | None = None  # of a compaction, whose summary is its `content`
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **TextPart.unsupported,
        "caller": ({"type": "direct"},),
        "tool_changes": (),
        "toolset_name": (),
    }

    @model_validator(mode="after")
    def _has_its_own(self) -> Self:
        for name in _FIELDS.get(self.type, ()):
            if getattr(self, name) is None:
                raise ValueError(f"a part of type {self.type!r} has no {name}")
        for kind, name in (("image", "source"), ("text", "text")):
            if self.type != kind and getattr(self, name) is not None:
                raise ValueError(f"a part of type {self.type!r} has no {name}, but one is given")
        if self.type == "compaction":
            if self.content is not None and not (isinstance(self.content, str) and self.content):
                raise ValueError("the content of a compaction is a summary, or null")
            if self.cache_control is not None:
                raise ValueError("cache_control can't stand on a compaction; mark a block after it")
        elif self.encrypted_content is not None:
            raise ValueError(f"a part of type {self.type!r} has no encrypted_content")
        if self.cache_control is not None and self.type.endswith("thinking"):
            raise ValueError("cache_control can't stand on reasoning; mark the block after it")
        return self

    @property
    def found(self) -> list[str]:
        """Tools that a call's result refers to."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.tool_name for part in parts if part.tool_name is not None]

    def part(self) -> ContentPart:
        """Text, or a picture, as a chat's part."""
        if self.source is not None:
            part = self.source.part()
            return part.model_copy(update={"cache_control": self.cache_control})
        return ContentPart(type="text", text=self.text, cache_control=self.cache_control)

    def result(self) -> Message:
        """What came of a call, as a chat's message."""
        said = self.content
        text = said if isinstance(said, str) else "\n".join(part.read() for part in said or ())
        if self.is_error:
            text = f"Error: {text}"
        return Message(
            role="tool",
            content=text,
            tool_call_id=self.tool_use_id,
            cache_control=self.cache_control or _last_mark(said),
        )


def _last_mark(content: str | Sequence[TextPart] | None) -> CacheControl | None:
    """The cache_control of the last part that has one: its message is kept to the end."""
    parts = () if content is None or isinstance(content, str) else content
    return next((p.cache_control for p in reversed(parts) if p.cache_control), None)


def messages_of(role: Any, blocks: Sequence[Block]) -> list[Message]:
    """A turn as a chat's messages: results of calls first, then the rest. Raises ApiError."""
    foreign = {"user": ("tool_use", "thinking", "redacted_thinking", "compaction")}.get(
        role, ("tool_result", "image")
    )
    wrong = next((block.type for block in blocks if block.type in foreign), None)
    if wrong is not None:
        raise ApiError(400, f"A turn of the {role} has no {wrong}.", param="messages")
    made = [block.result() for block in blocks if block.type == "tool_result"]
    texts = [block.part() for block in blocks if block.type in ("text", "image")]
    calls = [
        ToolCall(
            id=block.id, function=FunctionCall(name=block.name or "", arguments=block.input or {})
        )
        for block in blocks
        if block.type == "tool_use"
    ]
    thought = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    if texts or calls or not made:
        made.append(
            Message(
                role=role,
                content=texts or None if calls else texts,
                tool_calls=calls or None,
                reasoning_content=thought or None,
                cache_control=_last_mark([b for b in blocks if b.type == "tool_use"]),
            )
        )
    return made


class ToolDefinition(Body):
    """A tool."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    type: str | None = None
    cache_control: CacheControl | None = None  # asks for nothing: every prompt is looked up
    defer_loading: bool | None = None  # the model is told of it when a result has referred to it
    eager_input_streaming: bool | None = None  # arguments are streamed as they come anyway
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "input_examples": (),
    }

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, data: Any) -> Any:
        """Before its fields, which are another kind's."""
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise refusal(kind=f"A tool of type {kind[:40]!r}", why="Only functions are called.")
        return data


_CHOICES = '{"type": "auto"}, {"type": "any"}, {"type": "none"}, or {"type": "tool", "name": …}'


def _short(data: Any) -> str:
    if isinstance(data, dict):
        return f"an object of type {data.get('type')!r:.40}"
    return f"{data!r:.60}"


class ToolChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_forms(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if not isinstance(kind, str) or kind not in ("auto", "any", "tool", "none"):
            raise ValueError(f"{_short(data)} isn't a choice; send {_CHOICES}")
        return data

    @model_validator(mode="after")
    def _names(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a choice of type 'tool', and no other, names one")
        return self


def offer_of_tools(
    tools: Sequence[ToolDefinition], choice: ToolChoice | None, found: Collection[str]
) -> Offer:
    """The tools that may be called; of those that are deferred, the `found` and the one that must
    be. Raises ApiError, for those that aren't told of, too.
    """
    functions = [
        Function(
            f"tools[{i}]",
            tool.name,
            tool.description,
            tool.input_schema,
            bool(tool.strict),
            "input_schema",
        )
        for i, tool in enumerate(tools)
    ]
    missing = sorted(set(found) - {tool.name for tool in tools})
    if missing:
        raise ApiError(
            400,
            f"A tool_reference is to {missing[0][:64]!r}, which isn't among the tools. Send it "
            "there.",
            param="messages",
        )
    if any(tool.defer_loading for tool in tools):
        offer_of(functions, Choice())  # whose checks are of all
        told = {*found, None if choice is None else choice.name}
        functions = [
            function
            for function, tool in zip(functions, tools, strict=True)
            if not tool.defer_loading or tool.name in told
        ]
    if choice is None:
        return offer_of(functions, Choice())
    modes: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none", "tool": None}
    chosen = Choice(modes[choice.type], choice.name, param="tool_choice")
    return offer_of(functions, chosen, not choice.disable_parallel_tool_use)
