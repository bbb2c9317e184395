"""The form of an answer: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.errors import InvalidSamplingError
from penstock.sampling import StructuredOutputs
from penstock.server.errors import ApiError, as_api_error
from penstock.server.protocol.common import Body, Some

_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's fields of before, and what they are called now."""

_BACKENDS = ("auto", "guidance", "llguidance")
"""vLLM's names for what holds answers to their form here."""

ANY_JSON: Mapping[str, Any] = {}
"""The schema that takes any value."""


class JsonSchema(Body):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None  # answers follow the schema either way


_NO_FORMS = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_OF_SCHEMAS = frozenset("$defs $ref $schema allOf anyOf const enum oneOf properties".split())
_WRAPPER = '{"type": "json_schema", "json_schema": {"name": "answer", "schema": {…}}}'
_FLAT_WRAPPER = '{"type": "json_schema", "name": "answer", "schema": {…}}'


def _is_bare(data: Mapping[str, Any]) -> bool:
    """Whether this is a schema, where something that has one is due."""
    kind = data.get("type")
    named = isinstance(kind, str) and kind in _NO_FORMS
    return named or isinstance(kind, list) or bool(_OF_SCHEMAS & data.keys())


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "grammar", "regex"]
    json_schema: JsonSchema | None = None
    structures: list[Any] | None = None  # of a structural tag
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = None
    grammar: str | None = None
    pattern: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _wrapped(cls, data: Any) -> Any:
        """Before its fields, which a schema hasn't."""
        if not isinstance(data, dict):
            return data
        inner = data.get("json_schema")
        bare = isinstance(inner, dict) and "schema" not in inner and _is_bare(inner)
        if _is_bare(data) or bare or ("schema" in data and data.get("type") == "json_schema"):
            raise ValueError(f"the schema stands in the wrong place; send {_WRAPPER}")
        return data

    def structure(self) -> dict[str, Any]:
        """As `structured_outputs` has it; empty for plain text. Raises ApiError."""
        self._check_beside()
        if self.type == "json_object":
            return {"json_object": True}
        if self.type == "json_schema":
            if self.json_schema is None:
                raise _missing("json_schema", "json_schema", f": {_WRAPPER}")
            schema = self.json_schema.json_schema
            return {"json": ANY_JSON if schema is None else schema}
        if self.type == "structural_tag":
            given = {name: getattr(self, name) for name in ("structures", "triggers", "format")}
            tag = {name: value for name, value in given.items() if value is not None}
            return {"structural_tag": {"type": "structural_tag"} | tag}
        if self.type == "grammar":
            return {"grammar": _present(self.grammar, "grammar", self.type)}
        if self.type == "regex":
            return {"regex": _present(self.pattern, "pattern", self.type)}
        return {}

    def _check_beside(self) -> None:
        """Raises ApiError for a field that belongs to another type."""
        own: dict[str, set[str]] = {
            "json_schema": {"json_schema"},
            "structural_tag": {"structures", "triggers", "format"},
            "grammar": {"grammar"},
            "regex": {"pattern"},
        }
        for name in ResponseFormat.model_fields:
            foreign = name != "type" and name not in own.get(self.type, ())
            if foreign and getattr(self, name) is not None:
                raise ApiError(
                    400,
                    f"response_format of type {self.type!r} has no {name!r}. Leave it out.",
                    param="response_format",
                )


def _present(value: str | None, name: str, kind: str) -> str:
    if value is None:
        raise _missing(name, kind)
    return value


def _missing(name: str, kind: str, such: str = "") -> ApiError:
    said = f"response_format of type {kind!r} needs {name!r}{such}."
    return ApiError(400, said, param="response_format")


class TextFormat(Body):
    """`text.format` of the Responses API, and Anthropic's `output_format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None  # answers follow the schema either way

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, data: Any) -> Any:
        """Before its fields: a chat's form has others, and a schema has none of them."""
        if isinstance(data, dict) and (_is_bare(data) or isinstance(data.get("json_schema"), dict)):
            raise ValueError(f"the schema stands in the wrong place; send {_FLAT_WRAPPER}")
        return data

    def structure(self, field: str) -> StructuredOutputs | None:
        """What `field` asks for; None for plain text. Raises ApiError."""
        if self.type != "json_schema" and self.json_schema is not None:
            raise ApiError(
                400, f"{field} of type {self.type!r} has no schema. Leave it out.", param=field
            )
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(
                400, f"{field} of type 'json_schema' needs a schema: {_FLAT_WRAPPER}.", param=field
            )
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputs(json_object=True)
        try:
            return StructuredOutputs(json=self.json_schema, disable_additional_properties=True)
        except InvalidSamplingError as error:
            raise structure_error(error, field) from error


class StructureFields(Body):
    """What may be asked of an answer's form; one of them at a time."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Some[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    guided_decoding_backend: str | None = None  # vLLM's; here there is one
    renamed: ClassVar[Mapping[str, str]] = _GUIDED

    def structure(self) -> tuple[StructuredOutputs | None, str]:
        """What is asked for, and by which field. Raises ApiError for two that disagree."""
        self._check_backend()
        asked: dict[str, dict[str, Any]] = {}
        if self.response_format is not None:
            asked["response_format"] = self.response_format.structure()
        if self.structured_outputs is not None:
            asked["structured_outputs"] = self.structured_outputs
        for field, name in _GUIDED.items():
            if (value := getattr(self, field)) is not None:
                asked[field] = {name: value}
        asked = {field: form for field, form in asked.items() if form or field[0] == "s"}
        if len(asked) > 1 and any(form != next(iter(asked.values())) for form in asked.values()):
            first, second = list(asked)[:2]
            raise ApiError(
                400,
                f"{first} and {second} both say what form the answer has. Leave out one of them.",
                param=second,
            )
        space = self.guided_whitespace_pattern
        if space is not None and "guided_json" not in asked:
            raise ApiError(
                400,
                "guided_whitespace_pattern goes with guided_json, which isn't given. Leave it out.",
                param="guided_whitespace_pattern",
            )
        for field, form in asked.items():
            more = {} if space is None else {"whitespace_pattern": space}
            if form.get("json") is not None:  # as vLLM does; `structured_outputs` may say otherwise
                form = {"disable_additional_properties": True, **form}
            try:
                return StructuredOutputs.of(form | more), field
            except InvalidSamplingError as error:
                raise structure_error(error, field) from error
        return None, ""

    def _check_backend(self) -> None:
        backend = self.guided_decoding_backend
        if backend not in (None, *_BACKENDS):
            raise ApiError(
                400,
                f"guided_decoding_backend is {backend[:60]!r}, but answers are held to their form "
                f"by llguidance, whatever the form. Send {', '.join(map(repr, _BACKENDS[:-1]))} or "
                f"{_BACKENDS[-1]!r}, or leave it out.",
                param="guided_decoding_backend",
            )


def structure_error(error: InvalidSamplingError, field: str) -> ApiError:
    """What is wrong with an answer's form, in the words of the field that asked for it."""
    message = as_api_error(error).message
    if field != "structured_outputs":
        message = re.sub(r"\bstructured_outputs(\.\w+)?", field, message)
    return ApiError(400, message, param=field, code="invalid_structure")
