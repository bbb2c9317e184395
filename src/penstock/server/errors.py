"""What goes wrong, as the APIs say it: a status and a body in OpenAI's or Anthropic's shape."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse

from penstock.errors import (
    BusyError,
    EngineDeadError,
    MissingExtraError,
    ModelOutputError,
    PenstockError,
    RequestError,
    RequestTimeoutError,
    TokenizerError,
)
from penstock.sampling import BeamSearchParams, SamplingParams

logger = logging.getLogger("penstock.server")

# OpenAI's and Anthropic's names for an error of a status.
_TYPES = {
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    408: ("timeout_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("service_unavailable_error", "overloaded_error"),
}
_CLIENT = ("invalid_request_error", "invalid_request_error")
_SERVER = ("server_error", "api_error")
# The engine's errors begin with what they blame.
_BLAMED = re.compile(r"(\w+)(?:\[\d+\])?(?= is |=| has | holds )")
_FIELDS = {one.name for kind in (SamplingParams, BeamSearchParams) for one in fields(kind)}
_FIELDS |= {"cache_salt", "dimensions", "prediction", "priority"}
_INERT = re.compile(r"(\w+?)(_s)?=(\S+) has no effect: requests are scheduled by policy='(\w+)'.")
_HEEDED_BY = {"priority": "priority", "ttft_slo": "edf", "tpot_slo": "edf"}


def _types(status: int) -> tuple[str, str]:
    return _TYPES.get(status, _CLIENT if status < 500 else _SERVER)


BUSY_S = 5.0
"""When to send a request again that found something busy."""


class ApiError(Exception):
    """An answer that isn't what was asked for.

    param: the field of the request that is to blame; code: OpenAI's word for the case.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """details: by which Anthropic's clients know a case."""
        super().__init__(message)
        self.details = details
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, round(retry_after_s)))

    @property
    def type(self) -> str:
        """In OpenAI's words."""
        return _types(self.status)[0]

    def openai(self) -> dict[str, Any]:
        """The body as OpenAI's API has it."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self, request_id: str | None = None) -> dict[str, Any]:
        """The body as Anthropic's API has it."""
        kind = _types(self.status)[1]
        message = self.message if self.param is None else f"{self.param}: {self.message}"
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": message}}
        if self.details is not None:
            body["error"]["details"] = dict(self.details)
        return body | ({"request_id": request_id} if request_id else {})


def unsupported(field: str, why: str = "", *, kind: str = "", param: str | None = None) -> ApiError:
    """400 for a field that the API has and Penstock doesn't.

    kind: what stands in the field, where only that isn't supported; param: another field to blame.
    """
    what = f"{kind} (in {field!r})" if kind else repr(field)
    reason = f" {why}" if why else ""
    return ApiError(
        400,
        f"{what} isn't supported by Penstock yet.{reason} Leave it out.",
        param=param or field,
        code="unsupported_parameter",
    )


def as_api_error(
    error: BaseException, names: Mapping[str, str] | None = None, request_id: str | None = None
) -> ApiError:
    """What a client is told of an error that came from the engine. One that nobody explains is
    logged.

    names: what the client's API calls some of the engine's parameters; request_id: for the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, MissingExtraError):
        return ApiError(500, str(error))
    if isinstance(error, BusyError):
        return ApiError(503, str(error), code="busy", retry_after_s=BUSY_S)
    if isinstance(error, RequestTimeoutError):
        return ApiError(408, str(error), code="request_timeout")
    if isinstance(error, ModelOutputError):
        return ApiError(500, str(error), code="model_error")
    if isinstance(error, RequestError | TokenizerError):
        return _refused(str(error), names or {})
    if isinstance(error, PenstockError):
        return ApiError(500, str(error))
    fields = {} if request_id is None else {"id": request_id}
    logger.error("an internal error", exc_info=error, extra={"fields": fields})
    return ApiError(500, f"{type(error).__name__} in the server. Its log says more.")


def _refused(message: str, names: Mapping[str, str]) -> ApiError:
    """400 in the words of the API: its fields, its null."""
    inert = _INERT.match(message)
    if inert:
        name, seconds, value, policy = inert.groups()
        field = f"{name}_ms" if seconds else name
        shown = f"{float(value) * 1000:g}" if seconds else value
        return ApiError(
            400,
            f"{field} is {shown}, but requests are scheduled by the policy {policy!r}, which "
            "doesn't heed it. Leave it out, or start the server with --scheduling-policy "
            f"{_HEEDED_BY[name]}.",
            param=field,
        )
    blamed = _BLAMED.match(message)
    param = blamed[1] if blamed and blamed[1] in _FIELDS else None
    for name, other in names.items():
        message = re.sub(rf"\b{name}\b", other, message)
    said = re.sub(r"\bNone\b", "null", message)
    return ApiError(400, said, param=param and names.get(param, param))


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """The error in the shape of the API that was called."""
    request.state.error = error  # for the log and the counts
    # not request.url, which also reads the Host header, whatever that says
    if request.scope["path"].startswith("/v1/messages"):
        body = error.anthropic(getattr(request.state, "request_id", None))
    else:
        body = error.openai()
    code = {} if error.code is None else {"X-Penstock-Code": error.code}  # in Anthropic's shape too
    return JSONResponse(body, error.status, headers=error.headers | code)


def as_sentence(text: str) -> str:
    """With a stop at its end."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
