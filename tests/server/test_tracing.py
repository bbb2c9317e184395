"""Spans, as an exporter gets them."""

from __future__ import annotations

import io
import json
import logging
import socket
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from penstock.errors import ConfigError, MissingExtraError
from penstock.sampling import SamplingParams
from penstock.server import Key, ServerConfig, create_app
from penstock.server.logs import configure
from penstock.server.prompt import PromptText
from penstock.server.service import Caller, Work
from penstock.server.tracing import OpenTelemetryTracer
from tests.server.conftest import Running

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"  # the recommendation's own


@pytest.fixture
def spans(server: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ReadableSpan]]:
    """The spans of a test's requests, read once it has ended them."""
    exporter = InMemorySpanExporter()
    tracer = OpenTelemetryTracer(None, exporter)
    monkeypatch.setattr(server.service, "tracer", tracer)

    class Finished(list[ReadableSpan]):
        def __iter__(self) -> Iterator[ReadableSpan]:
            server.rest()
            tracer.flush()
            return iter(exporter.get_finished_spans())

    yield Finished()
    tracer.close()


def test_a_request_is_a_span_of_its_clients_trace(
    server: Running, spans: list[ReadableSpan]
) -> None:
    with server.client() as client:
        answer = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "A story!"}], "max_tokens": 5,
                  "temperature": 0.7, "top_p": 0.8, "n": 2, "ignore_eos": True},
            headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        ).json()  # fmt: skip
    (span,) = spans
    assert span.name == "llm_request"
    assert span.kind is SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.resource.attributes["service.name"] == "penstock"
    said = dict(span.attributes or {})
    usage = answer["usage"]
    assert said["gen_ai.request.id"] == answer["id"]
    assert said["gen_ai.operation.name"] == "chat"
    assert said["url.path"] == "/v1/chat/completions"
    assert said["gen_ai.request.temperature"] == 0.7
    assert said["gen_ai.request.top_p"] == 0.8
    assert said["gen_ai.request.n"] == 2
    assert said["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.completion_tokens"] == usage["completion_tokens"] == 10
    assert said["penstock.outcome"] == "length"
    queue, first, whole = (
        said[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e")
    )
    assert 0 <= queue <= first <= whole
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 >= whole - 0.05
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("header", [None, "", "00-zz-zz-01", "00-" + "0" * 32 + "-" + "0" * 16])
def test_without_a_trace_a_span_is_its_own(
    server: Running, spans: list[ReadableSpan], header: str | None
) -> None:
    with server.client() as client:
        client.post(
            "/v1/completions",
            json={"prompt": "Once", "max_tokens": 1},
            headers={} if header is None else {"traceparent": header},
        )
    (span,) = spans
    assert span.parent is None
    assert (span.attributes or {})["gen_ai.operation.name"] == "text_completion"


def test_a_span_a_prompt(server: Running, spans: list[ReadableSpan]) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": ["Once", "Twice"], "max_tokens": 1})
        client.post("/v1/embeddings", json={"input": "a dog"})
    found = [dict(span.attributes or {}) for span in spans]
    names = [said["gen_ai.operation.name"] for said in found]
    assert sorted(names) == ["embeddings", "text_completion", "text_completion"]
    assert len({said["gen_ai.request.id"] for said in found}) == 3


def test_what_fails_is_marked(server: Running, spans: list[ReadableSpan]) -> None:
    with server.client() as client:
        wrong = client.post(
            "/v1/completions", json={"prompt": "Once", "allowed_token_ids": [10**6]}
        )
    assert wrong.status_code == 400
    (span,) = spans
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["penstock.outcome"] == "refused"
    assert "gen_ai.usage.completion_tokens" not in (span.attributes or {})


def test_a_client_that_leaves(server: Running, spans: list[ReadableSpan]) -> None:
    body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.client() as client, client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_bytes(1))
    (span,) = spans
    assert (span.attributes or {})["penstock.outcome"] == "abort"


def test_no_prompt_is_in_a_span(server: Running, spans: list[ReadableSpan]) -> None:
    with server.client() as client:
        client.post("/v1/completions", json={"prompt": "A secret garden", "max_tokens": 1})
    (span,) = spans
    assert "secret" not in span.to_json()


@pytest.mark.parametrize(
    "endpoint",
    ["notaurl", "", "localhost:4318", "127.0.0.1:4318/v1/traces", "http://", "http:///v1/traces",
     "http://host:port/", "http://host:99999/", "http://[::1/", "grpc://host:4317",
     "http://a host/", "http://host/\n"],
)  # fmt: skip
def test_an_endpoint_that_is_no_url(endpoint: str) -> None:
    """Said before the server listens, not with the first request."""
    with pytest.raises(ConfigError, match="isn't a URL") as caught:
        create_app(ServerConfig(otlp_endpoint=endpoint))
    assert repr(endpoint) in str(caught.value)
    assert "http://127.0.0.1:4318/v1/traces" in str(caught.value)


@pytest.mark.parametrize(
    "endpoint", ["http://127.0.0.1:4318/v1/traces", "https://[::1]:4318/v1/traces", "HTTP://host"]
)
def test_endpoints(endpoint: str) -> None:
    OpenTelemetryTracer(endpoint).close()


def test_texts_of_a_client_are_short() -> None:
    exporter = InMemorySpanExporter()
    tracer = OpenTelemetryTracer(None, exporter)
    caller = Caller(Key.of("one", "alice"), "i" * 5000, "/" + "p" * 5000, user="u" * 5000)
    tracer.request(caller, caller.request_id, Work(PromptText([1]), SamplingParams()), None, "", 0)
    tracer.close()
    (span,) = exporter.get_finished_spans()
    texts = [x for x in (span.attributes or {}).values() if isinstance(x, str)]
    assert max(map(len, texts)) == 256
    assert "u" * 100 not in span.to_json()


def test_a_collector_that_is_away_is_told_of_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the log's form, and not once for each batch."""
    stream = io.StringIO()
    loggers = [logging.getLogger(n) for n in ("penstock", "uvicorn.error", "opentelemetry")]
    before = [(one, one.handlers, one.propagate, one.level) for one in loggers]
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")  # seconds
    try:
        configure("json")
        with socket.socket() as nobody:  # bound, so that nobody else is there, and not listening
            nobody.bind(("127.0.0.1", 0))
            tracer = OpenTelemetryTracer(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1/traces")
            caller = Caller(Key.of("one", "alice"), "id", "/v1/completions")
            for _ in range(3):
                work = Work(PromptText([1]), SamplingParams())
                tracer.request(caller, "id", work, None, "stop", 0)
                tracer.flush()
            tracer.close()
    finally:
        for one, handlers, propagate, level in before:
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines
    assert all(line["logger"].startswith("opentelemetry.") for line in lines)
    kinds = [(line["logger"], line["level"]) for line in lines]
    assert len(set(kinds)) == len(kinds)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtraError, match=r"clone: pip install .*'\.\[otel\]"):
        OpenTelemetryTracer("http://127.0.0.1:4318/v1/traces")
