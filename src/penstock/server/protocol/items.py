"""Items of a response: what its input may have, and what comes back of its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, model_validator

from penstock.server.errors import ApiError
from penstock.server.protocol.chat import FunctionCall, Message, ToolCall, readable
from penstock.server.protocol.common import Body, Some
from penstock.server.protocol.pictures import ContentPart
from penstock.server.tools.offer import joined_name
from penstock.server.validation import refusal

REFERENCE = "item_reference"
_THOUGHTS = ("reasoning_text", "summary_text")
_KINDS = (
    "message", "function_call", "function_call_output", "reasoning", "compaction", REFERENCE,
)  # fmt: skip


class ItemPart(ContentPart):
    """A part of an item: text, a picture, or reasoning that is sent back."""

    holds: ClassVar[Mapping[str, str]] = {
        **ContentPart.holds,
        **dict.fromkeys(_THOUGHTS, "text"),
    }


class InputItem(Body):
    """A message among the input, an earlier call, what came of it, reasoning, a compaction, or a
    reference to any of these.
    """

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | Some[ItemPart] | None = None
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Annotated[str, AfterValidator(readable)] | None = None
    output: str | Some[ContentPart] | None = None
    summary: Some[ItemPart] | None = None
    encrypted_content: str | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "phase": (),
        "created_by": (),
        "caller": (),
    }

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any) -> Any:
        """Before its fields, which are another kind's."""
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _KINDS:
            why = "Messages, calls of functions, their output, reasoning and compactions are read."
            raise refusal(kind=f"An item of type {kind[:40]!r}", why=why)
        return data

    @model_validator(mode="after")
    def _has_all(self) -> InputItem:
        needed = {
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "compaction": ("encrypted_content",),
            REFERENCE: ("id",),
        }
        if self.encrypted_content and self.type != "compaction":
            raise refusal("encrypted_content")
        if self.namespace and self.type not in ("function_call", "function_call_output"):
            raise refusal("namespace")
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
            name = joined_name(self.namespace, self.name or "")
            function = FunctionCall(name=name, arguments=self.arguments or "")
            return Message(
                role="assistant", tool_calls=[ToolCall(id=self.call_id, function=function)]
            )
        if self.type == "function_call_output":
            return Message(role="tool", content=self.output, tool_call_id=self.call_id)
        if self.type == "reasoning":
            return Message(role="assistant", reasoning_content=self._thought())
        if self.role is None:
            raise ApiError(
                400,
                "A message of the input has no role. What refers to an item that is kept has the "
                "type 'item_reference'.",
                param="input",
            )
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


def turns_of(items: Sequence[InputItem]) -> list[Message]:
    """The same as turns of a chat. Raises ApiError."""
    return joined([item.message() for item in items])
