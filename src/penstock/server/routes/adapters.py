"""Adapters that come and go while the server runs: vLLM's endpoints."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse
from starlette.responses import Response

from penstock.errors import AdapterError, ConfigError, ModelError
from penstock.server.body import JsonRoute
from penstock.server.errors import ApiError
from penstock.server.protocol.adapters import LoadLoraRequest, UnloadLoraRequest
from penstock.server.routes.common import ERRORS, Responses, service_of
from penstock.server.service import Service

router = APIRouter(route_class=JsonRoute)
_SAID: Responses = ERRORS | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def _updated(request: Request) -> Service:
    """Raises ApiError where nobody may load or unload."""
    service = service_of(request)
    if not service.config.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "Adapters of this server are those that it was started with. Start it with "
            "--allow-runtime-lora-updating to change them.",
            code="lora_updating_not_allowed",
        )
    return service


@router.post("/v1/load_lora_adapter", responses=_SAID, response_model=None)
async def load_lora_adapter(body: LoadLoraRequest, request: Request) -> Response:
    """Load an adapter from a folder of the server's machine; requests name it as their model."""
    service = _updated(request)
    name = body.lora_name
    if name in service.names or not name.strip():
        what = "is the model's own name" if name in service.names else "is no name"
        raise ApiError(400, f"{name!r} {what}.", param="lora_name")
    if any(adapter.name == name for adapter in service.adapters):
        raise ApiError(400, f"{name!r} is loaded already. Unload it first.", param="lora_name")
    try:
        await service.llm.load_lora(body.lora_name, body.lora_path)
    except (AdapterError, ConfigError, ModelError) as error:
        raise ApiError(400, str(error), param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=_SAID, response_model=None)
async def unload_lora_adapter(body: UnloadLoraRequest, request: Request) -> Response:
    """Let no request name an adapter any more; those that run with it go on."""
    service = _updated(request)
    try:
        await service.llm.unload_lora(body.lora_name)
    except (AdapterError, ConfigError) as error:
        raise ApiError(404, str(error), param="lora_name", code="model_not_found") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
