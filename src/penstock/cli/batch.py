"""Requests from lines of JSON, all of them batched together, answered as each one ends."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.cli.batch_api import BatchApi
from penstock.errors import EngineDeadError, MissingExtraError, PenstockError, RequestError

if TYPE_CHECKING:
    from penstock.engine import AsyncLLM, RequestOutput

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_NOT_SHOWN = ("logprobs", "prompt_logprobs", "detokenize")
"""Sampling parameters whose result the answer of a plain line has no place for."""

AHEAD = 4
"""Lines that are read ahead: this many times as many as run at once."""


@dataclass(slots=True)
class Counts:
    """What became of the lines."""

    answered: int = 0
    failed: int = 0  # an answer that says why
    skipped: int = 0  # answered by an earlier run
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True)
class Batch:
    """Answers lines with one engine."""

    llm: AsyncLLM
    write: Callable[[dict[str, Any]], None]
    max_tokens: int = 128  # of plain lines that don't say
    model_names: tuple[str, ...] = ()  # that batch lines may ask for; none: any
    done_before: frozenset[str] = frozenset()  # keys of lines that have been answered
    advance: Callable[[], None] = lambda: None  # after each line
    counts: Counts = field(default_factory=Counts)
    _api: BatchApi | None = None
    _seen: dict[str, int] = field(default_factory=dict)

    async def run(self, lines: AsyncIterator[str]) -> Counts:
        """Answer every line; what is wrong with one is its answer. Raises EngineDeadError."""
        room = asyncio.Semaphore(AHEAD * self.llm.config.scheduler.max_num_seqs)
        try:
            async with asyncio.TaskGroup() as group:
                number = 0
                async for text in lines:
                    number += 1
                    if not text.strip():
                        continue
                    await room.acquire()
                    group.create_task(self._line(number, text, room))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return self.counts

    async def _line(self, number: int, text: str, room: asyncio.Semaphore) -> None:
        try:
            line: dict[str, Any] = {}
            try:
                if f"refused {number}" in self.done_before:
                    self.counts.skipped += 1
                    return
                line = _parse(text)
                if self._is_done(number, line):
                    self.counts.skipped += 1
                    return
                answer = await self._answer(number, line)
            except (EngineDeadError, MissingExtraError):
                raise
            except PenstockError as error:
                self.counts.failed += 1
                answer = _refusal(number, line, error)
            self.write(answer)
        finally:
            room.release()
            self.advance()

    def _is_done(self, number: int, line: dict[str, Any]) -> bool:
        """Whether an earlier run has answered it. Raises RequestError for an id seen before."""
        name = line.get("custom_id", line.get("id"))
        if isinstance(name, str):
            first = self._seen.setdefault(name, number)
            if first != number:
                raise RequestError(f"The id {name!r} is that of line {first} already.")
        return key_of(line, number) in self.done_before

    async def _answer(self, number: int, line: dict[str, Any]) -> dict[str, Any]:
        if "url" in line or "body" in line or "method" in line:
            if self._api is None:
                self._api = BatchApi(self.llm, self.model_names)
            response = await self._api.answer(line)
            ok = response["status_code"] == 200
            self.counts.answered += ok
            self.counts.failed += not ok
            usage = response["body"].get("usage") or {}
            self.counts.prompt_tokens += usage.get("prompt_tokens", 0)
            self.counts.generated_tokens += usage.get("completion_tokens", 0)
            return {
                "id": f"batch_req_{uuid.uuid4().hex}",
                "custom_id": line["custom_id"],
                "response": response,
                "error": None,
            }
        output = await self._generate(line)
        self.counts.answered += 1
        self.counts.prompt_tokens += len(output.prompt_token_ids)
        self.counts.generated_tokens += sum(len(x.token_ids) for x in output.outputs)
        return _plain_answer(number, line, output)

    async def _generate(self, line: dict[str, Any]) -> RequestOutput:
        """A line with a prompt or messages, and sampling parameters beside them."""
        from penstock.engine.prompts import check_chat, default_params, encode_chat
        from penstock.sampling import SamplingParams

        chosen = {k: v for k, v in line.items() if k not in (*_PROMPTS, "id", "custom_id")}
        if isinstance(chosen.get("logit_bias"), dict):
            chosen["logit_bias"] = {_token(k): v for k, v in chosen["logit_bias"].items()}
        SamplingParams.from_kwargs(**chosen)  # names and values
        hidden = next((name for name in _NOT_SHOWN if name in chosen), None)
        if hidden is not None:
            raise RequestError(f"A plain line's answer doesn't show {hidden}. Send a batch line.")
        defaults = replace(
            default_params(self.llm.runtime.model.generation), max_tokens=self.max_tokens
        )
        params = replace(defaults, **chosen)
        given = [name for name in _PROMPTS if name in line]
        if len(given) != 1:
            raise RequestError(
                f"A line needs one of {', '.join(_PROMPTS)}, or custom_id, url and body; this "
                f"one has {' and '.join(given) or 'none of them'}."
            )
        prompt: Any = line[given[0]]
        if given[0] == "messages":
            tokenizer = self.llm.get_tokenizer()
            if tokenizer is None:
                raise RequestError("messages need a tokenizer, and this model has none.")
            if not isinstance(prompt, list) or not all(isinstance(m, dict) for m in prompt):
                raise RequestError("messages must be a list of objects with role and content.")
            check_chat(params)
            prompt = encode_chat(prompt, tokenizer)
        async with aclosing(self.llm.generate(prompt, params)) as outputs:
            async for output in outputs:
                last = output  # each has all of its tokens
        if last.error is not None:
            raise _FailedError(
                f"Generation failed: {last.error} If it fails again, check the engine: --verify."
            ) from last.error
        return last


class _FailedError(RequestError):
    """The engine failed at a request that is right: it is worth another try."""


def key_of(line: dict[str, Any], number: int) -> str:
    """What tells a line, or an answer to it, from the others: its id, else its number."""
    name = line.get("custom_id", line.get("id"))
    return f"id {name}" if isinstance(name, str) else f"line {number}"


def _token(text: str) -> int:
    """A key of `logit_bias`: JSON has no numbers there."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise RequestError(f"logit_bias has the key {text[:40]!r}; its keys are token ids.")
    return int(text)


def _parse(text: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise RequestError(f"This isn't JSON: {error}.") from error
    except RecursionError as error:
        raise RequestError("Lists and objects stand too deep within each other.") from error
    if not isinstance(line, dict):
        raise RequestError(f"A line is an object, not a {type(line).__name__}.")
    return line


def _plain_answer(number: int, line: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
    name = line.get("custom_id", line.get("id"))
    return {
        "line": number,
        **({} if name is None else {"id": name}),
        "samples": [
            {
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in output.outputs
        ],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": sum(len(x.token_ids) for x in output.outputs),
            "cached_tokens": output.metrics.cached_tokens,
        },
    }


def _refusal(number: int, line: dict[str, Any], error: PenstockError) -> dict[str, Any]:
    """The answer to a line that no request could be made of, or that failed."""
    code = "server_error" if isinstance(error, _FailedError) else "invalid_line"
    said = {"code": code, "message": str(error), "line": number}
    name = line.get("custom_id", line.get("id"))
    if "url" in line or "body" in line:
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": name,
            "response": None,
            "error": said,
        }
    return {"line": number, **({} if name is None else {"id": name}), "error": said}


def answered_in(text: str) -> frozenset[str]:
    """The keys of lines that an earlier run's output answers, refusals among them.

    Answers that speak of the engine's own failure (5xx) don't count: they are worth another try.
    """
    found = set()
    for row in text.split("\n"):  # texts may hold other ends of lines
        try:
            answer = json.loads(row)
        except ValueError:
            continue
        if not isinstance(answer, dict):
            continue
        response = answer.get("response")
        if isinstance(response, dict) and response.get("status_code", 0) >= 500:
            continue
        error = answer.get("error")
        if isinstance(error, dict) and "line" in error:
            if error.get("code") == "server_error":
                continue
            found.add(f"refused {error['line']}")
            continue  # not its id: that may be another line's, which isn't answered yet
        if isinstance(answer.get("custom_id"), str):
            found.add(f"id {answer['custom_id']}")
        elif isinstance(answer.get("id"), str) and "line" in answer:
            found.add(f"id {answer['id']}")
        else:
            line = answer.get("line", error.get("line") if isinstance(error, dict) else None)
            found.add(f"line {line}")
    return frozenset(found)
