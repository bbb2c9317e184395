"""What is served, and how the server does: models, health, metrics, version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from penstock import __version__
from penstock.runtime.adapters import Adapter
from penstock.server.demand import capacity_of, demand_of
from penstock.server.errors import ApiError
from penstock.server.routes.common import ERRORS, Responses, service_of
from penstock.server.service import Service

router = APIRouter()
_NOT_WELL: Responses = ERRORS | {503: {"description": "It doesn't; the body says why."}}


def _model(service: Service, name: str) -> dict[str, Any]:
    sight = service.llm.runtime.sight
    meta = {"n_vocab": service.llm.engine.vocab_size}  # llama.cpp's
    if sight is not None:
        meta["image_token_id"] = sight.pictures.token_id
    return {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "penstock",
        "root": str(service.llm.config.model.model),
        "parent": None,
        "max_model_len": service.llm.engine.max_model_len,
        "input_modalities": ["text"] + ["image"] * (sight is not None),
        "meta": meta,
    }


def _adapter(service: Service, adapter: Adapter) -> dict[str, Any]:
    """As vLLM has it: of the model that it belongs to."""
    of = {"root": str(adapter.folder), "parent": service.names[0]}
    return _model(service, adapter.name) | of


@router.get("/v1/models", responses=ERRORS)
async def list_models(request: Request) -> dict[str, Any]:
    """The names that the model goes by."""
    service = service_of(request)
    service.check_model(None)
    own = [_model(service, name) for name in service.names]
    return {"object": "list", "data": own + [_adapter(service, x) for x in service.adapters]}


@router.get("/v1/models/{name:path}", responses=ERRORS)
async def retrieve_model(name: str, request: Request) -> dict[str, Any]:
    """One of them."""
    service = service_of(request)
    known = service.check_model(name)
    adapter = next((x for x in service.adapters if x.name == known), None)
    return _model(service, known) if adapter is None else _adapter(service, adapter)


@router.get("/health", responses=_NOT_WELL)
async def health(request: Request) -> Response:
    """200 while the process serves; 503 when its engine has stopped."""
    service = service_of(request)
    llm = service.engine_or_none
    dead = service.state == "failed" or (llm is not None and llm.death is not None)
    return JSONResponse({"status": "dead" if dead else "ok"}, 503 if dead else 200)


@router.get("/ready", responses=_NOT_WELL)
async def ready(request: Request) -> Response:
    """200 when the model is loaded and the engine steps; 503 and why otherwise."""
    trouble = service_of(request).trouble()
    if trouble is not None:
        return JSONResponse({"status": "not ready", "reason": trouble}, 503)
    return JSONResponse({"status": "ready"})


@router.get("/metrics", responses=ERRORS, response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version", responses=ERRORS)
async def version() -> dict[str, str]:
    """Penstock's."""
    return {"version": __version__}


@router.get("/load", responses=ERRORS)
async def load(request: Request) -> dict[str, Any]:
    """Requests that were sent and haven't ended, as in vLLM; sequences, and how many fit."""
    service = service_of(request)
    found: dict[str, Any] = {"server_load": len(service.inflight)}
    llm = service.engine_or_none
    if llm is not None:
        stats, most = llm.stats(), llm.config.scheduler.max_num_seqs
        found |= {name: stats[name] for name in ("running", "waiting", "swapped")}
        found |= {"capacity": capacity_of(stats, most), "demand": demand_of(stats, most)}
    return found


@router.post("/reset_prefix_cache", responses=ERRORS)
async def reset_prefix_cache(request: Request) -> dict[str, str]:
    """Forget every cached prefix that no request uses."""
    service = service_of(request)
    try:
        await service.llm.reset_prefix_cache()
    except TimeoutError:
        raise ApiError(503, "The engine didn't answer in time.", retry_after_s=1) from None
    return {"status": "ok"}
