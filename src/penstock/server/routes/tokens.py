"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from fastapi import APIRouter, Request

from penstock.server.body import JsonRoute
from penstock.server.conversation import token_strings
from penstock.server.errors import ApiError
from penstock.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from penstock.server.routes.common import ERRORS, admit, caller_of, rendering_of, service_of

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", responses=ERRORS, response_model_exclude_none=True)
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """The tokens of a text, or of a conversation's prompt."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (not body.messages):
        raise ApiError(400, "Send either prompt or messages.", param="prompt")
    ticket = await admit(request, caller_of(request, "tok"))
    prompts, text = service.prompts, body.prompt
    if text is not None:
        ids = await service.compute(ticket, lambda: prompts.encode(text, body.add_special_tokens))
    else:
        special = body.add_special_tokens and "add_special_tokens" in body.model_fields_set
        rendering = rendering_of(service, body.model_copy(update={"add_special_tokens": special}))
        ids = await service.compute(
            ticket,
            lambda: prompts.rendered(body.messages, rendering),
            slow=rendering.chat_template is not service.config.chat_template,
        )
    return TokenizeResponse(
        count=len(ids),
        max_model_len=service.llm.engine.max_model_len,
        tokens=ids,
        token_strs=token_strings(prompts.tokenizer, ids) if body.return_token_strs else None,
    )


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """The text of tokens, special ones included."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.prompts.tokenizer
    highest = service.llm.engine.vocab_size - 1
    beyond = next((token for token in body.tokens if token > highest), None)
    if beyond is not None:
        raise ApiError(
            400, f"Token id {beyond} is above {highest}, the vocabulary's last.", param="tokens"
        )
    ticket = await admit(request, caller_of(request, "detok"))
    return DetokenizeResponse(
        prompt=await service.compute(
            ticket, lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
        )
    )
