"""`/v1/responses`: text, whole or as events."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.engine import CompletionOutput, RequestOutput
from penstock.sampling import SamplingParams
from penstock.server.body import JsonRoute
from penstock.server.choices import Reader, TokenNames
from penstock.server.conversation import RESPONSE, Rendering
from penstock.server.errors import as_api_error
from penstock.server.protocol.answers import Response as ResponseAnswer
from penstock.server.protocol.responses import ResponsesRequest
from penstock.server.routes.common import (
    ERRORS,
    admit,
    answers,
    caller_of,
    check_words,
    last_of,
    now,
    prompt_of_messages,
    service_of,
    stream_response,
)
from penstock.server.service import Service, Work, priced
from penstock.server.sse import event, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/responses", responses=ERRORS | answers(ResponseAnswer))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer an input, as OpenAI's Responses API does; nothing is stored."""
    service = service_of(request)
    model = service.check_model(body.model)
    caller = caller_of(request, "resp", body.user or body.safety_identifier)
    check_words(service, body)
    ticket = await admit(request, caller)
    prompt = await prompt_of_messages(
        request,
        ticket,
        body.messages(),
        Rendering(chat_template=service.config.chat_template, kwargs=body.chat_template_kwargs),
        truncation=body.truncation,
        reserve=body.max_output_tokens,
        source=RESPONSE,
    )
    params = body.sampling(
        service.defaults,
        {"max_tokens": "max_output_tokens"},
        max_tokens=service.prompts.limit(prompt, body.max_output_tokens, "max_output_tokens"),
        logprobs=body.num_logprobs,
    )
    work = Work(prompt, params, service.options(caller, body, prompt))
    answer = _Answer(body, caller.request_id, model, work, service)
    outputs = service.stream(ticket, [work])
    if body.stream:
        return stream_response(answer.events(outputs), outputs)
    return JSONResponse(answer.response(await unless_gone(request.receive, last_of(outputs))))


class _Answer:
    """The response as an object, and as the events that build it."""

    def __init__(
        self, body: ResponsesRequest, request_id: str, model: str, work: Work, service: Service
    ) -> None:
        self._body, self._model, self._work = body, model, work
        self._id = request_id.replace("-", "_", 1)
        self._names = TokenNames(service.prompts.tokenizer, as_ids=False)
        self._created = now()
        self._truncation = body.truncation or service.config.truncation
        self._item = f"msg_{request_id.removeprefix('resp-')}"

    def response(self, output: RequestOutput | None, error: Any = None) -> dict[str, Any]:
        """The response so far; without an output, in progress."""
        params, body = self._work.params, self._body
        assert isinstance(params, SamplingParams)  # nothing searches here
        sample = None if output is None else output.outputs[0]
        status = "failed" if error else _status(sample)
        return {
            "id": self._id,
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
            "output": [] if sample is None else [self._message(sample, status)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": self._truncation,
            "usage": None if output is None else _usage(output),
            "user": body.user,
        } | ({} if output is None else {"penstock": priced(output)})

    def _message(self, sample: CompletionOutput, status: str) -> dict[str, Any]:
        return {
            "type": "message",
            "id": self._item,
            "status": status,
            "role": "assistant",
            "content": [self._part(sample.text, sample)],
        }

    def _part(self, text: str, sample: CompletionOutput | None = None) -> dict[str, Any]:
        entries = sample.logprobs if sample is not None else None
        logprobs = [] if not entries else self._names.chat(entries, self._body.top_logprobs or 0)[
            "content"]  # fmt: skip
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    async def events(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[bytes]:
        """The API's events, numbered."""
        numbers = itertools.count()

        def tell(name: str, **data: Any) -> bytes:
            return event({"type": name, "sequence_number": next(numbers), **data}, name)

        where = {"item_id": self._item, "output_index": 0, "content_index": 0}
        empty = {"type": "message", "id": self._item, "status": "in_progress",
                 "role": "assistant", "content": []}  # fmt: skip
        reader = Reader()
        output: RequestOutput | None = None
        try:
            async for _, output in outputs:
                if not reader.started:  # the engine has taken it
                    yield tell("response.created", response=self.response(None))
                    yield tell("response.in_progress", response=self.response(None))
                    yield tell("response.output_item.added", output_index=0, item=empty)
                    yield tell("response.content_part.added", **where, part=self._part(""))
                for new in reader.read(output):
                    if not new.text and not new.logprobs:
                        continue
                    entries = new.logprobs or []
                    found = self._names.chat(entries, self._body.top_logprobs or 0)["content"]
                    yield tell(
                        "response.output_text.delta", **where, delta=new.text, logprobs=found
                    )
        except Exception as error:
            if not reader.started:
                raise
            said = as_api_error(error)
            told = {"code": said.code or said.type, "message": said.message}
            yield tell("response.failed", response=self.response(None, told))
            return
        assert output is not None
        sample = output.outputs[0]
        part = self._part(sample.text, sample)
        yield tell(
            "response.output_text.done", **where, text=sample.text, logprobs=part["logprobs"]
        )
        yield tell("response.content_part.done", **where, part=part)
        status = _status(sample)
        yield tell("response.output_item.done", output_index=0, item=self._message(sample, status))
        yield tell(f"response.{status}", response=self.response(output))


def _status(sample: CompletionOutput | None) -> str:
    if sample is None:
        return "in_progress"
    return "incomplete" if sample.finish_reason == "length" else "completed"


def _usage(output: RequestOutput) -> dict[str, Any]:
    read, made = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": output.metrics.cached_tokens},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": read + made,
    }
