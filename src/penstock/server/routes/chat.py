"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.engine import RequestOutput
from penstock.server.admission import Caller, Ticket
from penstock.server.body import JsonRoute
from penstock.server.choices import Delta, Reader, TokenNames, prompt_logprobs, whole
from penstock.server.errors import ApiError, unsupported
from penstock.server.protocol.answers import ChatCompletion
from penstock.server.protocol.chat import ChatRequest
from penstock.server.routes.common import (
    ERRORS,
    admit,
    answers,
    caller_of,
    check_words,
    form_of,
    last_of,
    made,
    now,
    prompt_of_messages,
    rendering_of,
    service_of,
    stream_response,
    usage,
)
from penstock.server.service import Service, Work, priced
from penstock.server.sse import DONE, dumps, event, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions", responses=ERRORS | answers(ChatCompletion))
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, as OpenAI's API does."""
    service = service_of(request)
    model = service.check_model(body.model)
    caller = caller_of(request, "chatcmpl", body.user or body.safety_identifier, body.request_id)
    _check(service, body)
    ticket = await admit(request, caller, samples=body.n or 1)
    work = await _work(request, body, ticket)
    names = TokenNames(service.prompts.tokenizer, bool(body.return_tokens_as_token_ids))
    outputs = service.stream(ticket, [work])
    if body.stream:
        return stream_response(_chunks(outputs, body, caller, work, model, names), outputs)
    output = await unless_gone(request.receive, last_of(outputs))
    return JSONResponse(_whole(body, caller, output, model, names))


def _check(service: Service, body: ChatRequest) -> None:
    check_words(service, body)
    if body.echo:
        raise unsupported("echo", "A conversation's prompt isn't repeated.")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs can't be streamed.", param="prompt_logprobs")


async def _work(request: Request, body: ChatRequest, ticket: Ticket) -> Work:
    service = service_of(request)
    limit = body.limit
    rendering = rendering_of(service, body)
    prompt = await prompt_of_messages(
        request,
        ticket,
        body.messages,
        rendering,
        truncation=body.truncation,
        reserve=limit,
        keep=body.truncate_prompt_tokens,
    )
    form = await form_of(service, ticket, body)
    params = body.sampling(
        service.defaults,
        {"max_tokens": body.limit_field},
        n=body.n or 1,
        max_tokens=service.prompts.limit(prompt, limit, body.limit_field),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **form,
    )
    return Work(prompt, params, service.options(ticket.caller, body, prompt))


def _whole(
    body: ChatRequest, caller: Caller, output: RequestOutput, model: str, names: TokenNames
) -> dict[str, Any]:
    choices = []
    for sample in output.outputs:
        delta = whole(sample)
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": _logprobs(delta, body, names),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        choices.append(choice)
    answer: dict[str, Any] = {
        "id": caller.request_id,
        "object": "chat.completion",
        "created": now(),
        "model": model,
        "choices": choices,
        "usage": usage(len(output.prompt_token_ids), made(output), output.metrics.cached_tokens),
        "penstock": priced(output),
    }
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return answer


def _logprobs(delta: Delta, body: ChatRequest, names: TokenNames) -> dict[str, Any] | None:
    if delta.logprobs is None:
        return None
    return names.chat(delta.logprobs, body.top_logprobs or 0)


async def _chunks(
    outputs: AsyncIterator[tuple[int, RequestOutput]],
    body: ChatRequest,
    caller: Caller,
    work: Work,
    model: str,
    names: TokenNames,
) -> AsyncIterator[bytes]:
    """`chat.completion.chunk`s: the role, the text as it comes, the end, the usage."""
    options = body.stream_options
    counting = options is not None and options.include_usage
    running = options is not None and options.continuous_usage_stats
    head: dict[str, Any] = {
        "id": caller.request_id,
        "object": "chat.completion.chunk",
        "created": now(),
        "model": model,
    }
    # What is the same in every chunk of text is written once.
    opening = dumps(head)[:-1] + ',"choices":[{"index":'
    plain = not (running or counting or body.logprobs or body.return_token_ids)
    reader = Reader()
    output: RequestOutput | None = None
    async for _, output in outputs:
        if not reader.started:  # the engine has taken it; what it refuses has a status instead
            for index in range(work.params.n):
                delta: dict[str, Any] = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield event(head | {"choices": [first]} | ({"usage": None} if counting else {}))
        for new in reader.read(output):
            if plain and new.finish_reason is None:
                if new.text:
                    text = dumps(new.text)
                    yield (
                        f'data: {opening}{new.index},"delta":{{"content":{text}}},'
                        '"logprobs":null,"finish_reason":null}]}\n\n'
                    ).encode()
                continue
            if not (new.text or new.finish_reason or new.logprobs or body.return_token_ids):
                continue
            choice: dict[str, Any] = {
                "index": new.index,
                "delta": {"content": new.text} if new.text or new.finish_reason is None else {},
                "logprobs": _logprobs(new, body, names),
                "finish_reason": new.finish_reason,
            }
            if new.finish_reason is not None:
                choice["stop_reason"] = new.stop_reason
            if body.return_token_ids:
                choice["token_ids"] = new.token_ids
            chunk = head | {"choices": [choice]}
            if running:
                chunk["usage"] = usage(len(work.prompt.tokens), made(output))
            elif counting:
                chunk["usage"] = None
            yield event(chunk)
    if counting and output is not None:
        total = usage(len(work.prompt.tokens), made(output), output.metrics.cached_tokens)
        yield event(head | {"choices": [], "usage": total, "penstock": priced(output)})
    yield DONE
