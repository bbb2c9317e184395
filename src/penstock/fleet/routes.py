"""The fleet's endpoints: those of its models, handed on, and its own."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field
from starlette.responses import Response

from penstock import __version__
from penstock.fleet.ask import Ask
from penstock.fleet.fleet import Fleet
from penstock.fleet.group import Group
from penstock.fleet.passage import Passage, passed_on, watch
from penstock.fleet.stages import answer_in_stages
from penstock.http1 import ExchangeError
from penstock.server.body import JsonRoute
from penstock.server.errors import ApiError
from penstock.server.protocol.common import Body
from penstock.server.protocol.earlier import no_response
from penstock.server.sse import unless_gone

RESET_S = 35.0  # an instance answers between two steps
router = APIRouter(route_class=JsonRoute)
HANDED_ON = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
_RESPONSES = "/v1/responses"
_KEPT_BACK = frozenset(
    ("accept-encoding", "authorization", "connection", "content-length", "cookie", "expect", "host",
     "keep-alive", "origin", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
     "x-api-key", "x-request-id")
)  # fmt: skip
"""Headers between the caller and the fleet (RFC 9110, 7.6.1), and its keys."""


def fleet_of(request: Request) -> Fleet:
    """The application's fleet."""
    fleet: Fleet = request.app.state.service
    return fleet


def _headers(request: Request) -> list[tuple[str, str]]:
    """Those that an instance is to know."""
    headers = [(k, v) for k, v in request.headers.items() if k not in _KEPT_BACK]
    return [*headers, ("x-request-id", request.state.request_id)]


async def hand_on(request: Request) -> Response:
    """A request to a model."""
    fleet, key = fleet_of(request), request.state.key
    ask = Ask.of(request.scope["path"], await request.body(), _headers(request))
    name = ask.model
    ensemble = fleet.ensembles.get(name) if name is not None else None
    if ensemble is not None:
        return await answer_in_stages(request, fleet, ensemble, ask)
    group = fleet.group(name)
    at = None
    if ask.path.startswith(_RESPONSES):
        at = fleet.kept.worker_for(ask, group.name, key.name)
    ask.wish(key.limits, group.config.policy)
    if ask.streams:
        ask.settle_seed()
    passage = Passage(fleet, group, ask, key, at)
    request.state.ticket = passage
    answer = await unless_gone(request.receive, passage.answer())
    request.state.answer_headers = passage.headers
    return answer


for path in HANDED_ON:
    router.add_api_route(path, hand_on, methods=["POST"], response_model=None)


async def of_kept(response_id: str, request: Request) -> Response:
    """What is asked of a response by its id: of the instance that keeps it."""
    fleet, key = fleet_of(request), request.state.key
    place = fleet.kept.get(response_id, key.name)
    group = None if place is None else fleet.groups.get(place.model)
    worker = None if place is None or group is None else group.keeper(place.worker)
    if worker is None:
        raise no_response(response_id)
    query = request.scope["query_string"].decode("latin-1")
    target = request.scope["path"] + (f"?{query}" if query else "")
    answer = await passed_on(worker, request.method, target, _headers(request))
    if request.method == "DELETE" and answer.status_code == 200:
        fleet.kept.forget(response_id)
    return answer


_KEPT = f"{_RESPONSES}/{{response_id}}"
router.add_api_route(_KEPT, of_kept, methods=["GET"], response_model=None)
router.add_api_route(_KEPT, of_kept, methods=["DELETE"], response_model=None)
router.add_api_route(f"{_KEPT}/input_items", of_kept, methods=["GET"], response_model=None)


class ModelName(Body):
    """Which model."""

    model: str = Field(min_length=1, max_length=256)


@router.post("/models/load")
async def load_model(body: ModelName, request: Request) -> dict[str, bool]:
    """Start a model that isn't loaded, as llama.cpp's server does; answers before it is ready."""
    await fleet_of(request).load(body.model)
    return {"success": True}


@router.post("/models/unload")
async def unload_model(body: ModelName, request: Request) -> dict[str, bool]:
    """End a model's instances, once they have answered whom they have."""
    fleet_of(request).unload(body.model)
    return {"success": True}


def _entries(group: Group) -> list[dict[str, Any]]:
    """A model and its adapters, as `/v1/models` has them."""
    told = {"status": {"value": group.state}}
    reason = group.why if group.state == "failed" else group.lack
    if reason:
        told["status"]["reason"] = reason
    known = {str(x["id"]): x for x in group.listed if x["id"] in group.names}
    plain = {
        "id": group.name,
        "object": "model",
        "created": group.created,
        "owned_by": "penstock",
        "root": group.config.model,
        "parent": None,
    }
    return [known.get(name, plain) | {"id": name} | told for name in group.names]


def _models(fleet: Fleet) -> list[dict[str, Any]]:
    found = [entry for group in fleet.groups.values() for entry in _entries(group)]
    for ensemble in fleet.ensembles.values():
        states = {fleet.groups[stage.model].state for stage in ensemble.stages}
        state = "loaded" if states == {"loaded"} else "unloaded"
        found.append(
            {
                "id": ensemble.name,
                "object": "model",
                "created": next(iter(fleet.groups.values())).created,
                "owned_by": "penstock",
                "root": None,
                "parent": None,
                "stages": [[stage.name, stage.model] for stage in ensemble.stages],
                "status": {"value": state},
            }
        )
    return found


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All models, adapters and ensembles; `status` says whether a request would wait."""
    return {"object": "list", "data": _models(fleet_of(request))}


@router.get("/v1/models/{name:path}")
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    fleet = fleet_of(request)
    found = next((x for x in _models(fleet) if x["id"] == name), None)
    if found is None:
        fleet.group(name)  # which knows what to say
        raise ApiError(404, f"{name[:80]!r} isn't listed yet.", code="model_not_found")
    return found


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the fleet serves, whatever its models do."""
    failed = fleet_of(request).state == "failed"
    return JSONResponse({"status": "dead" if failed else "ok"}, 503 if failed else 200)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when every model that always runs has an instance that takes requests."""
    fleet = fleet_of(request)
    lacking = [x for x in fleet.groups.values() if not x.ready and not x.may_rest]
    if fleet.state in ("ready", "starting") and not lacking:
        return JSONResponse({"status": "ready"})
    reason = " ".join(f"{x.name!r} is {x.state}. {x.why}".strip() for x in lacking)
    if fleet.state not in ("ready", "starting"):
        reason = f"The fleet is {fleet.state}. {reason}".strip()
    return JSONResponse({"status": "not ready", "reason": reason}, 503)


@router.get("/fleet")
async def status(request: Request) -> dict[str, Any]:
    """Models, instances, what they have to do, and what would be enough."""
    fleet = fleet_of(request)
    return {
        "state": fleet.state,
        "policy": fleet.fleet_config.policy,
        "running": fleet.running,
        "models": [group.describe() for group in fleet.groups.values()],
    }


@router.get("/load")
async def load(request: Request) -> dict[str, Any]:
    """Requests that were sent and haven't ended, as in vLLM; of all models."""
    fleet = fleet_of(request)
    demands = [x.demand for x in fleet.groups.values() if not math.isinf(x.demand)]
    return {"server_load": fleet.running, "demand": max(demands, default=0.0)}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus: the fleet's, and all instances'."""
    return Response(await fleet_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version() -> dict[str, str]:
    """Penstock's."""
    return {"version": __version__}


@router.get("/page/events", include_in_schema=False)
async def events(request: Request, model: str | None = None) -> Response:
    """An instance of a model at work, for the page; of an ensemble its last stage's."""
    fleet = fleet_of(request)
    ensemble = fleet.ensembles.get(model) if model is not None else None
    group = fleet.group(ensemble.stages[-1].model if ensemble else model)
    if not group.ready:
        said = f"{group.name!r} is {group.state}."
        raise ApiError(503, said, code="model_not_ready", retry_after_s=5)
    request.state.ticket, answer = await watch(group.ready[0], lambda: fleet.state == "draining")
    return answer


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Every instance forgets every cached prefix that no request uses."""
    fleet = fleet_of(request)
    told: dict[str, int | str] = {}
    for group in fleet.everyone:
        for worker in group.ready:
            try:
                told[worker.name], _ = await worker.link.post("/reset_prefix_cache", RESET_S)
            except ExchangeError as failure:
                told[worker.name] = str(failure)
            group.chooser.forget(worker)
    await asyncio.to_thread(fleet.forget_prompts)
    well = all(x == 200 for x in told.values())
    return JSONResponse(
        {"status": "ok" if well else "failed", "workers": told}, 200 if well else 502
    )
