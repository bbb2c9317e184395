"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.engine import RequestOutput
from penstock.sampling import BeamSearchParams, SamplingParams
from penstock.server.admission import Caller, Ticket
from penstock.server.answers import unheeded
from penstock.server.body import JsonRoute
from penstock.server.choices import Delta, Reader, TokenNames, prompt_logprobs, whole
from penstock.server.compaction import Conversation, Wanted
from penstock.server.errors import ApiError, unsupported
from penstock.server.hints import effort_hint, thinking
from penstock.server.prompt import CHAT, PromptText
from penstock.server.protocol.answers import ChatCompletion
from penstock.server.protocol.chat import ChatRequest, RetentionRatio
from penstock.server.routes.common import (
    ERRORS,
    admit,
    answers,
    caller_of,
    check_samples,
    check_words,
    hinted,
    last_of,
    made,
    now,
    prompt_of_messages,
    rendering_of,
    service_of,
    stream_response,
    usage,
)
from penstock.server.routes.compaction import compacted, wanted
from penstock.server.routes.tools import (
    Answering,
    Calls,
    answering,
    in_older_words,
    message_of,
    plan_of,
    sampling_of,
    telling,
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
    work, how = await _work(request, body, ticket, model)
    names = TokenNames(service.prompts.tokenizer, bool(body.return_tokens_as_token_ids))
    outputs = service.stream(ticket, [work])
    if body.stream:
        chunks = _Chunks(body, caller, work, model, names, how)
        return stream_response(request, chunks.events(outputs), outputs)
    output = await unless_gone(request.receive, last_of(outputs))
    return JSONResponse(_whole(body, caller, work, output, model, names, how))


def _check(service: Service, body: ChatRequest) -> None:
    check_words(service, body)
    body.check_search(stream=body.stream)
    if body.echo:
        raise unsupported("echo", "A conversation's prompt isn't repeated.")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs can't be streamed.", param="prompt_logprobs")
    check_samples(service, body.n)


async def _work(
    request: Request, body: ChatRequest, ticket: Ticket, model: str
) -> tuple[Work, Answering]:
    service = service_of(request)
    limit = body.limit
    rendering = rendering_of(service, body)
    rendering = await hinted(request, ticket, rendering, _hints(body))
    plan = await plan_of(request, ticket, rendering, body)
    told = telling(rendering, plan)
    truncation = "auto" if isinstance(body.truncation, RetentionRatio) else body.truncation
    when = _wanted(service, body)
    short = await compacted(
        request,
        ticket,
        Conversation(body.messages),
        told,
        when,
        body=body,
        model=model,
        reserve=limit,
        source=CHAT,
        check=lambda: _check_sampling(service, body),
        truncation=truncation,
    )
    prompt = await prompt_of_messages(
        request,
        ticket,
        short.conversation.written,
        told,
        truncation=truncation,
        retention=getattr(body.truncation, "retention_ratio", None),
        reserve=limit,
        keep=body.truncate_prompt_tokens,
        compacts=when is not None,
        spent=short.spent,
    )
    goes_on = body.messages[-1] if rendering.continue_final_message else None
    special = body.skip_special_tokens is not False
    how = answering(service, ticket, plan, prompt, goes_on, skips_special=special)
    if body.include_reasoning is False:
        how = replace(how, shows_reasoning=False)
    form = await sampling_of(service, ticket, how, body.structure)
    room = service.prompts.limit(prompt, limit, body.limit_field)
    params = _params(service, body, room, form)
    options = service.options(ticket.caller, body, prompt, model)
    if body.prediction is not None:
        options = replace(options, prediction=body.prediction.text)
    return Work(prompt, params, options), how


def _hints(body: ChatRequest) -> dict[str, dict[str, Any]]:
    """What a template may be told of how the model shall reason. Of its length only that there is
    none."""
    hints = effort_hint("reasoning_effort", body.reasoning_effort)
    budget = body.thinking_token_budget
    if budget == 0:
        hints["thinking_token_budget"] = thinking(False)
    elif budget is not None and budget > 0:
        unheeded("thinking_token_budget")
    return hints


def _params(
    service: Service, body: ChatRequest, limit: int, form: dict[str, Any]
) -> SamplingParams | BeamSearchParams:
    return body.parameters(
        service.defaults,
        {"max_tokens": body.limit_field},
        n=body.n or 1,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **form,
    )


def _check_sampling(service: Service, body: ChatRequest) -> None:
    """Raises ApiError for what would be refused whatever the prompt."""
    room = service.prompts.limit(PromptText([]), body.limit, body.limit_field)
    _params(service, body, room, {})
    body.structure()


def _wanted(service: Service, body: ChatRequest) -> Wanted | None:
    """When it is compacted; not where the end of its prompt is asked for, as it is."""
    if body.truncate_prompt_tokens is None:
        return wanted(service, body.context_management)
    if body.context_management:
        raise ApiError(
            400,
            "truncate_prompt_tokens keeps a prompt's end, context_management sums up its older "
            "turns. Set one of them.",
            param="context_management",
        )
    return None


def _whole(
    body: ChatRequest,
    caller: Caller,
    work: Work,
    output: RequestOutput,
    model: str,
    names: TokenNames,
    how: Answering,
) -> dict[str, Any]:
    choices = []
    for sample in output.outputs:
        delta = whole(sample)
        message, calls = message_of(delta.text, how)
        if body.legacy:
            message = in_older_words(message)
        choice: dict[str, Any] = {
            "index": delta.index,
            "message": message,
            "logprobs": _logprobs(delta, body, names),
            "finish_reason": _reason(body, delta, calls),
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
        "usage": _usage(body, work, output),
        "penstock": priced(output, work.prompt),
        **body.handed_over,
    }
    if output.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return answer


def _usage(body: ChatRequest, work: Work, output: RequestOutput) -> dict[str, Any]:
    metrics, prompt = output.metrics, work.prompt
    predicted = None if body.prediction is None else metrics.predicted
    return usage(len(prompt.tokens), made(output), metrics.cached_tokens, predicted, prompt.spent)


def _reason(body: ChatRequest, delta: Delta, calls: bool) -> str | None:
    if not calls or delta.finish_reason != "stop":
        return delta.finish_reason
    return "function_call" if body.legacy else "tool_calls"


def _logprobs(delta: Delta, body: ChatRequest, names: TokenNames) -> dict[str, Any] | None:
    if delta.logprobs is None:
        return None
    return names.chat(delta.logprobs, body.top_logprobs or 0)


class _Chunks:
    """`chat.completion.chunk`s: the role, what is said as it comes, the end, the usage."""

    def __init__(
        self,
        body: ChatRequest,
        caller: Caller,
        work: Work,
        model: str,
        names: TokenNames,
        how: Answering,
    ) -> None:
        options = body.stream_options
        self._counting = options is not None and options.include_usage
        self._running = options is not None and options.continuous_usage_stats
        self._body, self._work, self._names = body, work, names
        self._head: dict[str, Any] = {
            "id": caller.request_id,
            "object": "chat.completion.chunk",
            "created": now(),
            "model": model,
        }
        # What is the same in every chunk of text is written once.
        self._opening = dumps(self._head)[:-1] + ',"choices":[{"index":'
        self._plain = not (
            self._running or self._counting or body.logprobs or body.return_token_ids
        )
        reads = how.plan.reads
        self._calls = {i: Calls(how) for i in range(work.samples)} if reads else {}

    async def events(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[bytes]:
        """All of them."""
        reader = Reader()
        output: RequestOutput | None = None
        async for _, output in outputs:
            if not reader.started:  # the engine has taken it; what it refuses has a status instead
                for index in range(self._work.samples):
                    yield self._first(index)
            for new in reader.read(output):
                for chunk in self._of(new, output):
                    yield chunk
        if self._counting and output is not None:
            total = _usage(self._body, self._work, output)
            more = priced(output, self._work.prompt)
            yield event(self._head | {"choices": [], "usage": total, "penstock": more})
        yield DONE

    def _first(self, index: int) -> bytes:
        delta: dict[str, Any] = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._head | {"choices": [choice]}
        if self._running:
            chunk["usage"] = self._so_far(0)
        elif self._counting:
            chunk["usage"] = None
        return event(chunk)

    def _so_far(self, made: int) -> dict[str, Any]:
        prompt = self._work.prompt
        return usage(len(prompt.tokens), made, spent=prompt.spent)

    def _of(self, new: Delta, output: RequestOutput) -> Iterator[bytes]:
        """What is new of a sample."""
        ended = new.finish_reason is not None
        calls = self._calls.get(new.index)
        if calls is not None:
            deltas = calls.deltas(new.text, ended)
            if self._body.legacy:
                deltas = [in_older_words(delta) for delta in deltas]
        else:
            deltas = [{"content": new.text}] if new.text else []
        reason = _reason(self._body, new, calls is not None and bool(calls.ended))
        if not deltas and (ended or new.logprobs or self._body.return_token_ids):
            deltas = [{} if ended else {"content": ""}]
        for i, delta in enumerate(deltas):
            last = i == len(deltas) - 1
            if self._plain and not (last and ended) and delta.keys() == {"content"}:
                yield self._text(new.index, delta["content"])
            else:
                yield self._chunk(new, delta, reason if last else None, output, i == 0)

    def _text(self, index: int, text: str) -> bytes:
        return (
            f'data: {self._opening}{index},"delta":{{"content":{dumps(text)}}},'
            '"logprobs":null,"finish_reason":null}]}\n\n'
        ).encode()

    def _chunk(
        self, new: Delta, delta: Any, reason: str | None, output: RequestOutput, first: bool
    ) -> bytes:
        """first: of those that say what is new, which has the tokens."""
        choice: dict[str, Any] = {
            "index": new.index,
            "delta": delta,
            "logprobs": _logprobs(new, self._body, self._names) if first else None,
            "finish_reason": reason,
        }
        if reason is not None:
            choice["stop_reason"] = new.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = new.token_ids if first else []
        chunk = self._head | {"choices": [choice]}
        if self._running:
            chunk["usage"] = self._so_far(made(output))
        elif self._counting:
            chunk["usage"] = None
        return event(chunk)
