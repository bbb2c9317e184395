"""The page at `/`, and the events that move it."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server import live
from penstock.server.errors import ApiError
from penstock.server.page import HEADERS, files
from penstock.server.routes.common import service_of, stream_response

router = APIRouter(include_in_schema=False)
static = APIRouter(include_in_schema=False)
"""The page's files, which need no model."""


@router.get("/page/events")
async def events(request: Request) -> Response:
    """The engine at work, for as long as somebody looks."""
    return stream_response(request, live.events(service_of(request)))


@static.get("/")
@static.get("/page/{name}")
async def file_of_the_page(request: Request) -> Response:
    """A file of the page."""
    file = files().get(request.url.path)
    if file is None:
        raise ApiError(404, f"There is nothing at GET {request.url.path}.")
    headers = {**HEADERS, "ETag": file.etag, "Content-Type": file.content_type}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(file.gzipped, headers=headers)
    return Response(file.body, headers=headers)


router.include_router(static)
