"""What the endpoints share: who calls, and how a conversation becomes a prompt."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request

from penstock.engine import RequestOutput
from penstock.errors import RequestError
from penstock.server.admission import Caller, Ticket
from penstock.server.answers import broken, unheeded
from penstock.server.compaction import Spent
from penstock.server.errors import ApiError, as_api_error
from penstock.server.middleware import REQUEST_ID
from penstock.server.prompt import (
    CHAT,
    PromptText,
    Rendering,
    Source,
    left_by_compaction,
)
from penstock.server.protocol.chat import Message, TemplateFields
from penstock.server.protocol.common import Body, SamplingFields
from penstock.server.protocol.errors import ErrorBody, MessagesErrorBody
from penstock.server.protocol.structure import StructureFields
from penstock.server.service import Service
from penstock.server.sse import EventStream, last_event
from penstock.speculate import DraftCounts

_MOST_CHARACTERS = 10_000

_STATUSES: dict[int | str, str] = {
    400: "The request is wrong; the message says how.",
    401: "The API key is missing or isn't known.",
    403: "The Host header isn't one that is answered.",
    404: "No such model, or no such response.",
    408: "It took longer than the server allows.",
    413: "The body is too large.",
    415: "The body isn't declared to be JSON.",
    429: "Too many requests; Retry-After says when to try again.",
    500: "The engine failed at this request.",
    503: "The model isn't loaded, or the server shuts down.",
    "4XX": "Anything else that is wrong with the request.",
}
Responses = dict[int | str, dict[str, Any]]
ERRORS: Responses = {
    status: {"description": what, "model": ErrorBody} for status, what in _STATUSES.items()
}
MESSAGES_ERRORS: Responses = {
    status: {"description": what, "model": MessagesErrorBody} for status, what in _STATUSES.items()
}


_EVENT: dict[str, Any] = {
    "type": "object",
    "description": "One event; data is JSON, but [DONE] at the end of the completions.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def answers(model: type[Body], *, streams: bool = True) -> Responses:
    """The document's description of a 200; the answers themselves aren't held against it."""
    if not streams:
        return {200: {"description": "The answer.", "model": model}}
    return {
        200: {
            "description": "The answer; with stream: true as server-sent events.",
            "model": model,
            "content": {"text/event-stream": {"schema": dict(_EVENT)}},
        }
    }


def service_of(request: Request) -> Service:
    """The application's service."""
    service: Service = request.app.state.service
    return service


def caller_of(
    request: Request, prefix: str, user: str | None = None, named: str | None = None
) -> Caller:
    """Who calls, under an id for the engine that nobody else can choose.

    named: the body's `request_id`, which counts for more than the header's.
    """
    given: str = request.state.request_id if named is None else named
    if not REQUEST_ID.fullmatch(given):
        raise ApiError(
            400,
            "request_id may have up to 128 letters, digits and any of . _ : -",
            param="request_id",
        )
    return Caller(
        key=request.state.key,
        request_id=f"{prefix}-{given}-{uuid.uuid4().hex[:16]}",
        endpoint=request.url.path,
        traceparent=request.headers.get("traceparent"),
        user=user,
    )


async def admit(request: Request, caller: Caller, prompts: int = 1, samples: int = 1) -> Ticket:
    """Let the request in; what it holds is let go when it has been answered.

    samples: of each prompt. Raises ApiError.
    """
    size = len(await request.body())  # which was read before
    ticket = service_of(request).admit(caller, request.receive, size, prompts, samples)
    request.state.ticket = ticket
    return ticket


def stream_response(
    request: Request,
    events: AsyncIterator[bytes],
    outputs: AsyncGenerator[Any, None] | None = None,
) -> EventStream:
    """Events as they come; an error in mid-stream becomes the last of them, in its API's shape.

    outputs: what they are made of, which ends with them.
    """

    def explain(error: Exception) -> bytes:
        return last_event(request.scope["path"], broken(error))

    return EventStream(events, explain, outputs)


def check_stops(service: Service, stop: str | Sequence[str] | None, field: str = "stop") -> None:
    """Raises ApiError for more stop strings than a request may have."""
    most = service.config.max_stop_strings
    if stop is not None and not isinstance(stop, str) and len(stop) > most:
        raise ApiError(
            400, f"{field} has {len(stop):,} strings; at most {most} are looked for.", param=field
        )


def check_words(service: Service, body: SamplingFields) -> None:
    """Raises ApiError for more stop strings, banned words or token ids than there can be use for.

    Each is work between two steps of the engine, which all the others would wait for.
    """
    check_stops(service, body.stop)
    for field in ("bad_words", "dry_sequence_breakers"):
        words = getattr(body, field)
        check_stops(service, words, field)
        letters = sum(map(len, words or ()))
        if letters > _MOST_CHARACTERS:
            raise ApiError(
                400,
                f"{field} has {letters:,} characters; at most {_MOST_CHARACTERS:,} are read.",
                param=field,
            )
    vocabulary = service.llm.engine.vocab_size
    for field in ("allowed_token_ids", "stop_token_ids", "logit_bias"):
        count = len(getattr(body, field) or ())
        if count > vocabulary:
            raise ApiError(
                400,
                f"{field} has {count:,} token ids, the vocabulary only {vocabulary:,}.",
                param=field,
            )


def check_samples(service: Service, n: int | None) -> None:
    """Raises ApiError for more samples of a prompt than can run at once.

    The engine would refuse them too, but by then something is held for each.
    """
    try:
        service.llm.engine.scheduler.refusals.check_samples(n or 1)
    except RequestError as error:
        raise as_api_error(error) from error


async def form_of(service: Service, ticket: Ticket, body: StructureFields) -> dict[str, Any]:
    """The sampling parameters of the form that an answer must have, compiled. Raises ApiError."""
    structure, field = body.structure()
    if structure is None:
        return {}
    await service.compile(ticket, structure, field)
    return {"structured_outputs": structure}


def rendering_of(service: Service, body: TemplateFields) -> Rendering:
    """How the body wants its messages written. Raises ApiError for a template of its own."""
    if body.chat_template is not None and not service.config.trust_request_chat_template:
        raise ApiError(
            400,
            "A request's own chat_template is refused. Start the server with "
            "--trust-request-chat-template to take them.",
            param="chat_template",
        )
    if body.chat_template == "":
        raise ApiError(400, "chat_template is empty. Leave it out.", param="chat_template")
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message goes on with the last message, add_generation_prompt starts a "
            "new one. Set one of them.",
            param="continue_final_message",
        )
    return Rendering(
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        add_special_tokens=bool(body.add_special_tokens),
        chat_template=body.chat_template or service.config.chat_template,
        kwargs=body.chat_template_kwargs,
        documents=body.documents,
    )


async def hinted(
    request: Request, ticket: Ticket, rendering: Rendering, hints: Mapping[str, Mapping[str, Any]]
) -> Rendering:
    """The rendering with what a request hints at, where the template reads it and isn't told
    otherwise. hints: by the request's names for them, variables of templates.
    """
    service, given = service_of(request), dict(rendering.kwargs or {})
    template = rendering.chat_template
    own = template is service.config.chat_template
    for name, variables in hints.items():
        find = partial(service.prompts.hints.heeded, template, variables)
        heeded = find() if own else await service.compute(ticket, find, slow=True)
        # not to reason is what models do that don't
        if not heeded and (any(variables.values()) or service.tooling.reasons):
            unheeded(name)
        given = heeded | given
    return replace(rendering, kwargs=given or None)


async def prompt_of_messages(
    request: Request,
    ticket: Ticket,
    messages: Sequence[Message],
    rendering: Rendering,
    *,
    truncation: str | None,
    retention: float | None = None,
    reserve: int | None,
    keep: int | None = None,
    source: Source = CHAT,
    compacts: bool = False,
    spent: Spent | None = None,
) -> PromptText:
    """A conversation's prompt, made beside the event loop.

    compacts: older turns are summed up; spent: on summaries in it. The answer's headers say of how
    many messages one is (`X-Penstock-Compacted-Messages`), and how many were left out to make the
    prompt fit (`X-Penstock-Dropped-Messages`).
    """
    service = service_of(request)
    own = rendering.chat_template is not service.config.chat_template  # the caller's
    prompt = await service.compute(
        ticket,
        lambda: service.prompts.of_messages(
            messages,
            rendering,
            truncation=truncation or service.config.truncation,
            retention=retention or service.config.truncation_retention,
            reserve=reserve or 1,
            keep=keep,
            source=left_by_compaction(source) if compacts else source,
        ),
        slow=own or any(message.has_pictures for message in messages),
    )
    if prompt.unpinned:
        unheeded("cache_control")
    headers = {}
    if prompt.dropped:
        headers["X-Penstock-Dropped-Messages"] = str(prompt.dropped)
    if spent is not None:
        headers["X-Penstock-Compacted-Messages"] = str(spent.messages)
    if headers:
        request.state.answer_headers = headers
    return prompt if spent is None else replace(prompt, spent=spent)


async def last_of(outputs: AsyncIterator[tuple[int, RequestOutput]]) -> RequestOutput:
    """What is there when one prompt's samples have all ended."""
    last: RequestOutput | None = None
    async for _, output in outputs:
        last = output
    assert last is not None  # an engine that ends without an output raises
    return last


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int | None = None,
    predicted: DraftCounts | None = None,
    spent: Spent | None = None,
) -> dict[str, Any]:
    """`usage` of the completions. predicted: what was guessed by a prediction that was given;
    spent: on summaries, which counts too."""
    said = completion_tokens
    if spent is not None:
        prompt_tokens += spent.input_tokens
        completion_tokens += spent.output_tokens
        cached_tokens = (cached_tokens or 0) + spent.cached_tokens
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens or 0},
    }
    if predicted is not None:
        # those after a stop were right, and aren't there
        right = min(predicted.accepted_tokens, said)
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": right,
            "rejected_prediction_tokens": predicted.draft_tokens - right,
        }
    return found


def made(output: RequestOutput) -> int:
    """Tokens of all samples."""
    return sum(len(sample.token_ids) for sample in output.outputs)


def now() -> int:
    """Unix seconds."""
    return int(time.time())
