"""OpenAI's streaming API: a request's body, and what the events of its answer say.

Source: OpenAI API reference, "Completions" and "Chat", with vLLM's `ignore_eos` and prompts of
token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.bench.serve.options import Backend
from penstock.bench.serve.record import RequestRecord
from penstock.bench.serve.sse import SseParser
from penstock.bench.serve.vocabulary import Indices, Vocabulary
from penstock.http1 import ExchangeError

ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}

_CHAT_TEXT = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


@dataclass(frozen=True, slots=True)
class Api:
    """How requests are written."""

    backend: Backend
    endpoint: str
    model: str
    as_text: bool  # prompts are text, not token ids
    include_usage: bool = True
    ignore_eos: bool = False
    temperature: float | None = 0.0  # None: the server's own
    extra_body: dict[str, Any] = field(default_factory=dict)

    def opening(self, vocabulary: Vocabulary, prompt: Indices) -> Any:
        """A conversation's first prompt: ids, text, or messages."""
        if self.backend == "openai-chat":
            return [{"role": "user", "content": vocabulary.as_text(prompt)}]
        return vocabulary.as_text(prompt) if self.as_text else vocabulary.as_ids(prompt)

    def continued(self, said: Any, answer: str, vocabulary: Vocabulary, prompt: Indices) -> Any:
        """The next turn's prompt: all that was said, the answer, and what is new. Text only."""
        new = vocabulary.as_text(prompt)
        if self.backend == "openai-chat":
            reply = {"role": "assistant", "content": answer}
            return [*said, reply, {"role": "user", "content": new}]
        return said + answer + new

    def body(self, prompt: Any, output_len: int) -> bytes:
        """The request's JSON."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.backend == "openai-chat" else "prompt": prompt,
            "max_tokens": output_len,
            "stream": True,
        }
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.include_usage:
            fields["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return json.dumps(fields | self.extra_body, separators=(",", ":")).encode()


class Answer:
    """Notes in a record what an answer's events say, each at the time when its bytes came."""

    def __init__(
        self,
        api: Api,
        record: RequestRecord,
        clock: Callable[[], float],
        on_tokens: Callable[[int], None],
        *,
        keep_text: bool = False,
    ) -> None:
        self.text: list[str] = []
        self._record = record
        self._clock = clock
        self._on_tokens = on_tokens
        self._keep_text = keep_text
        self._chat = api.backend == "openai-chat"
        self._sse = SseParser()
        self._ended = False
        self._events = 0
        self._closed_s: float | None = None  # when its finish_reason came

    def feed(self, data: bytes) -> None:
        """Take a piece of the body. Raises `ExchangeError` for an error that the server streams."""
        now = self._clock()
        for event in self._sse.feed(data):
            self._events += 1
            if event == b"[DONE]":
                self._ended = True
                continue
            try:
                found = json.loads(event)
                self._note(found, now)
            except (ValueError, TypeError, AttributeError, LookupError) as wrong:
                raise ExchangeError(
                    "malformed answer",
                    f"An event isn't one of OpenAI's API ({type(wrong).__name__}: {wrong}): "
                    f"{event[:120].decode('utf-8', 'replace')}",
                ) from wrong

    def finish(self, content_type: str) -> None:
        """The body has ended. Raises `ExchangeError` where the answer isn't whole."""
        record = self._record
        if not self._events:
            raise ExchangeError(
                "malformed answer", f"The answer is {content_type or 'untyped'}, not a stream."
            )
        if not self._ended and record.finish_reason is None:
            raise ExchangeError(
                "cut off",
                f"The stream ended after {len(record.token_times_s)} chunks without a "
                "finish_reason or [DONE].",
            )
        if record.token_times_s:
            return
        if self._closed_s is None or record.completion_tokens == 0:
            raise ExchangeError("no tokens", "The answer has no tokens.")
        record.token_times_s.append(self._closed_s)  # its only token ends the text, and shows none
        record.last_s = self._closed_s
        self._on_tokens(1)

    def _note(self, event: dict[str, Any], now: float) -> None:
        record = self._record
        error = event.get("error")
        if error:
            message = error.get("message") if isinstance(error, dict) else error
            raise ExchangeError("error in stream", f"The server streamed an error: {message}")
        for choice in event.get("choices") or ():
            reason = _text(choice, "finish_reason")
            if reason is not None:
                record.finish_reason = reason
                self._closed_s = now
            if self._has_token(choice, reason):
                record.token_times_s.append(now)
                self._on_tokens(1)
            if record.token_times_s:  # a chunk before the first token only opens the answer
                record.last_s = now
        usage = event.get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            prompt, made = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
            record.cached_tokens = _count(details, "cached_tokens")
            record.prompt_tokens, record.completion_tokens = prompt, made

    def _has_token(self, choice: dict[str, Any], reason: str | None) -> bool:
        """Whether a chunk stands for a token.

        One without text does, as part of a character, unless it opens the answer (a role) or only
        ends it.
        """
        if not self._chat:
            text = _text(choice, "text")
            if text and self._keep_text:
                self.text.append(text)
            return bool(text) or (text is not None and reason is None)
        delta = choice.get("delta") or {}
        content = _text(delta, "content")
        if content and self._keep_text:
            self.text.append(content)
        if any(delta.get(name) for name in _CHAT_TEXT):
            return True
        return content is not None and reason is None and "role" not in delta


def _count(fields: dict[str, Any], name: str) -> int | None:
    """A number of tokens, None where the server doesn't say. Raises TypeError."""
    value = fields.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    raise TypeError(f"{name} is {value!r:.40}, not a number of tokens")


def _text(fields: dict[str, Any], name: str) -> str | None:
    """A string or None. Raises TypeError."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{name} is {value!r:.40}, not a string")
