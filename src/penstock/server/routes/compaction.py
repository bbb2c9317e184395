"""Conversations that are summarised before they are answered, and `/v1/responses/compact`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from penstock.sampling import SamplingParams
from penstock.server.admission import Ticket
from penstock.server.body import JsonRoute
from penstock.server.compaction import (
    IMPOSSIBLE,
    Conversation,
    Play,
    Question,
    Spent,
    Wanted,
    Writing,
)
from penstock.server.conversation import pictures_of
from penstock.server.errors import ApiError
from penstock.server.prompt import RESPONSE, PromptText, Rendering, Source
from penstock.server.protocol.answers import CompactedResponse
from penstock.server.protocol.common import ContextManagement, EngineFields
from penstock.server.protocol.compaction import output_items
from penstock.server.protocol.responses import CompactRequest
from penstock.server.routes.common import ERRORS, admit, answers, caller_of, now, service_of
from penstock.server.routes.stored import earlier_of
from penstock.server.routes.tools import answering, message_of, telling
from penstock.server.service import Service, Work
from penstock.server.sse import dumps
from penstock.server.tools.offer import Offer
from penstock.server.tools.plan import Plan

router = APIRouter(route_class=JsonRoute)
_LARGE_BYTES = 1 << 15  # of a body
_FIELD = "context_management[0].compact_threshold"


@dataclass(frozen=True, slots=True)
class Compacted:
    """What is left of a conversation. spent: None where nothing was, and all of it is left."""

    conversation: Conversation
    spent: Spent | None = None

    @property
    def is_shorter(self) -> bool:
        """Does a summary stand for some of it? One that was asked for may have come to nothing."""
        return self.spent is not None and self.spent.messages > 0


def wanted(service: Service, asked: Sequence[ContextManagement] | None) -> Wanted | None:
    """When the request, or else the server, wants a conversation compacted; None: never."""
    own = service.config.compaction_threshold
    if asked is None:
        return None if own is None else Wanted(own, None, "The server's --compaction-threshold")
    if not asked:
        return None
    given = asked[0].compact_threshold
    if given is not None:
        return Wanted(given, _FIELD, "compact_threshold")
    return Wanted(own or service.prompts.max_len, _FIELD, "compact_threshold, left out,")


async def conversation_of(
    service: Service, ticket: Ticket, read: Callable[[], Conversation]
) -> Conversation:
    """What a request's items stand for: of large ones beside the event loop. Raises ApiError."""
    return await service.compute(ticket, read) if ticket.size > _LARGE_BYTES else read()


async def compacted(
    request: Request,
    ticket: Ticket,
    conversation: Conversation,
    rendering: Rendering,
    when: Wanted | None,
    *,
    body: EngineFields,
    model: str,
    reserve: int | None,
    source: Source,
    check: Callable[[], object],
    truncation: str | None = None,
) -> Compacted:
    """The conversation with a summary in place of its older turns, where it is too long.

    The summary is asked for as the request itself would be: of the same model, in the same place of
    the queue, in the same time. reserve: tokens of the answer. check: of what else the request
    says, before anything is computed. Raises ApiError for what can't be summarised, unless
    truncation is "auto", which will leave it out.
    """
    if when is None:
        return Compacted(conversation)
    service = service_of(request)
    without = service.tooling.plan(rendering.chat_template, Offer())
    asking = _asking(rendering, without)
    slow = (
        rendering.chat_template is not service.config.chat_template
        or any(message.has_pictures for message in conversation.messages)
    )  # fmt: skip
    salt = dumps([model, body.cache_salt]).encode()

    def begin() -> Play:
        check()
        service.prompts.check_tools(rendering.telling, source)
        writing = _writing(service, conversation, rendering, asking, source, salt)
        return Play(
            conversation, writing, when, service.remembered, service.prompts.max_len, reserve or 1
        )

    play = await service.compute(ticket, begin, slow=slow)
    spent = Spent()
    try:
        while (question := await service.compute(ticket, play.next, slow=slow)) is not None:
            play.told(await _summary(service, ticket, question, play, without, body, model, spent))
    except ApiError as error:
        leaves_out = (truncation or service.config.truncation) == "auto" and not when.forced
        if error.code != IMPOSSIBLE or not leaves_out:
            raise
    left, spent.messages = play.result
    return Compacted(left, spent if spent.messages or spent.passes else None)


def _asking(rendering: Rendering, without: Plan) -> Rendering:
    """How the model is asked: without tools, which it shan't call, and without thoughts."""
    return replace(
        telling(rendering, without),
        add_generation_prompt=True,
        continue_final_message=False,
        kwargs={**(rendering.kwargs or {}), "enable_thinking": False},
    )


def _writing(
    service: Service,
    conversation: Conversation,
    rendering: Rendering,
    asking: Rendering,
    source: Source,
    salt: bytes,
) -> Writing:
    prompts = service.prompts
    earlier = replace(rendering, add_generation_prompt=True, continue_final_message=False)
    plain = prompts.plain(conversation.messages, rendering, source)
    same = rendering.telling.history == asking.telling.history
    last = plain[-1] if plain else None

    def render(messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        ends = bool(messages) and messages[-1] is last
        return prompts.render(messages, rendering if ends else earlier, source)

    told = rendering.telling
    how = [rendering.chat_template, rendering.kwargs, rendering.documents, told.shown]
    return Writing(
        plain,
        plain if same else prompts.plain(conversation.messages, asking, source),
        render,
        lambda messages: prompts.render(messages, asking, source),
        lambda text: len(prompts.tokenizer.encode(text, add_special_tokens=False)),
        salt + dumps(how).encode(),
    )


async def _summary(
    service: Service,
    ticket: Ticket,
    question: Question,
    play: Play,
    plan: Plan,
    body: EngineFields,
    model: str,
    spent: Spent,
) -> str:
    """The model's own, greedily. Raises ApiError where it says nothing."""
    seen = pictures_of(question.messages)
    prompt = PromptText(question.tokens, question.text, pictures=seen)
    how = answering(service, ticket, plan, prompt)
    params = SamplingParams(
        temperature=0.0, max_tokens=play.most, skip_special_tokens=not plan.sees_special
    )
    options = service.options(ticket.caller, body, prompt, model)
    options = replace(options, hand_over=False)
    output = await service.beside(ticket, Work(prompt, params, options))
    (sample,) = output.outputs
    spent.passes += 1
    spent.input_tokens += len(question.tokens)
    spent.cached_tokens += output.metrics.cached_tokens
    spent.output_tokens += len(sample.token_ids)
    text: str = (message_of(sample.text, how)[0]["content"] or "").strip()
    if not text:
        raise ApiError(
            400,
            f"The model was asked for a summary of {len(question.tokens):,} tokens of the "
            f"conversation and has said nothing in {len(sample.token_ids):,} of "
            f'{play.most:,} tokens. Send fewer messages, or truncation: "auto", which leaves turns '
            "out instead.",
            param=play.wanted.param,
            code=IMPOSSIBLE,
        )
    return text


@router.post("/v1/responses/compact", responses=ERRORS | answers(CompactedResponse, streams=False))
async def compact_response(body: CompactRequest, request: Request) -> Response:
    """A conversation's summary as an item that stands for it; nothing is stored."""
    service = service_of(request)
    model = service.check_model(body.model)
    caller = caller_of(request, "resp")
    ticket = await admit(request, caller)
    earlier = earlier_of(service, ticket, body)
    conversation = await conversation_of(service, ticket, partial(body.conversation, earlier))
    rendering = Rendering(
        chat_template=service.config.chat_template, kwargs=body.chat_template_kwargs
    )
    rendering = telling(rendering, service.tooling.plan(rendering.chat_template, Offer()))
    made = await compacted(
        request,
        ticket,
        conversation,
        rendering,
        Wanted(service.prompts.max_len, "input", "The model's length", forced=True),
        body=body,
        model=model,
        reserve=None,
        source=RESPONSE,
        check=lambda: None,
    )
    assert made.spent is not None  # or there was an error
    spent, name = made.spent, caller.request_id.removeprefix("resp-")
    left = body.sealable(made.conversation)
    output = await service.compute(ticket, lambda: output_items(left, name))
    return JSONResponse(
        {
            "id": caller.request_id.replace("-", "_", 1),
            "object": "response.compaction",
            "created_at": now(),
            "output": output,
            "usage": {
                "input_tokens": spent.input_tokens,
                "input_tokens_details": {"cached_tokens": spent.cached_tokens},
                "output_tokens": spent.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": spent.input_tokens + spent.output_tokens,
            },
            "penstock": {"compaction": spent.as_dict()},
        }
    )
