"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.engine import CompletionOutput, RequestOutput
from penstock.sampling import TokenLogprobs, best_of
from penstock.server.admission import Ticket
from penstock.server.body import JsonRoute
from penstock.server.choices import Delta, Reader, TokenNames, prompt_logprobs, whole
from penstock.server.errors import ApiError
from penstock.server.prompt import COMPLETION, PromptText, Source
from penstock.server.protocol.answers import Completion
from penstock.server.protocol.completions import CompletionRequest, PromptField
from penstock.server.routes.common import (
    ERRORS,
    admit,
    answers,
    caller_of,
    check_samples,
    check_words,
    form_of,
    made,
    now,
    service_of,
    stream_response,
    usage,
)
from penstock.server.service import Service, Work, priced
from penstock.server.sse import DONE, dumps, event, unless_gone

router = APIRouter(route_class=JsonRoute)

OnePrompt = str | list[int]


@router.post("/v1/completions", responses=ERRORS | answers(Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Go on with one text or several, as OpenAI's API does."""
    service = service_of(request)
    model = service.check_model(body.model)
    caller = caller_of(request, "cmpl", body.user, body.request_id)
    _check(service, body)
    several = prompts_in(service, body.prompt, COMPLETION.field)
    ticket = await admit(request, caller, len(several), body.samples)
    works = await _works(service, body, ticket, several, model)
    answer = _Answer(service, body, ticket, model, works)
    outputs = service.stream(ticket, works)
    if body.stream:
        return stream_response(request, answer.chunks(outputs), outputs)
    return JSONResponse(await unless_gone(request.receive, answer.whole(outputs)))


async def _works(
    service: Service,
    body: CompletionRequest,
    ticket: Ticket,
    several: list[OnePrompt],
    model: str,
) -> list[Work]:
    prompts = await prompts_of(
        service, ticket, several, body.truncate_prompt_tokens, body.add_special_tokens, COMPLETION
    )
    wants_prompt = body.echo and body.logprobs is not None
    asked = body.logprobs if wants_prompt else body.prompt_logprobs
    form = await form_of(service, ticket, body)
    works = []
    for prompt in prompts:
        limit = body.limit
        if body.max_tokens is None:
            limit = min(limit, service.prompts.limit(prompt, None, "max_tokens"))
        limit = max(1, service.prompts.limit(prompt, limit, "max_tokens"))
        chosen = dict(form) if asked is None else form | {"prompt_logprobs": asked}
        if body.token_healing:
            chosen["token_healing"] = True
        params = body.parameters(
            service.defaults,
            {"n": "best_of"} if body.ranks else None,
            n=body.samples,
            max_tokens=limit,
            logprobs=body.logprobs or 0 if body.ranks else body.logprobs,
            **chosen,
        )
        works.append(Work(prompt, params, service.options(ticket.caller, body, prompt, model)))
    return works


def _check(service: Service, body: CompletionRequest) -> None:
    check_words(service, body)
    _check_choosing(service, body)
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, which generates nothing.", param="max_tokens")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true.", param="stream_options")
    if body.stream and (body.echo or body.prompt_logprobs is not None):
        field = "echo" if body.echo else "prompt_logprobs"
        raise ApiError(400, f"{field} can't be streamed.", param=field)
    if body.echo and body.logprobs is not None and body.prompt_logprobs is not None:
        raise ApiError(
            400,
            "echo with logprobs gives the prompt's log-probabilities already. Leave out "
            "prompt_logprobs, or one of the two.",
            param="prompt_logprobs",
        )
    check_samples(service, body.n)


def _check_choosing(service: Service, body: CompletionRequest) -> None:
    """Raises ApiError for fields about which samples come back that can't go together."""
    body.check_search(
        stream=body.stream,
        best_of=body.best_of if body.ranks else None,
        token_healing=body.token_healing,
    )
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise ApiError(
            400,
            f"best_of is {body.best_of} and n {n}: there are fewer samples than are to come back. "
            "Raise best_of, or lower n.",
            param="best_of",
        )
    most = service.llm.config.scheduler.max_num_seqs
    if body.ranks and body.samples > most:
        raise ApiError(
            400,
            f"best_of is {body.best_of}, but only {most} samples can run at once. Lower it, or "
            "start the server with a higher --max-num-seqs.",
            param="best_of",
        )
    if body.ranks and body.stream:
        raise ApiError(
            400,
            f"best_of is {body.best_of}, which can't be streamed: the best sample is known at the "
            "end. Leave out stream, or best_of.",
            param="best_of",
        )
    if not body.use_beam_search:
        return
    if body.max_tokens == 0:
        raise ApiError(
            400,
            "max_tokens is 0, which leaves use_beam_search nothing to look for. Leave out one of "
            "the two.",
            param="max_tokens",
        )
    if body.echo and body.logprobs is not None:
        raise ApiError(
            400,
            "echo with logprobs asks for the prompt's log-probabilities, which use_beam_search "
            "doesn't read. Leave out one of the three.",
            param="echo",
        )


def prompts_in(service: Service, prompt: PromptField, field: str) -> list[OnePrompt]:
    """One prompt or several, as texts or tokens. Raises ApiError for none, or too many."""
    several: list[Any] = [prompt]
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        several = list(prompt)
    if not several:
        raise ApiError(400, "There is no prompt in the list.", param=field)
    most = service.config.max_queue_size
    if len(several) > most:
        raise ApiError(
            400,
            f"{len(several):,} prompts in one request; {most:,} may wait. Send several requests, "
            "or start the server with a higher --max-queue-size.",
            param=field,
            code="queue_full",
        )
    return several


async def prompts_of(
    service: Service,
    ticket: Ticket,
    several: list[OnePrompt],
    keep: int | None,
    add_special_tokens: bool | None,
    source: Source,
) -> list[PromptText]:
    """Each prompt's tokens. Raises ApiError for one that is empty or too long."""
    special = add_special_tokens is not False

    def make(one: OnePrompt) -> PromptText:
        if not one and not (isinstance(one, str) and special and source.generates):
            raise ApiError(400, "The prompt is empty. Give at least one token.", param=source.field)
        prompts = service.prompts
        if isinstance(one, str):
            return prompts.of_text(one, add_special_tokens=special, keep=keep, source=source)
        return prompts.of_tokens(one, keep=keep, source=source)

    return await service.compute(ticket, lambda: [make(one) for one in several])


class _Answer:
    """One request's choices: those of each prompt one after the other."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        ticket: Ticket,
        model: str,
        works: list[Work],
    ) -> None:
        self._service, self._body, self._works = service, body, works
        tokenizer = None if service.llm.runtime.tokenizer is None else service.prompts.tokenizer
        self._names = TokenNames(
            tokenizer, bool(body.return_tokens_as_token_ids), body.skip_special_tokens is False
        )
        self._each = body.n or 1
        self._head: dict[str, Any] = {
            "id": ticket.caller.request_id,
            "object": "text_completion",
            "created": now(),
            "model": model,
        }

    async def whole(self, source: AsyncIterator[tuple[int, RequestOutput]]) -> dict[str, Any]:
        """The answer in one piece."""
        last = {number: output async for number, output in source}
        outputs = [last[i] for i in range(len(self._works))]
        choices = []
        for number, output in enumerate(outputs):
            for sample in self._returned(output):
                delta = whole(sample, number * self._each)
                choices.append(self._echoed(delta, output) if self._body.echo
                               else self._choice(delta, self._start(output)))  # fmt: skip
                if output.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
                    choices[-1]["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                if self._body.return_token_ids:
                    choices[-1]["prompt_token_ids"] = output.prompt_token_ids
        answer = self._head | {"choices": choices, "usage": self._usage(outputs)}
        answer |= self._body.handed_over
        if len(outputs) == 1:
            answer["penstock"] = priced(outputs[0])
        return answer

    def _returned(self, output: RequestOutput) -> list[CompletionOutput]:
        """The samples that come back, in their order."""
        if not self._body.ranks:
            return output.outputs
        best = best_of(output.outputs, self._each)
        logprobs = self._body.logprobs is not None
        return [
            replace(sample, index=i, logprobs=sample.logprobs if logprobs else None)
            for i, sample in enumerate(best)
        ]

    def _usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        generated = 0 if self._body.max_tokens == 0 else sum(made(x) for x in outputs)
        return usage(
            sum(len(x.prompt_token_ids) for x in outputs),
            generated,
            sum(x.metrics.cached_tokens for x in outputs),
        )

    def _start(self, output: RequestOutput) -> int:
        """Where the first token is in the text: before it, if it makes the prompt's end again."""
        taken = output.num_taken_back
        return -self._names.width(output.prompt_token_ids[-taken:]) if taken else 0

    def _choice(self, delta: Delta, offset: int) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            entries: list[TokenLogprobs | None] = list(delta.logprobs)
            logprobs = self._names.legacy(
                delta.token_ids, entries, self._body.logprobs or 0, offset
            )
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _echoed(self, delta: Delta, output: RequestOutput) -> dict[str, Any]:
        """The prompt and what follows; only the prompt where no token was asked for."""
        text = output.prompt
        if text is None:
            text = self._service.prompts.tokenizer.decode(output.prompt_token_ids)
        if self._body.max_tokens == 0:
            delta = replace(delta, text="", token_ids=[], logprobs=delta.logprobs and [],
                            finish_reason="length", stop_reason=None)  # fmt: skip
        choice = self._choice(delta, len(text) + self._start(output))
        choice["text"] = text + delta.text
        if delta.logprobs is not None and output.prompt_logprobs is not None:
            before = self._names.legacy(
                output.prompt_token_ids, output.prompt_logprobs, self._body.logprobs or 0, 0, text
            )
            for name, values in choice["logprobs"].items():
                choice["logprobs"][name] = None if values is None else before[name] + values
        return choice

    async def chunks(
        self, source: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[bytes]:
        """Pieces of text as they come, and the usage."""
        body, head = self._body, self._head
        options = body.stream_options
        counting = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        plain = not (running or counting or body.logprobs is not None or body.return_token_ids)
        opening = dumps(head)[:-1] + ',"choices":[{"index":'
        readers = [Reader(i * self._each) for i in range(len(self._works))]
        offsets: dict[int, int] = {}
        last: dict[int, RequestOutput] = {}
        async for number, output in source:
            last[number] = output
            for new in readers[number].read(output):
                if plain and new.finish_reason is None:
                    if new.text:
                        yield (
                            f'data: {opening}{new.index},"text":{dumps(new.text)},'
                            '"logprobs":null,"finish_reason":null}]}\n\n'
                        ).encode()
                    continue
                offset = offsets.get(new.index, self._start(output))
                offsets[new.index] = offset + self._names.width(new.token_ids)
                chunk = head | {"choices": [self._choice(new, offset)]}
                if running:
                    chunk["usage"] = self._usage(list(last.values()))
                elif counting:
                    chunk["usage"] = None
                yield event(chunk)
        if counting:
            outputs = list(last.values())
            tail = head | {"choices": [], "usage": self._usage(outputs)}
            if len(outputs) == 1:
                tail["penstock"] = priced(outputs[0])
            yield event(tail)
        yield DONE
