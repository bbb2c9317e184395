"""Tools in a request, as OpenAI's chats have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.server.protocol.common import Body
from penstock.server.validation import refusal

MOST_TOOLS = 1024


class FunctionDefinition(Body):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionDefinition
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"custom": ()}

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        """Before its fields, which are another kind's."""
        return only_functions(data)


def only_functions(data: Any) -> Any:
    """Raises a refusal for a tool of another kind."""
    kind = data.get("type") if isinstance(data, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise refusal(kind=f"A tool of type {kind[:40]!r}", why="Only functions are called.")
    return data


class NamedFunction(Body):
    """Which function."""

    name: str


class NamedTool(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction

    @model_validator(mode="before")
    @classmethod
    def _only_functions(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise refusal(kind=f"A choice of type {kind[:40]!r}", why="Name a function.")
        return data


class ToolFields(Body):
    """What a chat says about tools."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
