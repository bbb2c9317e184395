"""Prometheus metrics, under vLLM's names where vLLM has them.

Counters of the engine are read when somebody asks, so they move with every step; times and sizes of
requests are observed as they end. What an answer's status says is counted for each HTTP request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from penstock.sampling import SamplingParams
from penstock.server.collector import ENGINE, LABELS, EngineCollector
from penstock.server.errors import ApiError
from penstock.server.stored import StoredResponses

if TYPE_CHECKING:
    from penstock.engine import AsyncLLM, RequestMetrics, RequestOutput
    from penstock.server.service import Work

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0, 160.0)  # fmt: skip
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
              1.0, 2.5, 5.0)  # fmt: skip
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
            60.0, 120.0, 240.0, 480.0, 960.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_SAMPLES = (1, 2, 5, 10, 20)
_SHARES = (*(i / 20 for i in range(1, 21)), 1.25, 1.5, 2.0, 3.0)

_CODES = {
    "queue_full": "queue_full",
    "rate_limit_exceeded": "rate_limit",
    "concurrency_limit_exceeded": "concurrency_limit",
    "context_length_exceeded": "context_length",
}
_STATUSES = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    429: "rate_limit",
    503: "unavailable",
}


def rejection_reason(error: ApiError) -> str | None:
    """One of a few words for why a request was refused; None for a failure of the server."""
    if error.code in _CODES:
        return _CODES[error.code]
    if error.status == 499:  # it was the client that gave up
        return None
    return _STATUSES.get(error.status, "invalid" if error.status < 500 else None)


class Metrics:
    """Everything that `/metrics` says."""

    def __init__(self, model_name: str = "") -> None:
        """model_name: where it is known before there is an engine."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._name = model_name
        self._answers = Counter(
            "penstock:http_requests",
            "HTTP requests that were answered, by route and status; 499 where the client left.",
            ["model_name", "endpoint", "status"],
            registry=self.registry,
        )
        self._rejections = Counter(
            "penstock:request_rejections",
            "HTTP requests that were answered with an error of the client's or 503, by why.",
            ["model_name", "reason"],
            registry=self.registry,
        )

        self._formed = Counter(
            "penstock:structured_outputs",
            "Outputs that were held to a form, by whether they ended in it or were cut off before.",
            ["model_name", "complete"],
            registry=self.registry,
        )
        self._called = Counter(
            "penstock:tool_calls",
            "Calls of tools in answers, by whether their arguments follow the tool's schema.",
            ["model_name", "valid"],
            registry=self.registry,
        )

    def attach(self, llm: AsyncLLM, model_name: str) -> None:
        """Make the metrics of this engine; each carries `model_name`."""
        self._name = model_name

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, what, LABELS, buckets=buckets, registry=self.registry)
            return metric.labels(model_name, ENGINE)

        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.itl = histogram(
            "vllm:inter_token_latency_seconds",
            "From one step's tokens of a request to the next one's.",
            _BETWEEN_S,
        )
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time between tokens.",
            _BETWEEN_S,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the end.", _WHOLE_S
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival until first scheduled.", _WHOLE_S
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds",
            "From first scheduled to the first token.",
            _WHOLE_S,
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the end.", _WHOLE_S
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From first scheduled to the end.", _WHOLE_S
        )
        self._prompt_sizes = histogram(
            "vllm:request_prompt_tokens", "Tokens of an accepted request's prompt.", _TOKENS
        )
        self._output_sizes = histogram(
            "vllm:request_generation_tokens",
            "Tokens generated for a request, all samples together.",
            _TOKENS,
        )
        self._longest = histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens of a request's longest sample.",
            _TOKENS,
        )
        self._samples = histogram("vllm:request_params_n", "n, a request's samples.", _SAMPLES)
        self._limits = histogram(
            "vllm:request_params_max_tokens",
            "max_tokens of a request, or what there was room for.",
            _TOKENS,
        )
        self._floor = histogram(
            "penstock:request_floor_ratio",
            "The least time of a request's steps, by memory reads and products, over the time "
            "they took. What a CPU's cache holds isn't read from memory: then it can pass 1.",
            _SHARES,
        )
        self._outcomes = Counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._engine = EngineCollector(llm, model_name)
        self.registry.register(self._engine)

    def watch(self, stored: StoredResponses | None) -> None:
        """Tell of the responses that are kept, if any are. After `attach`."""
        if stored is None:
            return
        for name, what, read in (
            ("responses", "Responses that are kept.", lambda: stored.count),
            ("response_bytes", "Bytes of responses that are kept.", lambda: stored.size),
        ):
            gauge = Gauge(f"penstock:stored_{name}", what, LABELS, registry=self.registry)
            gauge.labels(self._name, ENGINE).set_function(read)

    def answered(self, endpoint: str, status: int, error: ApiError | None) -> None:
        """Count an HTTP request. endpoint: its route, as declared; error: what it was told."""
        self._answers.labels(self._name, endpoint, str(status)).inc()
        reason = None if error is None else rejection_reason(error)
        if reason is not None:
            self._rejections.labels(self._name, reason).inc()

    def called(self, valid: str) -> None:
        """Count a call of a tool. valid: true, false or unknown."""
        self._called.labels(self._name, valid).inc()

    def stepped(self) -> None:
        """Count a step. Called by the engine's thread."""
        self._engine.stepped()

    def ended(self, work: Work, last: RequestOutput | None, outcome: str) -> None:
        """Count a request that the engine was asked for; one that it refused is a rejection."""
        if outcome == "refused":
            return
        self._outcomes.labels(self._name, ENGINE, outcome).inc()
        if last is None and outcome in ("error", "timeout"):  # the engine didn't take it
            return
        self._prompt_sizes.observe(len(work.prompt.tokens))
        if last is None:
            return
        sizes = [len(x.token_ids) for x in last.outputs]
        self._output_sizes.observe(sum(sizes))
        self._longest.observe(max(sizes))
        self._samples.observe(work.samples)
        if isinstance(work.params, SamplingParams) and work.params.structured_outputs is not None:
            for one in last.outputs:
                if one.finish_reason in ("stop", "length"):
                    ended = one.finish_reason == "stop" and one.stop_reason is None
                    complete = "true" if ended else "false"  # a stop string may come before
                    self._formed.labels(self._name, complete).inc()
        if work.params.max_tokens is not None:
            self._limits.observe(work.params.max_tokens)
        self.times(last.metrics)

    def times(self, metrics: RequestMetrics) -> None:
        """What is known of a request's: one that ended early has only some of them."""
        times = metrics.token_times
        scheduled, end = metrics.first_scheduled_time, metrics.finished_time
        first = times[0] if times else None
        if len(times) > 1:
            self._tpot.observe((times[-1] - times[0]) / (len(times) - 1))
        for histogram, value in (
            (self._e2e, metrics.e2e_s),
            (self._queue, metrics.queue_s),
            (self._prefill, _between(scheduled, first)),
            (self._decode, _between(first, end)),
            (self._inference, _between(scheduled, end)),
            (self._floor, metrics.achieved),
        ):
            if value is not None:
                histogram.observe(value)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
