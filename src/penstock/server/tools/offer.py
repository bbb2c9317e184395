"""What a request offers: which tools, and whether one must be called."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from penstock.server.errors import ApiError
from penstock.server.tools.reader import Schemas
from penstock.server.tools.schema import problem_of

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MOST_CHARACTERS = 1 << 20
"""Of all tools as JSON: a prompt of that many is longer than models take."""


NO_ARGUMENTS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
"""Of a function without parameters, as in OpenAI's API."""
TOP = "functions"
"""The namespace of tools that are in none: what Codex calls it."""


def joined_name(namespace: str | None, name: str) -> str:
    """By which a model knows a function of a namespace: both, with two underscores between."""
    if not namespace or namespace == TOP:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


@dataclass(frozen=True, slots=True)
class Function:
    """A tool. place: where it stands in the request, such as `tools[0].function`.

    name: by which the model calls it; namespace: that its request has it in, with which the name
    begins then.
    """

    place: str
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool = False
    schema_field: str = "parameters"
    namespace: str | None = None

    @property
    def own_name(self) -> str:
        """Within its namespace."""
        return self.name.removeprefix(joined_name(self.namespace, ""))

    @property
    def schema(self) -> Mapping[str, Any]:
        """Of the arguments."""
        return NO_ARGUMENTS if self.parameters is None else {"type": "object", **self.parameters}

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it, in OpenAI's words."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        # Many templates look into the properties without asking whether there are any.
        function["parameters"] = {"type": "object", "properties": {}, **(self.parameters or {})}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Offer:
    """What may be called. mode: whether a call must be made; allowed: of which alone, None: any."""

    functions: tuple[Function, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    allowed: frozenset[str] | None = None
    parallel: bool = True
    size: int = 0  # characters of the functions as JSON

    @property
    def active(self) -> bool:
        """Whether calls may be made at all."""
        return bool(self.functions) and self.mode != "none"

    @property
    def callable(self) -> tuple[Function, ...]:
        """The functions that may be called."""
        if self.allowed is None:
            return self.functions
        return tuple(x for x in self.functions if x.name in self.allowed)

    def apart(self, name: str) -> dict[str, str]:
        """A function's `name`, and `namespace` where it has one, by the name that a model calls."""
        found = next((x for x in self.functions if x.name == name and x.namespace), None)
        if found is None or found.namespace is None:
            return {"name": name}
        return {"name": found.own_name, "namespace": found.namespace}

    @property
    def schemas(self) -> Schemas:
        """Of those, name → schema of the arguments."""
        return {x.name: x.parameters or {} for x in self.callable} if self.active else {}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request says of `tool_choice`, in whatever form.

    named: the one that must be called; allowed: those that alone may be; param: the field to blame;
    tools: what the field is called that has the tools.
    """

    mode: Literal["none", "auto", "required"] | None = None
    named: str | None = None
    allowed: tuple[str, ...] | None = None
    param: str = "tool_choice"
    tools: str = "tools"


def offer_of(functions: Sequence[Function], choice: Choice, parallel: bool = True) -> Offer:
    """The offer. Raises ApiError naming the tool or field that is wrong."""
    _check_names(functions)
    size = _size(functions)
    for function in functions:
        if function.parameters is None:
            continue
        found = problem_of(function.parameters)
        if found is not None:
            where, what = found
            place = f"{function.place}.{function.schema_field}{where}"
            raise ApiError(400, f"{place} {what}.", param=place, code="invalid_function_parameters")
    if not functions:
        if choice.mode == "required" or choice.named is not None or choice.allowed is not None:
            raise ApiError(
                400,
                f"{choice.param} asks for a call, but there are no {choice.tools}. Send "
                f"{choice.tools}.",
                param=choice.param,
            )
        return Offer(parallel=parallel)
    allowed = _allowed(functions, choice)
    if choice.named is not None:
        return Offer(tuple(functions), "required", allowed, parallel=False, size=size)
    return Offer(tuple(functions), choice.mode or "auto", allowed, parallel=parallel, size=size)


def _allowed(functions: Sequence[Function], choice: Choice) -> frozenset[str] | None:
    """The names that a choice gives; None where it gives none. Raises ApiError for unknown ones."""
    given = choice.allowed if choice.named is None else (choice.named,)
    if given is None:
        return None
    if not given:
        raise ApiError(
            400,
            f"{choice.param} allows no tool at all. Name some, or send tool_choice: 'none'.",
            param=choice.param,
        )
    names = dict.fromkeys(function.name for function in functions)
    unknown = next((name for name in given if name not in names), None)
    if unknown is not None:
        raise ApiError(
            400,
            f"{choice.param} names {unknown[:80]!r}, which isn't among the {choice.tools}: "
            f"{', '.join(names)[:200]}.",
            param=choice.param,
        )
    return frozenset(given)


def _check_names(functions: Sequence[Function]) -> None:
    seen: dict[str, str] = {}
    for function in functions:
        place = f"{function.place}.name"
        if not _NAME.fullmatch(function.own_name):
            raise ApiError(
                400,
                f"{place} is {function.own_name[:80]!r}; a name has 1 to 64 of a-z A-Z 0-9 _ -, "
                "and nothing else.",
                param=place,
                code="invalid_value",
            )
        if function.name in seen:
            raise ApiError(
                400,
                f"{place} is {function.name!r}, as {seen[function.name]} is. Give each tool a name "
                "of its own.",
                param=place,
                code="invalid_value",
            )
        seen[function.name] = place


def _size(functions: Sequence[Function]) -> int:
    """Characters of all of them. Raises ApiError for too many."""
    total = 0
    for function in functions:
        size = len(json.dumps(function.for_template(), ensure_ascii=False))
        total += size
        if total > _MOST_CHARACTERS:
            raise ApiError(
                400,
                f"{function.place} has {size:,} characters as JSON and the tools up to it "
                f"{total:,}; at most {_MOST_CHARACTERS:,} are read. Send fewer or shorter ones.",
                param=function.place,
                code="context_length_exceeded",
            )
    return total
