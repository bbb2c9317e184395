"""Every exception becomes an answer in the shape of the API that was called."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from penstock.errors import PenstockError
from penstock.server.errors import ApiError, as_api_error, as_sentence, error_response
from penstock.server.sse import client_left
from penstock.server.validation import describe


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
        kind = request.headers.get("content-type", "")
        return error_response(request, describe(error.errors(), kind, sees=_sees(request)))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        if isinstance(error.__cause__, ApiError):  # raised while the body was read
            return error_response(request, error.__cause__)
        if isinstance(error.__cause__, ClientDisconnect):  # nobody reads what is answered
            return error_response(request, client_left())
        made = ApiError(error.status_code, as_sentence(str(error.detail)), headers=error.headers)
        path = request.scope["path"]
        if error.status_code == 404:
            made.message = f"There is nothing at {request.method} {path}."
        elif error.status_code == 405:
            made.message = f"{path} doesn't take {request.method}."
        return error_response(request, made)


def _sees(request: Request) -> bool:
    """Whether pictures are taken, as far as is known: a fleet has no model of its own."""
    llm = getattr(request.app.state.service, "engine_or_none", None)
    return llm is None or llm.runtime.sight is not None
