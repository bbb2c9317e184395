"""Tools in a request for a response: functions, and namespaces that have some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from penstock.server.answers import unheeded
from penstock.server.errors import ApiError
from penstock.server.protocol.common import Body
from penstock.server.protocol.tools import MOST_TOOLS, Mode, in_forms, only_functions
from penstock.server.tools.offer import TOP, Choice, Function, joined_name

_ELSEWHERE = ("web_search", "web_search_preview")
"""Tools that agents offer to any model, whether or not its server has them."""
_IN_A_NAMESPACE = ("custom",)
"""The same, within a namespace."""


def _without(kinds: Sequence[str]) -> BeforeValidator:
    """Leaves those out that no model here can call; they might as well not have been chosen."""

    def here(tools: Any) -> Any:
        if not isinstance(tools, list):
            return tools
        kept: list[Any] = []
        for i, tool in enumerate(tools):
            kind = tool.get("type") if isinstance(tool, dict) else None
            if tool is None:
                raise ValueError(f"[{i}] is null; send an object")
            if kind in kinds:
                unheeded(f"tools ({kind})")
                tool = None
            kept.append(tool)
        return kept

    return BeforeValidator(here)


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


class NamespaceTool(Body):
    """Functions under a name that they share: agents declare those of an MCP server so."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    tools: Annotated[
        list[ResponseTool | None],
        Field(fail_fast=True, max_length=MOST_TOOLS),
        _without(_IN_A_NAMESPACE),
    ]

    def functions(self, place: str) -> Iterator[Function]:
        """They; the first one's description has the namespace's before it."""
        namespace = None if self.name == TOP else self.name
        said = self.description
        for i, tool in enumerate(self.tools):
            if tool is None:
                continue
            both = [x for x in (said, tool.description) if x]
            yield Function(
                f"{place}.tools[{i}]",
                joined_name(namespace, tool.name),
                "\n\n".join(both) if said else tool.description,
                tool.parameters,
                bool(tool.strict),
                namespace=namespace,
            )
            said = None


def _kind(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "NamespaceTool" if kind == "namespace" else "ResponseTool"


AnyTool = Annotated[
    Annotated[ResponseTool, Tag("ResponseTool")] | Annotated[NamespaceTool, Tag("NamespaceTool")],
    Discriminator(_kind),
]
ResponseTools = Annotated[
    list[AnyTool | None], Field(fail_fast=True, max_length=MOST_TOOLS), _without(_ELSEWHERE)
]


def functions_of(tools: Sequence[AnyTool | None]) -> list[Function]:
    """All functions, under the names that a model calls. Raises ApiError for too many."""
    found: list[Function] = []
    for i, tool in enumerate(tools):
        if isinstance(tool, NamespaceTool):
            found += tool.functions(f"tools[{i}]")
        elif tool is not None:
            strict = bool(tool.strict)
            found.append(
                Function(f"tools[{i}]", tool.name, tool.description, tool.parameters, strict)
            )
        if len(found) > MOST_TOOLS:
            raise ApiError(
                400,
                f"The tools up to tools[{i}] have {len(found):,} functions; at most {MOST_TOOLS:,} "
                "are read.",
                param="tools",
                code="invalid_value",
            )
    return found


def echoed(tools: Sequence[AnyTool | None]) -> list[dict[str, Any]]:
    """Those that were heeded, as they were sent."""
    shown = [tool.model_dump() for tool in tools if tool is not None]
    for tool in shown:
        if "tools" in tool:
            tool["tools"] = [child for child in tool["tools"] if child is not None]
    return shown


class NamedFunctionTool(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    name: str
    namespace: str | None = None

    @property
    def joined(self) -> str:
        """The name by which a model calls it."""
        return joined_name(self.namespace, self.name)

    def choice(self) -> Choice:
        """The same for the offer."""
        return Choice(named=self.joined, param="tool_choice.name")


class AllowedFunctionTools(Body):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)]

    def choice(self) -> Choice:
        """The same for the offer."""
        names = tuple(tool.joined for tool in self.tools)
        return Choice(self.mode, allowed=names, param="tool_choice.tools")


_FUNCTION = '{"type": "function", "name": …}'
_FORMS = (
    f"'none', 'auto', 'required', {_FUNCTION}, or {{\"type\": \"allowed_tools\", \"mode\": "
    f'"auto" or "required", "tools": [{_FUNCTION}]}}'
)
ResponseChoice = Annotated[
    Mode | NamedFunctionTool | AllowedFunctionTools | None,
    in_forms({"function": NamedFunctionTool, "allowed_tools": AllowedFunctionTools}, _FORMS),
]
