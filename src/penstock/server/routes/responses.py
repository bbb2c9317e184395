"""`/v1/responses`: text, whole or as events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.engine import CompletionOutput, RequestOutput
from penstock.sampling import SamplingParams, TokenLogprobs
from penstock.server.admission import Ticket
from penstock.server.answers import broken
from penstock.server.body import JsonRoute
from penstock.server.choices import Reader, TokenNames
from penstock.server.compaction import Spent
from penstock.server.hints import effort_hint
from penstock.server.prompt import RESPONSE, PromptText, Rendering
from penstock.server.protocol.answers import Response as ResponseAnswer
from penstock.server.protocol.compaction import compaction_item
from penstock.server.protocol.response_tools import echoed
from penstock.server.protocol.responses import Asking, InputTokensRequest, ResponsesRequest
from penstock.server.routes.common import (
    ERRORS,
    admit,
    answers,
    caller_of,
    check_words,
    hinted,
    last_of,
    now,
    prompt_of_messages,
    service_of,
    stream_response,
)
from penstock.server.routes.compaction import compacted, conversation_of, wanted
from penstock.server.routes.items import Items
from penstock.server.routes.stored import HEADER, Keep, earlier_of, keep_of
from penstock.server.routes.tools import Answering, answering, plan_of, sampling_of, telling
from penstock.server.service import Service, Work, priced
from penstock.server.sse import event, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=ERRORS | answers(ResponseAnswer))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input, as OpenAI's Responses API does."""
    service = service_of(request)
    model = service.check_model(body.model)
    caller = caller_of(request, "resp", body.user or body.safety_identifier)
    check_words(service, body)
    ticket = await admit(request, caller)
    earlier = earlier_of(service, ticket, body)
    conversation = await conversation_of(service, ticket, partial(body.conversation, earlier))
    keep = await keep_of(service, ticket, body, earlier)
    rendering = await _rendering(request, ticket, body)
    plan = await plan_of(request, ticket, rendering, body)
    told = telling(rendering, plan)
    when = wanted(service, body.context_management)
    short = await compacted(
        request,
        ticket,
        conversation,
        told,
        when,
        body=body,
        model=model,
        reserve=body.max_output_tokens,
        source=RESPONSE,
        check=lambda: _check_sampling(service, body),
        truncation=body.truncation,
    )
    prompt = await prompt_of_messages(
        request,
        ticket,
        short.conversation.written,
        told,
        truncation=body.truncation,
        reserve=body.max_output_tokens,
        source=RESPONSE,
        compacts=when is not None,
        spent=short.spent,
    )
    special = body.skip_special_tokens is not False
    how = answering(service, ticket, plan, prompt, skips_special=special)
    form = await sampling_of(service, ticket, how, body.structure)
    params = _params(service, body, prompt, form)
    work = Work(prompt, params, service.options(caller, body, prompt, model))
    item = None
    if short.is_shorter:
        left, name = body.sealable(short.conversation), _name_of(caller.request_id)
        item = await service.compute(ticket, lambda: compaction_item(left, name))
    answer = _Answer(body, caller.request_id, model, work, service, how, item, keep)
    if keep is not None:
        told_before = getattr(request.state, "answer_headers", {})
        request.state.answer_headers = {**told_before, HEADER: answer.id}
    outputs = service.stream(ticket, [work])
    if body.stream:
        return stream_response(request, answer.events(outputs), outputs)
    return JSONResponse(answer.response(await unless_gone(request.receive, last_of(outputs))))


@router.post("/v1/responses/input_tokens", responses=ERRORS)
async def count_input_tokens(body: InputTokensRequest, request: Request) -> dict[str, Any]:
    """How many tokens the prompt for an answer has, whether or not they fit."""
    service = service_of(request)
    service.check_model(body.model)
    ticket = await admit(request, caller_of(request, "count"))
    earlier = earlier_of(service, ticket, body)
    conversation = await conversation_of(service, ticket, partial(body.conversation, earlier))
    messages = conversation.written
    rendering = await _rendering(request, ticket, body)
    told = telling(rendering, await plan_of(request, ticket, rendering, body))
    slow = any(message.has_pictures for message in messages)
    ids = await service.compute(ticket, lambda: service.prompts.rendered(messages, told), slow=slow)
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


async def _rendering(request: Request, ticket: Ticket, body: Asking) -> Rendering:
    template = service_of(request).config.chat_template
    rendering = Rendering(chat_template=template, kwargs=body.chat_template_kwargs)
    effort = None if body.reasoning is None else body.reasoning.effort
    return await hinted(request, ticket, rendering, effort_hint("reasoning.effort", effort))


def _params(
    service: Service, body: ResponsesRequest, prompt: PromptText, form: dict[str, Any]
) -> SamplingParams:
    return body.sampling(
        service.defaults,
        {"max_tokens": "max_output_tokens"},
        max_tokens=service.prompts.limit(prompt, body.max_output_tokens, "max_output_tokens"),
        logprobs=body.num_logprobs,
        **form,
    )


def _check_sampling(service: Service, body: ResponsesRequest) -> None:
    """Raises ApiError for what would be refused whatever the prompt."""
    _params(service, body, PromptText([]), {})
    body.structure()


def _name_of(request_id: str) -> str:
    """From which its items have theirs."""
    return request_id.removeprefix("resp-")


class _Answer:
    """The response as an object, and as the events that build it."""

    def __init__(
        self,
        body: ResponsesRequest,
        request_id: str,
        model: str,
        work: Work,
        service: Service,
        how: Answering,
        compaction: dict[str, Any] | None = None,
        keep: Keep | None = None,
    ) -> None:
        """compaction: the item that tells of one; keep: None where it isn't kept."""
        self._body, self._model, self._work, self._how = body, model, work, how
        self.id = request_id.replace("-", "_", 1)
        self._keep = keep
        self._names = TokenNames(service.prompts.tokenizer, as_ids=False)
        self._created = now()
        self._truncation = body.truncation or service.config.truncation
        self._name = _name_of(request_id)
        self._compaction = compaction
        self._sample: CompletionOutput | None = None  # once it has ended

    def response(self, output: RequestOutput) -> dict[str, Any]:
        """All of it."""
        self._sample = output.outputs[0]
        items = self._items(lambda name, /, **data: b"", drops_broken=True)
        for _ in (*items.of(self._sample.text, True, []), *items.finish(_status(self._sample))):
            pass
        return self._whole(items.done, output)

    def _whole(self, items: list[dict[str, Any]], output: RequestOutput) -> dict[str, Any]:
        """The response, which is kept from here on where it is to be."""
        response = self._response(items, output)
        if self._keep is not None:
            self._keep.keep(response)
        return response

    def _format(self) -> dict[str, Any]:
        """The answer's form, as it was asked for."""
        asked = None if self._body.text is None else self._body.text.format
        if asked is None:
            return {"type": "text"}
        return asked.model_dump(by_alias=True, exclude_none=True)

    def _items(self, tell: Callable[..., bytes], *, drops_broken: bool = False) -> Items:
        items = Items(self._how, tell, self._name, self._part, drops_broken=drops_broken)
        if self._compaction is not None:
            items.done.append(self._compaction)
        return items

    def _response(
        self,
        items: list[dict[str, Any]],
        output: RequestOutput | None = None,
        error: Any = None,
    ) -> dict[str, Any]:
        """The response so far; without an output, in progress."""
        params, body = self._work.params, self._body
        assert isinstance(params, SamplingParams)  # nothing searches here
        status = "failed" if error else _status(self._sample if output is not None else None)
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": error,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id or None,
            "reasoning": {
                "effort": None if body.reasoning is None else body.reasoning.effort,
                "summary": None,
            },
            "store": self._keep is not None,
            "temperature": params.temperature,
            "text": {"format": self._format()},
            "tool_choice": (
                choice or "auto"
                if choice is None or isinstance(choice, str)
                else choice.model_dump(exclude_none=True)
            ),
            "tools": echoed(body.tools or ()),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": self._truncation,
            "usage": None if output is None else self._usage(output, items),
            "user": body.user,
        } | ({} if output is None else {"penstock": priced(output, self._work.prompt)})

    def _usage(self, output: RequestOutput, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Reasoning's tokens are those of its text, without the tags around it."""
        spent = self._work.prompt.spent or Spent()
        read = len(output.prompt_token_ids) + spent.input_tokens
        made = len(output.outputs[0].token_ids) + spent.output_tokens
        cached = output.metrics.cached_tokens + spent.cached_tokens
        thoughts = [x["content"][0]["text"] for x in items if x["type"] == "reasoning"]
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": sum(map(self._names.count, thoughts))},
            "total_tokens": read + made,
        }

    def _part(self, text: str) -> dict[str, Any]:
        sample = self._sample
        entries = sample.logprobs if sample is not None else None
        logprobs = [] if not entries else self._logprobs(entries)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, entries: list[TokenLogprobs]) -> list[Any]:
        found: list[Any] = self._names.chat(entries, self._body.top_logprobs or 0)["content"]
        return found

    async def events(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[bytes]:
        """The API's events, numbered."""
        numbers = itertools.count()

        def tell(name: str, /, **data: Any) -> bytes:
            return event({"type": name, "sequence_number": next(numbers), **data}, name)

        reader, items = Reader(), self._items(tell)
        output: RequestOutput | None = None
        try:
            async for _, output in outputs:
                if not reader.started:  # the engine has taken it
                    yield tell("response.created", response=self._response([]))
                    yield tell("response.in_progress", response=self._response([]))
                    for item in items.done:  # which was made before
                        yield tell("response.output_item.added", output_index=0, item=item)
                        yield tell("response.output_item.done", output_index=0, item=item)
                    if not self._how.plan.reads:
                        for made in items.start():
                            yield made
                for new in reader.read(output):
                    ended = new.finish_reason is not None
                    if ended:
                        self._sample = output.outputs[0]
                    for made in items.of(new.text, ended, self._logprobs(new.logprobs or [])):
                        yield made
        except Exception as error:
            if not reader.started:
                raise
            said = broken(error)
            told = {"code": said.code or said.type, "message": said.message}
            yield tell("response.failed", response=self._response(items.done, error=told))
            return
        assert output is not None
        status = _status(self._sample)
        for made in items.finish(status):
            yield made
        yield tell(f"response.{status}", response=self._whole(items.done, output))


def _status(sample: CompletionOutput | None) -> str:
    if sample is None:
        return "in_progress"
    return "incomplete" if sample.finish_reason == "length" else "completed"
