"""docs/compatibility.md beside the classes that read the requests, so that it can't go stale."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.server.protocol.beams import BeamFields
from penstock.server.protocol.blocks import Block
from penstock.server.protocol.chat import ChatRequest, Message, TemplateFields
from penstock.server.protocol.common import (
    Body,
    CacheControl,
    ContextManagement,
    EngineFields,
    SamplingFields,
    StreamOptions,
)
from penstock.server.protocol.completions import CompletionRequest
from penstock.server.protocol.embeddings import EmbeddingRequest
from penstock.server.protocol.messages import (
    CompactEdit,
    CountTokensRequest,
    MessagesRequest,
    Turn,
)
from penstock.server.protocol.pictures import ContentPart
from penstock.server.protocol.responses import (
    CompactRequest,
    InputItem,
    InputTokensRequest,
    ResponsesRequest,
)
from penstock.server.protocol.structure import JsonSchema, ResponseFormat, StructureFields
from penstock.server.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.server.conftest import Running

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
SHARED: dict[str, type[Body]] = {
    "Choosing tokens": SamplingFields,
    "Searching with beams": BeamFields,
    "The form of an answer": StructureFields,
    "Queue and cache": EngineFields,
    "Writing a conversation": TemplateFields,
}
SECTIONS: dict[str, type[Body]] = {
    **SHARED,
    "response_format": ResponseFormat,
    "response_format.json_schema": JsonSchema,
    "POST /v1/chat/completions": ChatRequest,
    "A message of a chat": Message,
    "A part of a message": ContentPart,
    "cache_control": CacheControl,
    "stream_options": StreamOptions,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponsesRequest,
    "An item of the input": InputItem,
    "context_management": ContextManagement,
    "POST /v1/responses/compact": CompactRequest,
    "POST /v1/responses/input_tokens": InputTokensRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /v1/messages": MessagesRequest,
    "A message": Turn,
    "A block of a message": Block,
    "An edit of context_management": CompactEdit,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}


def expected(body: type[Body]) -> dict[str, str]:
    """Each field of the body and what is taken for it, as the page writes it."""
    schema = body.model_json_schema()
    required = schema.get("required", [])
    rows = {}
    elsewhere = {name for one in _shared(body).values() for name in one.model_fields}
    elsewhere -= body.__annotations__.keys()  # its own say
    for name, what in schema["properties"].items():
        if name not in body.unsupported and name not in elsewhere:
            rows[name] = _kind(what) + (", required" if name in required else "")
    for name, harmless in body.unsupported.items():
        only = ", ".join(f"`{json.dumps(value)}`" for value in harmless)
        rows[name] = f"400, but {only}" if only else "400"
    rows |= {name: "hint" if label else "passed over" for name, label in body.hints.items()}
    return rows


def _shared(body: type[Body]) -> dict[str, type[Body]]:
    """The sections whose fields the body has too."""
    return {title: one for title, one in SHARED.items() if issubclass(body, one) and body != one}


def _kind(schema: dict[str, Any]) -> str:
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        kinds = [_kind(one) for one in several if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "$ref" in schema:
        return "object"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤"))
              if key in schema]  # fmt: skip
    return " ".join([schema.get("type", "anything"), *bounds])


def _tables() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for part in re.split(r"^#{2,3} ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        rows = re.findall(r"^\| (.+?) \| (.*?) \| .*\|$", text, re.MULTILINE)
        fields = {
            name: what.strip() for names, what in rows for name in re.findall(r"`(\w+)`", names)
        }
        if fields:
            found[title.replace("`", "")] = fields
    return found


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_says_what_is_taken(title: str) -> None:
    assert _tables()[title] == expected(SECTIONS[title])


@pytest.mark.parametrize("title", SECTIONS)
def test_the_page_names_the_tables_that_hold_too(title: str) -> None:
    text = PAGE.read_text().replace("`", "")
    (section,) = re.findall(rf"^#{{2,3}} {re.escape(title)}\n(.*?)(?=^#|\Z)", text, re.M | re.S)
    also = re.findall(r"^Also the fields of (.*)\.$", section, re.MULTILINE)
    named = re.findall(r"\[(.+?)\]", "".join(also))
    assert named == list(_shared(SECTIONS[title]))


def test_every_table_is_checked() -> None:
    assert set(_tables()) == set(SECTIONS)


def test_the_endpoints_are_those_of_the_application(server: Running) -> None:
    with server.client() as client:
        paths = client.get("/openapi.json").json()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    section = PAGE.read_text().split("## Endpoints\n")[1].split("\n## ")[0]
    found = re.findall(r"`(DELETE|GET|POST) (/[^`]*)`", section)
    said = {f"{method} {path}" for method, path in found}
    assert said == served
