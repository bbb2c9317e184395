"""Events and answers come out the same however the network cuts them."""

from __future__ import annotations

import json

import pytest

from penstock.bench.serve.api import Answer, Api
from penstock.bench.serve.record import RequestRecord
from penstock.bench.serve.sse import SseParser
from penstock.http1 import ExchangeError, ResponseParser

# fields, comments, every line end, several data lines, UTF-8; after the standard's own examples
STREAM = (
    "\ufeffdata: first\n\n: a comment\r\n\r\nevent: x\rdata: second\r\rdata:third\ndata: line\n\n"
    "id: 7\ndata\ndata\n\ndata:  two spaces: é€😀\r\n\r\ndata: [DONE]\n\ndata: never ended\n"
).encode()
EVENTS = [
    b"first", b"second", b"third\nline", b"\n", " two spaces: é€😀".encode(), b"[DONE]",
]  # fmt: skip


def events(*pieces: bytes) -> list[bytes]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_events_whole_and_byte_by_byte() -> None:
    assert events(STREAM) == EVENTS
    assert events(*(bytes([b]) for b in STREAM)) == EVENTS


def test_events_split_anywhere() -> None:
    for at in range(len(STREAM) + 1):
        assert events(STREAM[:at], STREAM[at:]) == EVENTS
        assert events(STREAM[:at], b"", STREAM[at:]) == EVENTS


BODY = b"data: a\n\ndata: bc\n\n"
ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n" + BODY,
    "chunked": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: a\n\n\r\nA;x=y\r\ndata: bc\n\n\r\n0\r\nTrailer: x\r\n\r\n",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200\r\nContent-Length: 19\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers_split_anywhere(kind: str) -> None:
    raw = ANSWERS[kind]
    for at in range(len(raw) + 1):
        body = bytearray()
        parser = ResponseParser(body.extend)
        parser.feed(raw[:at])
        assert not parser.complete or at == len(raw)
        parser.feed(raw[at:])
        assert (parser.status, parser.complete, parser.keep_alive) == (200, True, True)
        assert bytes(body) == BODY


def test_an_answer_may_end_with_its_connection() -> None:
    body = bytearray()
    parser = ResponseParser(body.extend)
    parser.feed(b"HTTP/1.0 200 OK\r\n\r\n" + BODY)
    assert not parser.complete
    parser.end()
    assert parser.complete and not parser.keep_alive and bytes(body) == BODY


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "malformed answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", "malformed answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "malformed answer"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "malformed answer"),
        (b"HTTP/2 200\r\n\r\n", "malformed answer"),
        (b"x" * 70_000, "malformed answer"),
    ],
)
def test_broken_answers(raw: bytes, kind: str) -> None:
    parser = ResponseParser(lambda data: None)

    def read() -> None:
        parser.feed(raw)
        parser.end()

    with pytest.raises(ExchangeError) as caught:
        read()
    assert caught.value.kind == kind


def noted(backend: str, *found: dict[str, object]) -> tuple[RequestRecord, str]:
    """What a record says after these events, which come at 1, 2, 3, … seconds."""
    record = RequestRecord(0, 0, 5, 4, 0.0)
    now = iter(range(1, 100))
    api = Api(backend, "/", "m", as_text=True)  # type: ignore[arg-type]
    answer = Answer(api, record, lambda: float(next(now)), lambda n: None, keep_text=True)
    for event in found:
        answer.feed(f"data: {json.dumps(event)}\n\n".encode())
    answer.feed(b"data: [DONE]\n\n")
    answer.finish("text/event-stream")
    return record, "".join(answer.text)


def delta(reason: str | None = None, **content: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": content, "finish_reason": reason}]}


def text(value: str, reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": reason}]}


USAGE: dict[str, object] = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 8},
    },
}


def test_chat_chunks() -> None:
    """The role opens, a part of a character counts, and an empty end only ends."""
    record, said = noted(
        "openai-chat",
        delta(role="assistant", content=""),
        delta(content="a"),
        delta(content=""),
        delta(reasoning_content="hm"),
        delta("stop"),
        USAGE,
    )
    assert record.token_times_s == [2, 3, 4] and record.last_s == 5 and said == "a"
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (9, 4, 8)
    assert (record.ttft_s, record.tpot_s, record.e2e_s, record.finish_reason) == (2, 1, 5, "stop")


def test_completion_chunks() -> None:
    record, said = noted("openai", text("a"), text(""), text("b", "length"))
    assert record.token_times_s == [1, 2, 3] and record.last_s == 3 and said == "ab"
    assert record.completion_tokens is None and record.output_tokens == 3
    assert record.tpot_s == 1 and record.itl_s == [1, 1]


@pytest.mark.parametrize(
    "event",
    [
        {"usage": {"completion_tokens": "6"}},
        {"usage": {"completion_tokens": True}},
        {"usage": {"prompt_tokens": 1.5}},
        {"usage": {"completion_tokens": -1}},
        {"usage": {"prompt_tokens_details": {"cached_tokens": "3"}}},
        {"usage": {"prompt_tokens_details": [3]}},
        {"usage": [6]},
        {"choices": [{"index": 0, "text": 5}]},
        {"choices": [{"index": 0, "text": "", "finish_reason": ["stop"]}]},
    ],
)
def test_fields_of_another_type_are_that_requests_failure(event: dict[str, object]) -> None:
    with pytest.raises(ExchangeError, match="isn't one of OpenAI's API") as caught:
        noted("openai", text("a"), event)
    assert caught.value.kind == "malformed answer"


def test_an_answer_of_nothing_but_its_end_is_one_token() -> None:
    record, _ = noted("openai", text("", "stop"))
    assert record.token_times_s == [1] and record.ttft_s == record.e2e_s == 1
    assert record.tpot_s is None
    with pytest.raises(ExchangeError, match="no tokens"):
        noted("openai", text("", "stop"), {"usage": {"completion_tokens": 0}})
    with pytest.raises(ExchangeError, match="an error: out of cache"):
        noted("openai", text("a"), {"error": {"message": "out of cache"}})
