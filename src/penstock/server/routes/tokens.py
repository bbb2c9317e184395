"""`/tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from fastapi import APIRouter, Request

from penstock.server.body import JsonRoute
from penstock.server.conversation import token_strings
from penstock.server.errors import ApiError
from penstock.server.protocol.chat import TemplateFields
from penstock.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from penstock.server.routes.common import ERRORS, admit, caller_of, rendering_of, service_of

router = APIRouter(route_class=JsonRoute)
_LEAST_TOKENS = 131_072  # are detokenized at once, or as many as the model takes


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
        _check_text(body)
        special = body.add_special_tokens is not False
        ids = await service.compute(ticket, lambda: prompts.encode(text, special))
    else:
        rendering = rendering_of(service, body)
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


def _check_text(body: TokenizeRequest) -> None:
    """Raises ApiError for what only a conversation's template could heed."""
    of_template = TemplateFields.model_fields.keys() - {"messages", "add_special_tokens"}
    given = {name for name in body.model_fields_set if getattr(body, name) not in ([], {})}
    for field in sorted(of_template & given):
        raise ApiError(
            400, f"{field} is for messages; a prompt is read as it is. Leave it out.", param=field
        )


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """The text of tokens, special ones included."""
    service = service_of(request)
    service.check_model(body.model)
    tokenizer = service.prompts.tokenizer
    most = max(service.llm.engine.max_model_len, _LEAST_TOKENS)
    if len(body.tokens) > most:
        said = f"tokens has {len(body.tokens):,} ids; at most {most:,} are read."
        raise ApiError(400, said, param="tokens")
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
