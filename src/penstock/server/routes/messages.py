"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.engine import CompletionOutput, RequestOutput
from penstock.sampling import SamplingParams
from penstock.server.answers import broken
from penstock.server.body import JsonRoute
from penstock.server.choices import Reader
from penstock.server.compaction import Conversation, Wanted
from penstock.server.errors import ApiError
from penstock.server.hints import effort_hint, thinking
from penstock.server.prompt import ANTHROPIC, PromptText, Rendering
from penstock.server.protocol.answers import MessageAnswer
from penstock.server.protocol.common import SamplingFields
from penstock.server.protocol.compaction import compaction_block
from penstock.server.protocol.messages import CountTokensRequest, MessagesRequest
from penstock.server.routes.common import (
    MESSAGES_ERRORS,
    admit,
    answers,
    caller_of,
    check_stops,
    hinted,
    last_of,
    prompt_of_messages,
    service_of,
    stream_response,
)
from penstock.server.routes.compaction import compacted, conversation_of, wanted
from penstock.server.routes.tools import (
    Answering,
    Calls,
    answering,
    message_of,
    plan_of,
    sampling_of,
    telling,
)
from penstock.server.service import Service, Work, priced
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
    conversation = await conversation_of(service, ticket, body.conversation)
    rendering = _rendering(conversation, service.config.chat_template, body)
    rendering = await hinted(request, ticket, rendering, _hints(body))
    plan = await plan_of(request, ticket, rendering, body)
    told = telling(rendering, plan)
    reserve = min(body.max_tokens, service.llm.engine.max_model_len // _RESERVED)
    when = _wanted(service, body)
    short = await compacted(
        request,
        ticket,
        conversation,
        told,
        when,
        body=body,
        model=model,
        reserve=reserve,
        source=ANTHROPIC,
        check=lambda: _check_sampling(service, body),
    )
    prompt = await prompt_of_messages(
        request,
        ticket,
        short.conversation.written,
        told,
        truncation=None,
        reserve=reserve,
        source=ANTHROPIC,
        compacts=when is not None,
        spent=short.spent,
    )
    room = service.prompts.limit(prompt, None, "max_tokens")
    block = None
    if short.is_shorter and body.context_management is not None:
        left = body.sealable(short.conversation)
        block = await service.compute(ticket, lambda: compaction_block(left))
        if body.context_management.pauses:
            paused = _Paused(caller.request_id, model, prompt, block)
            return paused.streamed(request) if body.stream else JSONResponse(paused.message())
    goes_on = conversation.messages[-1] if rendering.continue_final_message else None
    how = answering(service, ticket, plan, prompt, goes_on)
    form = await sampling_of(service, ticket, how, body.structure)
    params = _params(body, service.defaults, min(body.max_tokens, room), form)
    work = Work(prompt, params, service.options(caller, body, prompt, model))
    outputs = service.stream(ticket, [work])
    answer = _Answer(caller.request_id, model, work, how, block)
    if body.stream:
        return stream_response(request, answer.events(outputs), outputs)
    return JSONResponse(answer.message(await unless_gone(request.receive, last_of(outputs))))


@router.post("/v1/messages/count_tokens", responses=MESSAGES_ERRORS)
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, Any]:
    """How many tokens a conversation's prompt has, whether or not they fit.

    Compactions that it brings count as what they stand for; none is made for it, as in Anthropic's
    API. Beside `context_management`: also how many the messages have without them.
    """
    service = service_of(request)
    service.check_model(body.model)
    ticket = await admit(request, caller_of(request, "count"))

    conversation = await conversation_of(service, ticket, body.conversation)

    async def count(what: Conversation) -> int:
        messages = what.written
        rendering = _rendering(what, service.config.chat_template, body)
        rendering = await hinted(request, ticket, rendering, _hints(body))
        rendering = telling(rendering, await plan_of(request, ticket, rendering, body))
        prompts = service.prompts
        slow = any(message.has_pictures for message in messages)
        ids = await service.compute(
            ticket, lambda: prompts.rendered(messages, rendering), slow=slow
        )
        return len(ids)

    found: dict[str, Any] = {"input_tokens": await count(conversation)}
    if body.context_management is None:
        return found
    before = found["input_tokens"]
    if conversation.summary is not None:
        whole = await conversation_of(service, ticket, body.uncompacted)
        with suppress(ApiError):  # of a template that can't write turns as they stand there
            before = max(before, await count(whole) if whole.others else 0)
    return found | {"context_management": {"original_input_tokens": before}}


def _hints(body: CountTokensRequest) -> dict[str, dict[str, Any]]:
    """What a template may be told of how the model shall reason."""
    effort = None if body.output_config is None else body.output_config.effort
    hints = effort_hint("output_config.effort", effort)
    if body.thinking is not None:
        hints["thinking"] = thinking(body.thinking.type != "disabled")
    return hints


def _rendering(
    conversation: Conversation, template: str | None, body: CountTokensRequest
) -> Rendering:
    """A last message of the assistant is one to go on with, unless it was a summary alone."""
    sent = conversation.messages
    goes_on = bool(sent) and sent[-1].role == "assistant"
    return Rendering(
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        chat_template=template,
        kwargs=body.chat_template_kwargs,
    )


def _wanted(service: Service, body: MessagesRequest) -> Wanted | None:
    """When older turns are summed up: as the request says, or else the server."""
    if body.context_management is None:
        return wanted(service, None)
    edit = body.context_management.compaction
    if edit is None:
        return None
    given = None if edit.trigger is None else edit.trigger.value
    place = body.context_management.edits.index(edit)
    return Wanted(
        given or service.config.compaction_threshold or service.prompts.max_len,
        f"context_management.edits[{place}].trigger.value",
        "trigger.value" if given else "The threshold",
        instructions=edit.instructions,
    )


def _params(
    body: MessagesRequest, defaults: SamplingParams, limit: int, form: dict[str, Any]
) -> SamplingParams:
    fields = SamplingFields(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or None,
    )
    return fields.sampling(defaults, {"stop": "stop_sequences"}, max_tokens=limit, **form)


def _check_sampling(service: Service, body: MessagesRequest) -> None:
    """Raises ApiError for what would be refused whatever the prompt."""
    _params(body, service.defaults, body.max_tokens, {})
    body.structure()


def _empty(request_id: str, model: str) -> dict[str, Any]:
    return {
        "id": request_id.replace("-", "_", 1),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _tell(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)


def _usage(prompt: PromptText, computed: int, kept: int, cached: int, made: int) -> dict[str, Any]:
    """Tokens of the prompt that were computed, kept in the cache and found there, and of the
    answer. What summaries took isn't among them, as in Anthropic's API: it stands beside them, as
    nothing of one that was remembered.
    """
    own = {
        "input_tokens": computed,
        "cache_creation_input_tokens": kept,
        "cache_read_input_tokens": cached,
        "output_tokens": made,
    }
    spent = prompt.spent
    if spent is None:
        return own
    summary = {
        "type": "compaction",
        "input_tokens": spent.input_tokens - spent.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": spent.cached_tokens,
        "output_tokens": spent.output_tokens,
    }
    return {**own, "iterations": [summary, {"type": "message", **own}]}


def _compaction_events(block: dict[str, Any]) -> Iterator[bytes]:
    """A compaction as the first of a message's blocks."""
    empty = {**block, "content": None, "encrypted_content": None}
    yield _tell("content_block_start", index=0, content_block=empty)
    yield _tell("content_block_delta", index=0, delta={**block, "type": "compaction_delta"})
    yield _tell("content_block_stop", index=0)


class _Paused:
    """A message that has a compaction and nothing else, for whoever wants to see it first."""

    def __init__(
        self, request_id: str, model: str, prompt: PromptText, block: dict[str, Any]
    ) -> None:
        self._empty = _empty(request_id, model)
        self._usage = _usage(prompt, 0, 0, 0, 0)
        self._block = block
        self._more: dict[str, Any] = {}
        if prompt.spent is not None:
            self._more = {"penstock": {"compaction": prompt.spent.as_dict()}}

    def message(self) -> dict[str, Any]:
        """All of it."""
        said = {"content": [self._block], "stop_reason": "compaction", "usage": self._usage}
        return {**self._empty, **said, **self._more}

    def streamed(self, request: Request) -> Response:
        """The events that build it."""

        async def events() -> AsyncIterator[bytes]:
            yield _tell("message_start", message=self._empty | {"usage": self._usage})
            for made in _compaction_events(self._block):
                yield made
            delta = {"stop_reason": "compaction", "stop_sequence": None}
            yield _tell("message_delta", delta=delta, usage=self._usage, **self._more)
            yield _tell("message_stop")

        return stream_response(request, events())


class _Answer:
    """The message as an object, and as the events that build it."""

    def __init__(
        self,
        request_id: str,
        model: str,
        work: Work,
        how: Answering,
        compaction: dict[str, Any] | None = None,
    ) -> None:
        """compaction: the block that tells of one."""
        self._head = _empty(request_id, model)
        self._work = work
        self._how = how
        self._compaction = compaction

    def message(self, output: RequestOutput) -> dict[str, Any]:
        """All of it."""
        sample = output.outputs[0]
        content, calls = self._content(sample.text)
        reason, sequence = _stop(sample, calls)
        first = [] if self._compaction is None else [self._compaction]
        return self._head | {
            "content": first + content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(output),
            "penstock": priced(output, self._work.prompt),
        }

    def _content(self, text: str) -> tuple[list[dict[str, Any]], bool]:
        """(the blocks, whether there are calls among them)."""
        said, calls = message_of(text, self._how)
        blocks: list[dict[str, Any]] = []
        if "reasoning" in said:
            thought = said["reasoning"]
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if said["content"] or not self._how.plan.reads:
            blocks.append({"type": "text", "text": said["content"]})
        for call in said.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
            blocks.append(
                {"type": "tool_use", "id": _tool_id(call["id"]), "name": function["name"],
                 "input": arguments}
            )  # fmt: skip
        return blocks, calls

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        total, cached = len(output.prompt_token_ids), output.metrics.cached_tokens
        pinned = max((pin.tokens for pin in self._work.options.pins), default=0)
        kept = max(0, pinned - cached)
        made = len(output.outputs[0].token_ids)
        return _usage(self._work.prompt, total - cached - kept, kept, cached, made)

    async def events(
        self, outputs: AsyncIterator[tuple[int, RequestOutput]]
    ) -> AsyncIterator[bytes]:
        """The API's events."""

        tell, own = _tell, self._compaction
        reader, blocks = Reader(), _Blocks(self._how, tell, 0 if own is None else 1)
        output: RequestOutput | None = None
        try:
            async for _, output in outputs:
                if not reader.started:
                    start = self._head | {"usage": self._usage(output) | {"output_tokens": 0}}
                    yield tell("message_start", message=start)
                    for made in _compaction_events(own) if own is not None else ():
                        yield made
                    if not self._how.plan.reads:
                        yield blocks.open({"type": "text", "text": ""})
                    yield tell("ping")
                for new in reader.read(output):
                    for made in blocks.of(new.text, new.finish_reason is not None):
                        yield made
        except Exception as error:
            if not reader.started:
                raise
            yield event(broken(error).anthropic(), "error")
            return
        assert output is not None
        reason, sequence = _stop(output.outputs[0], blocks.calls)
        for made in blocks.close():
            yield made
        yield tell(
            "message_delta",
            delta={"stop_reason": reason, "stop_sequence": sequence},
            usage=self._usage(output),
            penstock=priced(output, self._work.prompt),
        )
        yield tell("message_stop")


class _Blocks:
    """The blocks of a message as events, each opened when there is something for it."""

    def __init__(self, how: Answering, tell: Callable[..., bytes], before: int = 0) -> None:
        """before: blocks that are there already."""
        self._deltas = Calls(how)
        self._tell = tell
        self._index = before - 1
        self._kind = ""  # of the block that is open

    @property
    def calls(self) -> bool:
        """Whether one was whole."""
        return bool(self._deltas.ended)

    def open(self, block: dict[str, Any]) -> bytes:
        """A block begins."""
        self._index += 1
        self._kind = block["type"]
        return self._tell("content_block_start", index=self._index, content_block=block)

    def close(self) -> Iterator[bytes]:
        """The open block ends."""
        if self._kind:
            self._kind = ""
            yield self._tell("content_block_stop", index=self._index)

    def of(self, text: str, ended: bool) -> Iterator[bytes]:
        """What new text says."""
        for delta in self._deltas.deltas(text, ended):
            if "tool_calls" in delta:
                (call,) = delta["tool_calls"]
                function = call["function"]
                if "id" in call:
                    yield from self.close()
                    named = {"id": _tool_id(call["id"]), "name": function["name"]}
                    yield self.open({"type": "tool_use", **named, "input": {}})
                if function["arguments"]:
                    yield self._more("input_json_delta", partial_json=function["arguments"])
            elif "reasoning" in delta:
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._in(empty)
                yield self._more("thinking_delta", thinking=delta["reasoning"])
            else:
                yield from self._in({"type": "text", "text": ""})
                yield self._more("text_delta", text=delta["content"])

    def _in(self, block: dict[str, Any]) -> Iterator[bytes]:
        if self._kind != block["type"]:
            yield from self.close()
            yield self.open(block)

    def _more(self, kind: str, **data: str) -> bytes:
        return self._tell("content_block_delta", index=self._index, delta={"type": kind, **data})


def _tool_id(made: str) -> str:
    """As this API's clients expect an id to begin; a family's own short ones stay."""
    return made.replace("call_", "toolu_", 1)


def _stop(sample: CompletionOutput, calls: bool) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if sample.finish_reason == "length":
        return "max_tokens", None
    if isinstance(sample.stop_reason, str):
        return "stop_sequence", sample.stop_reason
    return "tool_use" if calls else "end_turn", None
