"""A span for each request, to an OpenTelemetry collector, for those who install the extra.

Names of attributes: vLLM's, which began as OpenTelemetry's semantic conventions for generative AI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from penstock import __version__
from penstock.errors import ConfigError, MissingExtraError, get_extra
from penstock.server.logs import shortened

if TYPE_CHECKING:
    from penstock.engine import RequestOutput
    from penstock.server.admission import Caller
    from penstock.server.service import Work

_NANO = 1e9
_OPERATIONS = {  # OpenTelemetry's words for what an endpoint does
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Tracer(Protocol):
    """What the service tells of each request that has ended."""

    def request(
        self,
        caller: Caller,
        name: str,
        work: Work,
        last: RequestOutput | None,
        outcome: str,
        start: float,
    ) -> None:
        """start: unix seconds of its arrival."""

    def close(self) -> None:
        """Send what hasn't been sent."""


class NoTracer:
    """Where nobody collects traces."""

    def request(
        self,
        caller: Caller,
        name: str,
        work: Work,
        last: RequestOutput | None,
        outcome: str,
        start: float,
    ) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class OpenTelemetryTracer:
    """Spans with the times and tokens of each request, children of the client's own trace."""

    def __init__(self, endpoint: str | None, exporter: Any = None) -> None:
        """endpoint: of an OTLP collector over HTTP; exporter: instead of one, for tests.

        Raises ConfigError for an endpoint that is no URL, and MissingExtraError without
        the extra `otel`.
        """
        if endpoint is not None:
            _check_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtraError(
                f"Traces need OpenTelemetry ({get_extra('otel')}). Or leave out "
                "--otlp-traces-endpoint."
            ) from error
        resource = Resource.create({"service.name": "penstock", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        chosen = exporter if exporter is not None else OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(chosen))
        self._tracer = self._provider.get_tracer("penstock", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request(
        self,
        caller: Caller,
        name: str,
        work: Work,
        last: RequestOutput | None,
        outcome: str,
        start: float,
    ) -> None:
        """Make the request's span, after the fact."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        path = shortened(caller.endpoint)
        carrier = {"traceparent": caller.traceparent} if caller.traceparent else {}
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=int(start * _NANO),
            attributes={
                "gen_ai.request.id": shortened(name),
                "gen_ai.operation.name": _OPERATIONS.get(path, path),
                "url.path": path,
                "gen_ai.request.temperature": work.params.temperature,
                "gen_ai.request.top_p": getattr(work.params, "top_p", 1.0),  # a search has none
                "gen_ai.request.n": work.samples,
                "gen_ai.usage.prompt_tokens": len(work.prompt.tokens),
                "penstock.outcome": outcome,
            },
        )
        if last is not None:
            metrics = last.metrics
            facts = {
                "gen_ai.usage.completion_tokens": sum(len(x.token_ids) for x in last.outputs),
                "gen_ai.latency.time_in_queue": metrics.queue_s,
                "gen_ai.latency.time_to_first_token": metrics.ttft_s,
                "gen_ai.latency.e2e": metrics.e2e_s,
                "penstock.cached_tokens": metrics.cached_tokens,
                "penstock.floor_ratio": metrics.achieved,
            }
            span.set_attributes({k: v for k, v in facts.items() if v is not None})
        if outcome in ("error", "refused", "timeout"):
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def flush(self) -> None:
        """Send what hasn't been sent, and go on."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what hasn't been sent."""
        self._provider.shutdown()


def _check_url(endpoint: str) -> None:
    """Raises ConfigError for what can't be asked over HTTP: the exporter would only find out later,
    and then with every batch."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number, or half an IPv6 address
        valid = False
    if not valid or any(x.isspace() for x in endpoint):
        raise ConfigError(
            f"The traces endpoint is {endpoint[:200]!r}, which isn't a URL. Give that of the "
            "collector's traces over HTTP: --otlp-traces-endpoint http://127.0.0.1:4318/v1/traces."
        )
