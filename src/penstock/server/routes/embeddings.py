"""`/v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.server.body import JsonRoute
from penstock.server.prompt import EMBEDDING
from penstock.server.protocol.answers import EmbeddingList
from penstock.server.protocol.embeddings import EmbeddingRequest
from penstock.server.routes.common import ERRORS, admit, answers, caller_of, service_of
from penstock.server.routes.completions import prompts_in, prompts_of
from penstock.server.sse import unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings", responses=ERRORS | answers(EmbeddingList, streams=False))
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """Pooled hidden states of one text or several, as OpenAI's API returns embeddings."""
    service = service_of(request)
    model = service.check_model(body.model)
    caller = caller_of(request, "embd", body.user, body.request_id)
    several = prompts_in(service, body.input, EMBEDDING.field)
    ticket = await admit(request, caller, len(several))
    prompts = await prompts_of(
        service, ticket, several, body.truncate_prompt_tokens, body.add_special_tokens, EMBEDDING
    )
    chosen = {
        "pooling_type": body.pooling_type,
        "normalize": body.normalize,
        "dimensions": body.dimensions,
    }
    vectors = await unless_gone(
        request.receive,
        service.embed(
            ticket, prompts, {k: v for k, v in chosen.items() if v is not None}, body, model
        ),
    )
    counted = sum(len(prompt.tokens) for prompt in prompts)
    answer: dict[str, Any] = {
        "object": "list",
        "model": model,
        "data": [
            {"object": "embedding", "index": i, "embedding": _encoded(v, body.encoding_format)}
            for i, v in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": counted, "total_tokens": counted},
    }
    return JSONResponse(answer)


def _encoded(vector: list[float], form: str | None) -> list[float] | str:
    """As numbers, or as base64 of little-endian float32."""
    if form != "base64":
        return vector
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
