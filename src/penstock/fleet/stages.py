"""An ensemble's answer: stage after stage, the last one's handed on as any answer is."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import Any

from fastapi import Request
from starlette.responses import Response

from penstock.fleet.ask import Ask
from penstock.fleet.ensemble import INPUT, Ensemble, Stage
from penstock.fleet.fleet import Fleet
from penstock.fleet.passage import Passage
from penstock.server.errors import ApiError
from penstock.server.sse import dumps, unless_gone

_PATH = "/v1/chat/completions"


class _Passages:
    """Those of an ensemble's stages, closed together."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def add(self, passage: Passage) -> Passage:
        self._stack.callback(passage.close)
        return passage

    def close(self) -> None:
        """All stages have ended."""
        self._stack.close()


async def answer_in_stages(
    request: Request, fleet: Fleet, ensemble: Ensemble, ask: Ask
) -> Response:
    """The last stage's answer, as that stage's model gives it. Raises ApiError."""
    if ask.path != _PATH:
        raise ApiError(
            400, f"{ensemble.name!r} is an ensemble; it is asked at {_PATH}.", param="model"
        )
    for field in ("tools", "functions"):
        if ask.data.get(field):
            raise ApiError(400, "An ensemble calls no tools. Leave them out.", param=field)
    passages = request.state.ticket = _Passages()
    texts = {INPUT: _said_last(ask)}

    def passage_of(stage: Stage, *, last: bool) -> Passage:
        own = ask.data if last else {}
        kept = {k: v for k, v in own.items() if k not in ("messages", "model")}
        data = kept | {"model": stage.model, "messages": stage.messages(texts)}
        data = stage.parameters | data if last else data | stage.parameters
        made = Ask(_PATH, data, dumps(data).encode(), ask.headers)
        group = fleet.group(stage.model)
        made.wish(request.state.key.limits, group.config.policy)
        if made.streams:
            made.settle_seed()
        return passages.add(Passage(fleet, group, made, request.state.key))

    async def text_of(stage: Stage) -> tuple[str, str]:
        passage = passage_of(stage, last=False)
        try:
            return stage.name, _text(ensemble, stage, await passage.answer())
        finally:
            passage.close()  # its place is for the next stage

    async def all_but_last() -> None:
        for stages in ensemble.rounds[:-1]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(text_of(stage)) for stage in stages]
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
            texts.update(task.result() for task in tasks)

    await unless_gone(request.receive, all_but_last())
    last = passage_of(ensemble.stages[-1], last=True)
    answer = await unless_gone(request.receive, last.answer())
    request.state.answer_headers = last.headers
    return answer


def _said_last(ask: Ask) -> str:
    """The text of the caller's last message. Raises ApiError."""
    messages = ask.data.get("messages")
    last: Any = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(content, list):
        parts = [x.get("text") if isinstance(x, dict) else None for x in content]
        texts = [x for x in parts if isinstance(x, str)]
        content = "".join(texts) if parts and len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise ApiError(
            400, "An ensemble is asked by a last message whose content is text.", param="messages"
        )
    return content


def _text(ensemble: Ensemble, stage: Stage, answer: Response) -> str:
    """What a stage said. Raises ApiError for what it refused."""
    found = json.loads(bytes(answer.body))
    if answer.status_code != 200:
        error = found.get("error", {})
        raise ApiError(
            answer.status_code,
            f"The stage {stage.name!r} of {ensemble.name!r}: {error.get('message')}",
            code=error.get("code"),
        )
    return found["choices"][0]["message"]["content"] or ""
