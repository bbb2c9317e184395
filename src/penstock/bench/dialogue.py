"""What a chat model does with dialogues it hasn't seen: does it end, keep the format, call tools?

A file has one conversation a line, `{"messages": […], "tools": […]}` in the OpenAI API's form.
Every reply of the assistant is generated anew, greedily, from the true conversation before it. Tool
calls are read in Hermes' format, which Qwen shares:
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.config import EngineConfig
from penstock.engine import CompletionOutput, Engine
from penstock.errors import ConfigError, PenstockError
from penstock.runtime import Runtime
from penstock.sampling import SamplingParams
from penstock.tokenizer import Tokenizer

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_JSON = json.JSONDecoder()

_NOT_SO = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What JSON of another form than the one expected raises."""

Call = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and tools, as a client sends them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass(slots=True)
class DialogueScore:
    """One model on one file of conversations. Shares are None where nothing was counted."""

    name: str
    conversations: int
    replies: int = 0
    left_out: int = (
        0  # beside these: with its answer, the conversation is more than the model reads
    )
    ended: int = 0  # by themselves, within the length allowed
    valid: int = 0  # ended, not empty, every tool call readable and of a tool that was offered
    calling: int = 0  # replies that call tools in the file
    exact: int = 0  # of these: the same calls, names and arguments
    named: int = 0  # of these: the same names
    uncalled_for: int = 0  # other replies that call a tool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **asdict(self),
            "ended_share": _share(self.ended, self.replies),
            "format_validity": _share(self.valid, self.replies),
            "tool_call_exact_match": _share(self.exact, self.calling),
            "tool_call_name_match": _share(self.named, self.calling),
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def read_conversations(file: Path, limit: int | None = None) -> list[Conversation]:
    """The file's first `limit` conversations. Raises ConfigError, naming the line."""
    found: list[Conversation] = []
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} isn't UTF-8 text: {error}.") from error
    for number, line in enumerate(lines, 1):
        if limit is not None and len(found) == limit:
            break
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            messages, tools = entry["messages"], entry.get("tools")
            roles = [message["role"] for message in messages]
            _ = _names(tools)
        except _NOT_SO as error:
            raise ConfigError(
                f"{file}, line {number} isn't a conversation: {error!r}. A line is a JSON object "
                "with `messages`, each with a role, and perhaps `tools`."
            ) from error
        if "assistant" not in roles[1:]:
            raise ConfigError(f"{file}, line {number} has no reply by the assistant.")
        found.append(Conversation(messages, tools or None))
    if not found:
        raise ConfigError(f"{file} holds no conversation.")
    return found


def _names(tools: Sequence[Mapping[str, Any]] | None) -> set[str]:
    """Of the tools that are offered. Raises one of `_NOT_SO`."""
    names = [tool.get("function", tool)["name"] for tool in tools or []]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a tool is called {name!r:.80}, which isn't a string")
    return set(names)


def calls_of(text: str) -> list[Call]:
    """The tool calls in a reply. Raises ValueError for one that can't be read."""
    found = []
    at = text.find(_OPEN)
    while at >= 0:
        call, at = _call_at(text, at + len(_OPEN))
        found.append(call)
        at = text.find(_OPEN, at)
    return found


def _call_at(text: str, start: int) -> tuple[Call, int]:
    """The call that begins at `start`, behind its tag, and where its closing tag ends.

    The JSON says where it ends: its strings may have tags in them. Raises ValueError.
    """
    block = text[start:].lstrip()
    try:
        call, end = _JSON.raw_decode(block)
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {block[:80]!r}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"not a tool call: {block[:end]!r}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments aren't an object: {block[:end]!r}")
    rest = block[end:].lstrip()
    if not rest.startswith(_CLOSE):
        raise ValueError(f"no {_CLOSE} behind a call: {block[:end]!r}")
    return (call["name"], arguments), len(text) - len(rest) + len(_CLOSE)


def _as_written(calls: Sequence[Call]) -> str:
    """What is equal only for the same JSON: in Python, true is 1 and 1.0 is 1."""
    return json.dumps(calls, sort_keys=True)


def expected_calls(message: Mapping[str, Any]) -> list[Call]:
    """The tool calls of a message in the OpenAI API's form."""
    found = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        found.append((function["name"], arguments))
    _ = _as_written(found)  # or it can't be compared
    return found


def score_dialogues(
    config: EngineConfig,
    runtime: Runtime,
    name: str,
    conversations: Sequence[Conversation],
    max_tokens: int = 128,
) -> DialogueScore:
    """Generate every reply of `conversations`, all of them at once, and count.

    Raises ConfigError for a conversation that can't be written or compared.
    """
    assert runtime.tokenizer is not None
    engine = Engine(config, runtime)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, skip_special_tokens=False)
    turns: dict[str, tuple[list[Call], set[str]]] = {}
    score = DialogueScore(name, len(conversations))
    for i, conversation in enumerate(conversations):
        offered = _names(conversation.tools)
        for j, message in enumerate(conversation.messages):
            if j == 0 or message["role"] != "assistant":
                continue
            ids = prompt_of(runtime.tokenizer, conversation, j)
            if len(ids) + max_tokens > runtime.model.max_model_len:
                score.left_out += 1
                continue
            try:
                turns[f"{i}.{j}"] = expected_calls(message), offered
            except _NOT_SO as error:
                raise ConfigError(
                    f"{name}: message {j} of conversation {i + 1} has tool calls that can't be "
                    f"read: {error!r}"
                ) from error
            engine.add_request(f"{i}.{j}", ids, params)
    while engine.has_unfinished:
        for output in engine.step():
            (sample,) = output.outputs
            if output.request_id in turns and sample.finish_reason is not None:
                wanted, offered = turns.pop(output.request_id)
                text = _closed(sample, runtime.tokenizer)
                _count(score, text, sample.finish_reason == "stop", wanted, offered)
    return score


def _closed(sample: CompletionOutput, tokenizer: Tokenizer) -> str:
    """A reply's text, with the tag that closes a call where that is the token it ends by."""
    last = tokenizer.token_bytes(sample.token_ids[-1]) if sample.token_ids else b""
    ends_by_it = sample.finish_reason == "stop" and last == _CLOSE.encode()
    return sample.text + _CLOSE * (ends_by_it and not sample.text.endswith(_CLOSE))


def prompt_of(tokenizer: Tokenizer, conversation: Conversation, message: int) -> list[int]:
    """Token ids of what comes before the assistant's message at `message`."""
    try:
        text = tokenizer.apply_chat_template(
            conversation.messages[:message], tools=conversation.tools
        )
    except PenstockError as error:
        raise ConfigError(f"The chat template refuses a conversation: {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


def _count(
    score: DialogueScore, text: str, ended: bool, wanted: list[Call], offered: set[str]
) -> None:
    score.replies += 1
    score.ended += ended
    try:
        calls = calls_of(text)
        readable = all(name in offered for name, _ in calls)
    except ValueError:
        calls, readable = [], False
    score.valid += ended and readable and bool(text.strip())
    if wanted:
        score.calling += 1
        score.exact += _as_written(calls) == _as_written(wanted)
        score.named += [name for name, _ in calls] == [name for name, _ in wanted]
    else:
        score.uncalled_for += bool(calls)
