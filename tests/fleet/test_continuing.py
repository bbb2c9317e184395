"""Answers that break off and are gone on with: what comes is what would have come."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from penstock.fleet.continuing import Continuation, Events, Sent, engine_died
from penstock.server.errors import ApiError
from penstock.server.sse import DONE, event
from tests.fleet.conftest import Pair

CHAT = {"messages": [{"role": "user", "content": "Tell me of a dog"}]}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {"type": "object", "properties": {"what": {"type": "string"}},
                           "required": ["what"]},
        },
    }
]  # fmt: skip
BODIES = {
    "greedy": ("/v1/completions", {"prompt": "Once upon a time", "temperature": 0}),
    "sampled": ("/v1/completions", {"prompt": "Once upon a time", "temperature": 1.2, "seed": 3}),
    "unicode": ("/v1/completions", {"prompt": "Zoë 🦊 said: “", "temperature": 1.6, "seed": 5}),
    "samples": ("/v1/completions", {"prompt": "A cat", "n": 3, "temperature": 1, "seed": 1}),
    "prompts": ("/v1/completions", {"prompt": ["A cat", "A dog"], "temperature": 0}),
    "logprobs": ("/v1/completions", {"prompt": "A cat", "logprobs": 3, "temperature": 0}),
    "ids": ("/v1/completions", {"prompt": "A cat", "return_token_ids": True, "temperature": 0}),
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0}),
    "chat logprobs": ("/v1/chat/completions", {**CHAT, "temperature": 0, "logprobs": True,
                                               "top_logprobs": 2}),
    "chat usage": ("/v1/chat/completions", {**CHAT, "temperature": 0,
                                            "stream_options": {"include_usage": True}}),
    "call": ("/v1/chat/completions", {**CHAT, "temperature": 0, "tools": TOOLS,
                                      "tool_choice": "required"}),
}  # fmt: skip


def said(events: list[Any]) -> dict[int, dict[str, Any]]:
    """What all of an answer's events together say, choice by choice."""
    found: dict[int, dict[str, Any]] = defaultdict(lambda: defaultdict(str))
    for data in events[:-1]:
        for choice in data["choices"]:
            into = found[choice["index"]]
            for path, value in leaves(choice.get("delta", {"text": choice.get("text")})):
                if path.endswith(".id"):  # random
                    into[path] = bool(value)
                elif value is not None:
                    into[path] += value
            for path, value in leaves(choice.get("logprobs") or {}):
                if value is not None:
                    into[f"logprobs.{path}"] = [*(into[f"logprobs.{path}"] or []), *value]
            into["ids"] = [*(into["ids"] or []), *choice.get("token_ids", ())]
            into["end"] += choice.get("finish_reason") or ""
    return {k: dict(v) for k, v in found.items()}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, one in value.items():
            if name != "index":
                yield from leaves(one, f"{path}.{name}")
    elif isinstance(value, list) and path.endswith("tool_calls"):
        for one in value:
            yield from leaves(one, f"{path}[{one['index']}]")
    else:
        yield path, value


@pytest.mark.parametrize("name", BODIES)
def test_broken_answers_go_on(pair: Pair, name: str) -> None:
    path, fields = BODIES[name]
    body = {"max_tokens": 40, **fields, "stream": True}
    pair.cut.after = None
    with pair.server.client() as client, client.stream("POST", path, json=body) as answer:
        lines = [x[6:] for x in answer.iter_lines() if x.startswith("data: ")]
    whole = [x if x == "[DONE]" else json.loads(x) for x in lines]
    size = sum(map(len, lines))
    chance = random.Random(name)
    cuts, continued = pair.cut.times, 0
    while pair.cut.times < cuts + 4:
        pair.cut.after = chance.randrange(1, size)
        events = pair.fleet.stream(path, body)
        assert said(events) == said(whole)
        assert events[-1] == "[DONE]"
        assert len({x["id"] for x in events[:-1]}) == 1
        ends = [c for x in events[:-1] for c in x["choices"] if c["finish_reason"] is not None]
        assert len(ends) == len(said(whole))
        usages = [x["usage"] for x in events[:-1] if x.get("usage")]
        assert usages == [x["usage"] for x in whole[:-1] if x.get("usage")]
        continued += 1
    pair.cut.after = None


def test_a_request_without_a_seed_is_given_one(pair: Pair) -> None:
    """Else the other instance would say something else."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 1.5, "stream": True}
    texts = set()
    for after in (2_000, 3_000, 4_000, 5_000):
        before = pair.cut.times
        while pair.cut.times == before:
            pair.cut.after = after
            events = pair.fleet.stream("/v1/completions", body)
            assert events[-1] == "[DONE]"
            texts.add(str(said(events)))
    pair.cut.after = None
    assert len(texts) > 3  # and a new one each time


def test_whole_answers_are_asked_for_again(pair: Pair) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    pair.cut.after = None
    expected = pair.fleet.post("/v1/completions", body).json()["choices"]
    before = pair.cut.times
    while pair.cut.times < before + 3:
        pair.cut.after = 200
        answer = pair.fleet.post("/v1/completions", body)
        assert answer.status_code == 200
        assert answer.json()["choices"] == expected
    pair.cut.after = None
    counted = pair.fleet.text("/metrics")
    assert (
        'worker_requests_total{model_name="stories",outcome="broken",worker="stories/0"}' in counted
    )


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_streams_end_with_an_error(pair: Pair, path: str) -> None:
    message = [{"role": "user", "content": "Hello"}]
    body: dict[str, Any] = {"model": "stories", "stream": True, "temperature": 0}
    if path == "/v1/messages":
        body |= {"messages": message, "max_tokens": 40}
    else:
        body |= {"input": message, "max_output_tokens": 40}
    before = pair.cut.times
    while pair.cut.times == before:
        pair.cut.after = 1_200
        events = pair.fleet.stream(path, body)
    pair.cut.after = None
    assert events[-1]["type"] == "error"
    told = events[-1]["error"] if path == "/v1/messages" else events[-1]
    assert "Send the request again" in told["message"]


class TestEvents:
    def test_whole_ones_only(self) -> None:
        data = event({"a": 1}) + event({"b": "\n\n"}) + DONE
        for first, second in pairwise(sorted(random.Random(1).sample(range(len(data)), 20))):
            events = Events()
            parts = [data[:first], data[first:second], data[second:]]
            found = [events.feed(part) for part in parts]
            assert b"".join(found) == data
            assert all(x.endswith(b"\n\n") or not x for x in found)

    def test_dead_engines(self) -> None:
        assert engine_died(event({"error": {"message": "…", "code": "engine_dead"}}))
        assert not engine_died(event({"choices": [{"index": 0, "text": '"engine_dead"'}]}))
        assert not engine_died(event({"error": {"message": "engine_dead", "code": "busy"}}))


def chunk(text: str, identity: str = "a", **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **fields}
    return event({"id": identity, "created": 1, "model": "m", "choices": [choice]})


def after(*pieces: bytes) -> Continuation:
    sent = Sent()
    for piece in pieces:
        sent.add(piece)
    return sent.continuation()


def test_pieces_need_not_be_the_same() -> None:
    filtered = after(chunk("Once u"), chunk("pon")).filter(
        chunk("Onc", "b") + chunk("e upon a", "b") + chunk(" time", "b", finish_reason="stop")
    )
    assert filtered == chunk(" a") + chunk(" time", finish_reason="stop")


def test_another_answer() -> None:
    with pytest.raises(ApiError, match="isn't the same: 'Twice' where 'Once '") as found:
        after(chunk("Once upon")).filter(chunk("Twice", "b"))
    assert found.value.code == "answers_differ"


def test_nothing_was_sent() -> None:
    assert after().filter(chunk("Once", "b")) == chunk("Once", "b")


def test_a_choice_that_had_ended() -> None:
    continuation = after(chunk("Once", finish_reason="stop"))
    assert continuation.filter(chunk("Once", "b", finish_reason="stop") + DONE) == DONE


def test_errors_pass() -> None:
    error = event({"error": {"message": "…", "code": "x"}})
    assert after(chunk("Once")).filter(error) == error


def test_sent_is_all() -> None:
    sent = Sent()
    assert not sent.ended
    sent.add(chunk("Once") + DONE)
    assert sent.ended
