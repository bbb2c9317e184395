"""Requests from lines of JSON, all of them batched together, answered as each one ends."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.cli.batch_api import BatchApi
from penstock.errors import EngineDeadError, MissingExtraError, PenstockError, RequestError

if TYPE_CHECKING:
    from penstock.engine import AsyncLLM, RequestOutput

logger = logging.getLogger("penstock")

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_NOT_SHOWN = ("logprobs", "prompt_logprobs", "detokenize")
"""Sampling parameters whose result the answer of a plain line has no place for."""

_TOO_DEEP = "Lists and objects stand too deep within each other."

AHEAD = 4
"""Lines that are read ahead: this many times as many as run at once."""

PLAIN_MAX_TOKENS = 128
"""Of plain lines that don't say, where the command doesn't either."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run has written."""

    answered: frozenset[str] = frozenset()  # keys of lines, as `keys_of` has them
    refused: frozenset[str] = frozenset()  # what refusals say, as `refusal_in` has it


@dataclass(slots=True)
class Counts:
    """What became of the lines."""

    answered: int = 0
    failed: int = 0  # an answer that says why
    skipped: int = 0  # answered by an earlier run
    api_lines: int = 0  # of all these, lines of an OpenAI batch file
    prompt_tokens: int = 0
    generated_tokens: int = 0


@dataclass(slots=True)
class Batch:
    """Answers lines with one engine."""

    llm: AsyncLLM
    write: Callable[[dict[str, Any]], None]
    max_tokens: int | None = None  # of lines that don't say; None: 128, or the endpoint's own
    model_names: tuple[str, ...] = ()  # that batch lines may ask for; none: any
    earlier: Earlier = Earlier()
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
                line = _parse(text)
                self.counts.api_lines += _is_api(line)
                if self._is_done(number, line, text):
                    self.counts.skipped += 1
                    return
                answer = await self._answer(number, line, text)
            except (EngineDeadError, MissingExtraError):
                raise
            except Exception as error:
                if not isinstance(error, PenstockError | RecursionError):  # of this line alone
                    logger.exception("Line %d can't be answered: %r.", number, error)
                self.counts.failed += 1
                answer = _refusal(number, line, error)
            if refusal_in(answer) not in self.earlier.refused:  # said once already
                self.write(answer)
        finally:
            room.release()
            self.advance()

    def _is_done(self, number: int, line: dict[str, Any], text: str) -> bool:
        """Whether an earlier run has answered it.

        Raises RequestError for an id seen before, or one that is a list or an object.
        """
        name = _name(line)
        if name is not None:
            first = self._seen.setdefault(name, number)
            if first != number:
                raise RequestError(f"The id {name!r} is that of line {first} already.")
        given = line.get("custom_id", line.get("id"))
        if isinstance(given, list | dict):
            raise RequestError("A line's id must be a text or a number, not a list or an object.")
        return not self.earlier.answered.isdisjoint(keys_of(line, number, text))

    async def _answer(self, number: int, line: dict[str, Any], text: str) -> dict[str, Any]:
        if _is_api(line):
            if self._api is None:
                self._api = BatchApi(self.llm, self.model_names, self.max_tokens)
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
        return _plain_answer(number, line, text, output)

    async def _generate(self, line: dict[str, Any]) -> RequestOutput:
        """A line with a prompt or messages, and sampling parameters beside them."""
        from penstock.engine import RequestOptions
        from penstock.engine.prompts import check_chat, default_params, encode_chat
        from penstock.sampling import SamplingParams

        beside = (*_PROMPTS, "id", "custom_id", "prediction")
        chosen = {k: v for k, v in line.items() if k not in beside}
        if isinstance(chosen.get("logit_bias"), dict):
            chosen["logit_bias"] = {_token(k): v for k, v in chosen["logit_bias"].items()}
        SamplingParams.from_kwargs(**chosen)  # names and values
        hidden = next((name for name in _NOT_SHOWN if name in chosen), None)
        if hidden is not None:
            raise RequestError(f"A plain line's answer doesn't show {hidden}. Send a batch line.")
        most = PLAIN_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        defaults = replace(default_params(self.llm.runtime.model.generation), max_tokens=most)
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
            sight = self.llm.runtime.sight
            prompt = encode_chat(prompt, tokenizer, None if sight is None else sight.pictures)
        expected = line.get("prediction")
        ids = tuple(expected) if isinstance(expected, list) else expected
        options = RequestOptions(prediction=ids)
        async with aclosing(self.llm.generate(prompt, params, options=options)) as outputs:
            async for output in outputs:
                last = output  # each has all of its tokens
        if last.error is not None:
            built = self.llm.runtime.engine is not None
            advice = " If it fails again, check the engine: --verify." if built else ""
            raise _FailedError(f"Generation failed: {last.error}{advice}") from last.error
        return last


class _FailedError(RequestError):
    """The engine failed at a request that is right: it is worth another try."""


def keys_of(line: dict[str, Any], number: int, text: str) -> frozenset[str]:
    """What an answer to a line may be known by: its id; else its number, with what it says.

    The number alone is what versions before wrote, which didn't say of which text.
    """
    name = _name(line)
    if name is not None:
        return frozenset((f"id {name}",))
    return frozenset((f"line {number}", f"line {number} {text_sum(text)}"))


def text_sum(text: str) -> str:
    """Tells the texts of lines apart."""
    return hashlib.sha256(text.strip().encode(errors="surrogatepass")).hexdigest()[:16]


def _is_api(line: Mapping[str, Any]) -> bool:
    """Whether it is a line of an OpenAI batch file, however wrong."""
    return "url" in line or "body" in line or "method" in line


def _name(line: Mapping[str, Any]) -> str | None:
    """The id of a line or an answer, where it has one."""
    name = line.get("custom_id", line.get("id"))
    return name if isinstance(name, str) else None


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
        raise RequestError(_TOO_DEEP) from error
    if not isinstance(line, dict):
        raise RequestError(f"A line is an object, not {_KINDS[type(line)]}.")
    return line


_KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
}
"""Of JSON, by what Python makes of them."""


def _plain_answer(
    number: int, line: dict[str, Any], text: str, output: RequestOutput
) -> dict[str, Any]:
    return {
        "line": number,
        **_id_of(line),
        **({} if _name(line) is not None else {"line_sha256": text_sum(text)}),
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


def _refusal(number: int, line: dict[str, Any], error: Exception) -> dict[str, Any]:
    """The answer to a line that no request could be made of, or that failed."""
    code, message = "invalid_line", str(error)
    if isinstance(error, RecursionError):
        message = _TOO_DEEP
    elif not isinstance(error, PenstockError):
        code, message = "server_error", f"{type(error).__name__}: {message}"
    elif isinstance(error, _FailedError):
        code = "server_error"
    said = {"code": code, "message": message, "line": number}
    if _is_api(line):
        return {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": _id_of(line).get("id"),
            "response": None,
            "error": said,
        }
    return {"line": number, **_id_of(line), "error": said}


def _id_of(line: dict[str, Any]) -> dict[str, Any]:
    """What an answer repeats of a line: {"id": …}, where that isn't a list or an object."""
    name = line.get("custom_id", line.get("id"))
    return {} if name is None or isinstance(name, list | dict) else {"id": name}


def refusal_in(answer: Mapping[str, Any]) -> str | None:
    """What an answer that is a refusal says, and of which line; None for any other.

    The same for the same refusal by a later run.
    """
    response, said = answer.get("response"), answer.get("error")
    if isinstance(response, dict) and response.get("status_code") != 200:
        said = [response.get("status_code"), response.get("body")]
    if said is None:
        return None
    name = answer.get("custom_id") if "custom_id" in answer else answer.get("id")
    return json.dumps([name, answer.get("line"), said], sort_keys=True)


def earlier_in(text: str) -> Earlier:
    """What an earlier run's output answers, and what it refuses.

    Refused lines, and those that the engine failed at, are asked again: what was wrong may have
    been put right, in the line, in those before it, or in the command.
    """
    answered, refused = set(), set()
    for row in text.split("\n"):  # texts may hold other ends of lines
        try:
            answer = json.loads(row)
            said = refusal_in(answer) if isinstance(answer, dict) else None
        except (ValueError, RecursionError):  # no row of ours
            continue
        if said is not None:
            refused.add(said)
        elif isinstance(answer, dict) and ("samples" in answer or answer.get("response")):
            answered.add(_key_in(answer))
    return Earlier(frozenset(answered), frozenset(refused))


def _key_in(answer: Mapping[str, Any]) -> str:
    """Of `keys_of` the one that an answer has."""
    name = _name(answer)
    if name is not None:
        return f"id {name}"
    of = answer.get("line_sha256")
    return f"line {answer.get('line')}" + (f" {of}" if isinstance(of, str) else "")
