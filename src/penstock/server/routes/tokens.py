"""`/tokenize`, `/detokenize` and `/tokenizer_info`, as in vLLM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.errors import TokenizerError
from penstock.server.body import JsonRoute
from penstock.server.errors import ApiError
from penstock.server.protocol.chat import TemplateFields
from penstock.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from penstock.server.routes.common import ERRORS, admit, caller_of, rendering_of, service_of
from penstock.server.sse import dumps
from penstock.tokenizer import Tokenizer

router = APIRouter(route_class=JsonRoute)
_AT_ONCE = 4096
_LEAST_TOKENS = 131_072  # are detokenized at once, or as many as the model takes


@router.post("/tokenize", responses=ERRORS, response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """The tokens of a text, or of a conversation's prompt."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (not body.messages):
        raise ApiError(400, "Send either prompt or messages.", param="prompt")
    ticket = await admit(request, caller_of(request, "tok"))
    prompts, text, slow = service.prompts, body.prompt, False
    encode: Callable[[], list[int]]
    if text is not None:
        _check_text(body)
        special = body.add_special_tokens is not False
        encode = partial(prompts.encode, text, special)
    else:
        rendering = rendering_of(service, body)
        slow = rendering.chat_template is not service.config.chat_template
        slow |= any(message.has_pictures for message in body.messages)
        encode = partial(prompts.rendered, body.messages, rendering)
    longest = service.llm.engine.max_model_len

    def answer() -> bytes:
        ids = encode()
        said = f'{{"count":{len(ids)},"max_model_len":{longest},"tokens":[{_listed(ids)}]'
        if body.return_token_strs:
            said += f',"token_strs":[{_listed(token_strings(prompts.tokenizer, ids))}]'
        return f"{said}}}".encode()

    content = await service.compute(ticket, answer, slow=slow)
    return Response(content, media_type="application/json")


def token_strings(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The pieces as the vocabulary writes them. Raises TokenizerError for an unknown id."""
    pieces = []
    for token in ids:
        piece = tokenizer.id_to_token(token)
        if piece is None:
            raise TokenizerError(
                f"Token id {token} isn't in the vocabulary of {tokenizer.vocab_size}."
            )
        pieces.append(piece)
    return pieces


def _listed(values: Sequence[Any]) -> str:
    """As JSON, without the brackets; written in parts, since nothing else runs meanwhile."""
    parts = (values[i : i + _AT_ONCE] for i in range(0, len(values), _AT_ONCE))
    return ",".join(dumps(part)[1:-1] for part in parts)


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


@router.get("/tokenizer_info", responses=ERRORS)
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """The tokenizer's configuration, with the chat template that the server uses."""
    service = service_of(request)
    if not service.config.enable_tokenizer_info_endpoint:
        raise ApiError(
            404,
            "This server doesn't tell its tokenizer's configuration. Start it with "
            "--enable-tokenizer-info-endpoint.",
            code="tokenizer_info_not_enabled",
        )
    service.check_model(None)
    own = service.config.chat_template
    found = service.prompts.tokenizer.configuration
    return found if own is None else {**found, "chat_template": own}
