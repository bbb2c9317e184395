"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.engine import CompletionOutput, RequestOutput
from penstock.sampling import SamplingParams
from penstock.server.body import JsonRoute
from penstock.server.choices import Reader
from penstock.server.conversation import ANTHROPIC, Rendering
from penstock.server.errors import as_api_error
from penstock.server.protocol.answers import MessageAnswer
from penstock.server.protocol.common import SamplingFields
from penstock.server.protocol.messages import CountTokensRequest, MessagesRequest
from penstock.server.routes.common import (
    MESSAGES_ERRORS,
    admit,
    answers,
    caller_of,
    check_stops,
    last_of,
    prompt_of_messages,
    service_of,
    stream_response,
)
from penstock.server.service import Work, priced
from penstock.server.sse import event, unless_gone

router = APIRouter(route_class=JsonRoute)

# Clients of this API send the most tokens that they would take, often more than the model has;
# truncation leaves this part of its length for them, not all.
_RESERVED = 4


@router.post("/v1/messages", responses=MESSAGES_ERRORS | answers(MessageAnswer))
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    service = service_of(request)
    model = service.check_model(body.model)
    user = None if body.metadata is None else body.metadata.user_id
    caller = caller_of(request, "msg", user)
    check_stops(service, body.stop_sequences, "stop_sequences")
    ticket = await admit(request, caller)
    prompt = await prompt_of_messages(
        request,
        ticket,
        body.conversation(),
        _rendering(body, service.config.chat_template),
        truncation=None,
        reserve=min(body.max_tokens, service.llm.engine.max_model_len // _RESERVED),
        source=ANTHROPIC,
    )
    room = service.prompts.limit(prompt, None, "max_tokens")
    params = _params(body, service.defaults, min(body.max_tokens, room))
    work = Work(prompt, params, service.options(caller, body, prompt))
    outputs = service.stream(ticket, [work])
    answer = _Answer(caller.request_id, model, work)
    if body.stream:
        return stream_response(answer.events(outputs), outputs)
    return JSONResponse(answer.message(await unless_gone(request.receive, last_of(outputs))))


@router.post("/v1/messages/count_tokens", responses=MESSAGES_ERRORS)
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    """How many tokens a conversation's prompt has, whether or not they fit."""
    service = service_of(request)
    service.check_model(body.model)
    rendering = _rendering(body, service.config.chat_template)
    ticket = await admit(request, caller_of(request, "count"))
    prompts, messages = service.prompts, body.conversation()
    ids = await service.compute(ticket, lambda: prompts.rendered(messages, rendering))
    return {"input_tokens": len(ids)}


def _rendering(body: CountTokensRequest, template: str | None) -> Rendering:
    """A last message of the assistant is one to go on with."""
    goes_on = body.messages[-1].role == "assistant"
    return Rendering(
        add_generation_prompt=not goes_on, continue_final_message=goes_on, chat_template=template
    )


def _params(body: MessagesRequest, defaults: SamplingParams, limit: int) -> SamplingParams:
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
    )
    return fields.sampling(defaults, {"stop": "stop_sequences"}, max_tokens=limit)


class _Answer:
    """The message as an object, and as the events that build it."""

    def __init__(self, request_id: str, model: str, work: Work) -> None:
        self._id = request_id.replace("-", "_", 1)
        self._model = model
        self._work = work

    def message(self, output: RequestOutput) -> dict[str, Any]:
        """All of it."""
        sample = output.outputs[0]
        reason, sequence = _stop(sample)
        return self._empty() | {
            "content": [{"type": "text", "text": sample.text}],
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(output),
            "penstock": priced(output),
        }

    def _empty(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """Tokens of the prompt that were computed, found in the cache, and kept there."""
        total, cached = len(output.prompt_token_ids), output.metrics.cached_tokens
        pinned = max((pin.tokens for pin in self._work.options.pins), default=0)
        kept = max(0, pinned - cached)
        return {
            "input_tokens": total - cached - kept,
            "cache_creation_input_tokens": kept,
            "cache_read_input_tokens": cached,
            "output_tokens": len(output.outputs[0].token_ids),
        }

    async def events(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[bytes]:
        """The API's events."""

        def tell(name: str, **data: Any) -> bytes:
            return event({"type": name, **data}, name)

        reader = Reader()
        output: RequestOutput | None = None
        try:
            async for _, output in outputs:
                if not reader.started:
                    start = self._empty() | {"usage": self._usage(output) | {"output_tokens": 0}}
                    yield tell("message_start", message=start)
                    block = {"type": "text", "text": ""}
                    yield tell("content_block_start", index=0, content_block=block)
                    yield tell("ping")
                for new in reader.read(output):
                    if new.text:
                        delta = {"type": "text_delta", "text": new.text}
                        yield tell("content_block_delta", index=0, delta=delta)
        except Exception as error:
            if not reader.started:
                raise
            yield event(as_api_error(error).anthropic(), "error")
            return
        assert output is not None
        reason, sequence = _stop(output.outputs[0])
        yield tell("content_block_stop", index=0)
        yield tell(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=self._usage(output),
            penstock=priced(output),
        )
        yield tell("message_stop")


def _stop(sample: CompletionOutput) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if sample.finish_reason == "length":
        return "max_tokens", None
    if isinstance(sample.stop_reason, str):
        return "stop_sequence", sample.stop_reason
    return "end_turn", None
