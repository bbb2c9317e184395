"""What is wrong with a body: which field, what it is, what it must be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_core import PydanticCustomError

from penstock.server.errors import ApiError, as_sentence, unsupported

_TYPES = ("function-", "list[", "dict[", "literal[")  # how an error's place names types
_NAMES = (  # and these themselves
    "body", "str", "RetentionRatio", "clear_thinking_20251015", "compact_20260112",
    "ResponseTool", "NamespaceTool",
)  # fmt: skip
_REFUSED = "unsupported_parameter"
_SHOWN_CHARACTERS = 80
NO_SIGHT: Final = "This model sees no pictures. Leave them out."

# pydantic's kinds of errors → what the field must be.
_MUST = {
    "string_type": "must be a text",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing_size": "must be a smaller integer",
    "bool_type": "must be true or false",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
}


def refusal(
    field: str = "", *, kind: str = "", why: str = "", shows: bool = False
) -> PydanticCustomError:
    """For a validator to raise: what it is given asks for something that Penstock lacks.

    field: which one of the validated object's; kind: what the object itself is, instead; shows: it
    is a picture.
    """
    return PydanticCustomError(
        _REFUSED, "isn't supported", {"field": field, "kind": kind, "why": why, "shows": shows}
    )


def describe(
    problems: Sequence[Mapping[str, Any]], content_type: str, *, sees: bool = True
) -> ApiError:
    """The first thing that is wrong, of pydantic's errors with a body.

    sees: whether the model takes pictures; there is no use in saying how one is sent to another.
    """
    # Of a field that may be of several types, the type that the value is most like.
    first = problems[0]["loc"][:2]
    same = [x for x in problems if x["loc"][:2] == first]
    problem = max(same, key=lambda x: (len(x["loc"]), not x["type"].endswith("_type")))
    field = _path(problem["loc"])
    if isinstance(problem.get("input"), bytes) and not field:
        return ApiError(
            415,
            f"The body's Content-Type is {content_type[:80]!r}; send JSON as application/json.",
            code="unsupported_media_type",
        )
    kind = problem["type"]
    if kind == _REFUSED:
        if problem["ctx"]["shows"] and not sees:
            return ApiError(400, NO_SIGHT, param=field)
        return _refused(field, problem["ctx"])
    if kind == "extra_forbidden":
        return ApiError(
            400, f"{field!r} isn't a field of this request.", param=field, code="unknown_parameter"
        )
    if kind == "missing":
        said = f"{field!r} is missing." if field else "The body is missing; send JSON."
        return ApiError(400, said, param=field or None, code="missing_required_parameter")
    said = _told(field, problem)
    if kind.endswith("_type") and kind in _MUST:
        kinds = dict.fromkeys(_MUST[x["type"]] for x in same
                              if x["type"] in _MUST and _path(x["loc"]) == field)  # fmt: skip
        must = " or ".join(kinds).replace(" or must be", " or")
        said = f"{field or 'The body'} is {_shown(problem.get('input'))}; it {must}."
    return ApiError(400, said, param=field or None, code="invalid_value")


def _path(place: Sequence[str | int]) -> str:
    """As OpenAI's API writes it: messages[0].content."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _NAMES and not part.startswith(_TYPES):
            path += f".{part}" if path else part
    return path


def _refused(field: str, what: Mapping[str, Any]) -> ApiError:
    if not what["kind"]:
        path = f"{field}.{what['field']}" if field else what["field"]
        return unsupported(path, what["why"])
    # To blame is the list; which of its entries, the message says.
    return unsupported(field, what["why"], kind=what["kind"], param=field.rpartition("[")[0])


def _told(field: str, problem: Mapping[str, Any]) -> str:
    kind, given, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    name = field or "The body"
    if kind == "value_error":
        return f"{name}: {as_sentence(problem['msg'].removeprefix('Value error, '))}"
    if kind == "too_short":
        return f"{name} has {len(given or ())} entries; at least {context['min_length']} is needed."
    if kind == "too_long":
        most = context["max_length"]
        return f"{name} has {len(given or ()):,} entries; at most {most:,} are read."
    if kind == "string_too_long":
        most = context["max_length"]
        return f"{name} has {len(given or ''):,} characters; at most {most:,} are read."
    if kind in _MUST:
        return f"{name} is {_shown(given)}; it {_MUST[kind].format(**context)}."
    return f"{name} is {_shown(given)}: {as_sentence(problem['msg'])}"


def _shown(value: Any) -> str:
    """A value as JSON has it, or what kind of value it is."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float | str):
        shown = repr(value)
        cut = len(shown) > _SHOWN_CHARACTERS
        return shown[:_SHOWN_CHARACTERS] + "…" if cut else shown
    return "a list" if isinstance(value, list) else "an object"
