"""Tools in a request, as OpenAI's chats have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from penstock.server.errors import ApiError
from penstock.server.protocol.common import Body
from penstock.server.tools.offer import Choice, Function, Offer, offer_of
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

    def choice(self) -> Choice:
        """The same for the offer."""
        return Choice(named=self.function.name, param="tool_choice.function.name")


class AllowedTools(Body):
    """Which tools alone may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class AllowedChoice(Body):
    """A `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    def choice(self) -> Choice:
        """The same for the offer."""
        allowed = self.allowed_tools
        names = tuple(tool.function.name for tool in allowed.tools)
        return Choice(allowed.mode, allowed=names, param="tool_choice.allowed_tools.tools")


Mode = Literal["none", "auto", "required"]
_MODES = ("none", "auto", "required")


def in_forms(kinds: Mapping[str, type[Body]], forms: str) -> BeforeValidator:
    """Reads a `tool_choice`; an error says what forms it has. kinds: of objects, by `type`."""

    def read(data: Any) -> Any:
        if data is None or data in _MODES:
            return data
        if not isinstance(data, dict):
            raise ValueError(f"{data!r:.60} isn't a choice; send {forms}")
        kind = data.get("type")
        model = kinds.get(kind) if isinstance(kind, str) else None
        if model is None:
            raise ValueError(f"an object of type {kind!r:.40} isn't a choice; send {forms}")
        try:
            return model.model_validate(data)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise ValueError(f"{place}: {problem['msg'].lower()}; send {forms}") from error

    return BeforeValidator(read)


_FUNCTION = '{"type": "function", "function": {"name": …}}'
_FORMS = (
    f"'none', 'auto', 'required', {_FUNCTION}, or {{\"type\": \"allowed_tools\", "
    f'"allowed_tools": {{"mode": "auto" or "required", "tools": [{_FUNCTION}]}}}}'
)
_LEGACY_FORMS = "'none', 'auto' or {\"name\": …}"


def _legacy_choice(data: Any) -> Any:
    if data is None or data in ("none", "auto"):
        return data
    if not (isinstance(data, dict) and data.keys() == {"name"} and isinstance(data["name"], str)):
        raise ValueError(f"{data!r:.60} isn't a choice; send {_LEGACY_FORMS}")
    return data


class ToolFields(Body):
    """What a chat says about tools, or in the older API's words about functions."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Annotated[
        Mode | NamedTool | AllowedChoice | None,
        in_forms({"function": NamedTool, "allowed_tools": AllowedChoice}, _FORMS),
    ] = None
    parallel_tool_calls: bool | None = None
    functions: (
        Annotated[list[FunctionDefinition], Field(fail_fast=True, max_length=MOST_TOOLS)] | None
    ) = None
    function_call: Annotated[
        Literal["none", "auto"] | NamedFunction | None, BeforeValidator(_legacy_choice)
    ] = None

    @property
    def legacy(self) -> bool:
        """Whether calls are asked for, and so answered, in the older API's words."""
        return bool(self.functions)

    def offer(self) -> Offer:
        """The tools that may be called. Raises ApiError."""
        called = self.function_call
        if self.functions or isinstance(called, NamedFunction) or (called and self.tools):
            return self._legacy_offer()
        functions = [
            _function(f"tools[{i}].function", tool.function)
            for i, tool in enumerate(self.tools or ())
        ]
        choice = self.tool_choice
        chosen = Choice(choice) if choice is None or isinstance(choice, str) else choice.choice()
        return offer_of(functions, chosen, self.parallel_tool_calls is not False)

    def _legacy_offer(self) -> Offer:
        beside = "tools" if self.tools else "tool_choice"
        if self.tools or self.tool_choice is not None:
            raise ApiError(
                400,
                f"functions and function_call are the older words for tools and tool_choice, and "
                f"{beside} is given too. Send tools and tool_choice alone.",
                param=beside,
            )
        functions = [_function(f"functions[{i}]", x) for i, x in enumerate(self.functions or ())]
        choice = self.function_call
        if isinstance(choice, NamedFunction):
            chosen = Choice(named=choice.name, param="function_call.name", tools="functions")
        else:
            chosen = Choice(choice, param="function_call", tools="functions")
        return offer_of(functions, chosen, parallel=False)


def _function(place: str, given: FunctionDefinition) -> Function:
    strict = bool(given.strict)
    return Function(place, given.name, given.description, given.parameters, strict)
