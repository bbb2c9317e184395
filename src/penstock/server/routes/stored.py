"""Responses that are kept: how they come to be, and what is told of them by their ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.server.admission import Ticket
from penstock.server.answers import unheeded
from penstock.server.errors import ApiError, unsupported
from penstock.server.protocol.answers import DeletedResponse, InputItems
from penstock.server.protocol.answers import Response as ResponseAnswer
from penstock.server.protocol.earlier import NOT_KEPT, Earlier, as_json, listed, no_response
from penstock.server.protocol.responses import Inputs, ResponsesRequest
from penstock.server.routes.common import ERRORS, admit, answers, caller_of, service_of
from penstock.server.service import Service
from penstock.server.sse import dumps
from penstock.server.stored import Stored, StoredResponses, UnknownResponse

router = APIRouter()
HEADER = "X-Penstock-Stored"
"""Of an answer that is kept: the id, which stands in a stream's head before there is more of it."""
_LARGE_BYTES = 1 << 15  # of a body
_MOST_LISTED, _USUALLY_LISTED = 100, 20  # as in the API
_LISTING: dict[str, Any] = {
    "parameters": [
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
        {
            "name": "limit",
            "in": "query",
            "schema": {
                "type": "integer",
                "minimum": 1,
                "maximum": _MOST_LISTED,
                "default": _USUALLY_LISTED,
            },
        },
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
}
"""How a list may be asked for, for the document."""


def earlier_of(service: Service, ticket: Ticket, body: Inputs) -> Earlier:
    """What a request goes on from, whose bytes count as the request's own. Raises ApiError."""
    owner, most = ticket.caller.key.name, service.config.max_body_bytes
    earlier = Earlier(service.stored, owner, most)
    earlier.find(body.previous_response_id, () if isinstance(body.input, str) else body.input or ())
    ticket.size += earlier.size
    return earlier


@dataclass(frozen=True, slots=True)
class Keep:
    """Keeps a response, once there is all of it. input: its request's items, as JSON; count: of
    these.
    """

    stored: StoredResponses
    owner: str
    input: bytes
    count: int
    previous: str | None

    def keep(self, response: dict[str, Any]) -> None:
        """If it is too large, it says that it isn't kept."""
        output = response["output"]
        head = {name: value for name, value in response.items() if name != "output"}
        one = Stored(
            response["id"],
            self.owner,
            dumps(head).encode(),
            dumps(output).encode(),
            self.input,
            self.count + len(output),
            self.previous,
        )
        if not self.stored.put(one):
            response["store"] = False


async def keep_of(
    service: Service, ticket: Ticket, body: ResponsesRequest, earlier: Earlier
) -> Keep | None:
    """How the answer is to be kept; None: it isn't.

    Raises ApiError where that was asked for and there is no room for the input alone.
    """
    stored = service.stored
    if stored is None or body.store is False:
        return None

    def kept() -> Keep:
        items = body.items(earlier)
        previous = body.previous_response_id or None
        return Keep(stored, earlier.owner, as_json(items), len(items), previous)

    keep = await service.compute(ticket, kept) if ticket.size > _LARGE_BYTES else kept()
    if len(keep.input) <= stored.capacity:
        return keep
    if body.store:
        raise ApiError(
            400,
            f"The input's items have {len(keep.input):,} bytes, and all responses that are kept "
            f"may have {stored.capacity:,} (--response-store-mib). Send store: false.",
            param="store",
        )
    return None


@router.get(
    "/v1/responses/{response_id}", responses=ERRORS | answers(ResponseAnswer, streams=False)
)
async def retrieve_response(response_id: str, request: Request) -> Response:
    """A response that was kept, as it was answered."""
    asked = _query(request, ("stream", "starting_after", "include_obfuscation"))
    if asked.get("stream", "false") != "false":
        raise unsupported("stream", "What is kept is whole.")
    one = _chain(request, response_id)[-1]
    body = one.head.removesuffix(b"}") + b',"output":' + one.output + b"}"
    return Response(body, media_type="application/json")


@router.delete(
    "/v1/responses/{response_id}", responses=ERRORS | answers(DeletedResponse, streams=False)
)
async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
    """Forget it. What goes on from it can't be gone on from any more."""
    _query(request, ())
    stored, owner = _store(request), request.state.key.name
    try:
        stored.delete(owner, response_id)
    except UnknownResponse as error:
        raise no_response(response_id) from error
    return {"id": response_id, "object": "response", "deleted": True}


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses=ERRORS | answers(InputItems, streams=False),
    openapi_extra=_LISTING,
)
async def list_input_items(response_id: str, request: Request) -> Response:
    """What it was made from, with the responses before it, the latest first."""
    asked = _query(request, ("order", "limit", "after"))
    order, limit = asked.get("order", "desc"), asked.get("limit", str(_USUALLY_LISTED))
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order[:40]!r}; it must be asc or desc.", param="order")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST_LISTED):
        raise ApiError(
            400, f"limit is {limit[:40]!r}; it must be 1 to {_MOST_LISTED}.", param="limit"
        )
    chain = _chain(request, response_id, whole=True)
    ticket = await admit(request, caller_of(request, "items"))
    ticket.size += sum(one.items_bytes for one in chain)

    def page() -> bytes:
        return _page(chain, order == "desc", int(limit), asked.get("after"))

    body = await service_of(request).compute(ticket, page, slow=True)
    return Response(body, media_type="application/json")


def _page(chain: Sequence[Stored], latest_first: bool, limit: int, after: str | None) -> bytes:
    """So many items behind the one with an id, as an answer. Raises ApiError where none has it."""
    items = listed(chain)
    if latest_first:
        items.reverse()
    if after is not None:
        at = next((i for i, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise ApiError(
                400, f"after is {after[:80]!r}, which none of the items has for an id.",
                param="after",
            )  # fmt: skip
        items = items[at + 1 :]
    page = items[:limit]
    return dumps(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(items),
        }
    ).encode()


def _query(request: Request, known: Collection[str]) -> dict[str, str]:
    """What stands behind the path's question mark. Raises ApiError for what nobody reads."""
    asked = dict(request.query_params)
    for name in asked:
        if name.removesuffix("[]") == "include":  # they have all that there is
            unheeded("include")
        elif name not in known:
            raise ApiError(
                400, f"{name[:80]!r} isn't a field of this request.", param=name[:80],
                code="unknown_parameter",
            )  # fmt: skip
    return asked


def _store(request: Request) -> StoredResponses:
    """Raises ApiError where nothing is kept."""
    stored = service_of(request).stored
    if stored is None:
        raise ApiError(404, NOT_KEPT, code="response_not_found")
    return stored


def _chain(request: Request, name: str, *, whole: bool = False) -> list[Stored]:
    """A response, behind all before it where the whole is asked for. Raises ApiError 404."""
    stored, owner = _store(request), request.state.key.name
    try:
        return stored.chain(owner, name) if whole else [stored.get(owner, name)]
    except UnknownResponse as error:
        raise no_response(error.name, name) from error
