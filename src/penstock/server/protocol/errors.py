"""The bodies of errors, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from penstock.server.protocol.common import Body


class ErrorDetail(Body):
    """What went wrong, which field is to blame, and OpenAI's word for the case."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Body):
    """As OpenAI's API writes it."""

    error: ErrorDetail


class MessagesErrorDetail(Body):
    """What went wrong."""

    type: str
    message: str


class MessagesErrorBody(Body):
    """As Anthropic's API writes it."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None = None
