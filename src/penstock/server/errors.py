"""What goes wrong, as the APIs say it: a status and a body in OpenAI's or Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from penstock.errors import (
    EngineDeadError,
    MissingExtraError,
    PenstockError,
    RequestError,
    RequestTimeoutError,
    TokenizerError,
)

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
_NOT_FIELDS = ("function-", "list[", "dict[")  # how an error's place names types


def _types(status: int) -> tuple[str, str]:
    return _TYPES.get(status, _CLIENT if status < 500 else _SERVER)


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
    ) -> None:
        super().__init__(message)
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
        body = {"type": "error", "error": {"type": kind, "message": message}}
        return body | ({"request_id": request_id} if request_id else {})


def unsupported(field: str, why: str = "") -> ApiError:
    """400 for a field that the API has and Penstock doesn't."""
    reason = f" {why}" if why else ""
    return ApiError(
        400,
        f"{field!r} isn't supported by Penstock yet.{reason} Leave it out.",
        param=field,
        code="unsupported_parameter",
    )


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error that came from the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, MissingExtraError):
        return ApiError(500, str(error))
    if isinstance(error, RequestTimeoutError):
        return ApiError(408, str(error), code="request_timeout")
    if isinstance(error, RequestError | TokenizerError):
        return ApiError(400, str(error))
    if isinstance(error, PenstockError):
        return ApiError(500, str(error))
    return ApiError(500, f"{type(error).__name__} in the server. Its log says more.")


def error_response(request: Request, error: ApiError) -> JSONResponse:
    """The error in the shape of the API that was called."""
    request.state.error = error  # for the log and the counts
    # not request.url, which also reads the Host header, whatever that says
    if request.scope["path"].startswith("/v1/messages"):
        body = error.anthropic(getattr(request.state, "request_id", None))
    else:
        body = error.openai()
    return JSONResponse(body, error.status, headers=error.headers)


def install_handlers(app: FastAPI) -> None:
    """Answer every exception in the APIs' own shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return error_response(request, error)

    @app.exception_handler(PenstockError)
    async def penstock_error(request: Request, error: PenstockError) -> JSONResponse:
        return error_response(request, as_api_error(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(request, describe(error, request.headers.get("content-type", "")))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, ApiError):  # raised while the body was read
            return error_response(request, error.__cause__)
        made = ApiError(error.status_code, _sentence(str(error.detail)), headers=error.headers)
        path = request.scope["path"]
        if error.status_code == 404:
            made.message = f"There is nothing at {request.method} {path}."
        elif error.status_code == 405:
            made.message = f"{path} doesn't take {request.method}."
        return error_response(request, made)


def describe(error: RequestValidationError, content_type: str) -> ApiError:
    """The first thing that is wrong with a body: which field, what it is, what it must be."""
    problems = error.errors()
    # Of a field that may be of several types, the type that the value is most like.
    field_problems = [x for x in problems if x["loc"][:2] == problems[0]["loc"][:2]]
    problem = max(field_problems, key=lambda x: len(x["loc"]))
    place = [str(part) for part in problem["loc"] if part != "body"]
    kind, message = problem["type"], problem["msg"]
    if isinstance(problem.get("input"), bytes) and not place:
        return ApiError(
            415,
            f"The body's Content-Type is {content_type[:80]!r}; send JSON as application/json.",
            code="unsupported_media_type",
        )
    field = ".".join(x for x in place if x != "str" and not x.startswith(_NOT_FIELDS))
    if kind == "extra_forbidden":
        return ApiError(
            400, f"{field!r} isn't a field of this request.", param=field, code="unknown_parameter"
        )
    if kind == "missing":
        said = f"{field!r} is missing." if field else "The body is missing; send JSON."
        return ApiError(400, said, param=field or None, code="missing_required_parameter")
    given = problem.get("input")
    shown = repr(given) if isinstance(given, int | float | bool | str) else type(given).__name__
    if len(shown) > 80:
        shown = shown[:80] + "…"
    text = message.removeprefix("Value error, ")
    said = (
        f"{field}: {_sentence(text)}"
        if kind == "value_error"
        else (f"{field or 'The body'} is {shown}: {_sentence(text)}")
    )
    return ApiError(400, said, param=field or None, code="invalid_value")


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
