"""Prometheus metrics, under vLLM's names where vLLM has them.

Counters of the engine are read when somebody asks; times of requests are observed as they end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from penstock.engine import AsyncLLM, RequestOutput
    from penstock.server.service import Work

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                  7.5, 10.0, 20.0, 40.0, 80.0, 160.0)  # fmt: skip
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
              1.0, 2.5, 5.0)  # fmt: skip
_WHOLE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
            60.0, 120.0, 240.0, 480.0, 960.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """Everything that `/metrics` says."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._name = ""

    def attach(self, llm: AsyncLLM, model_name: str) -> None:
        """Make the metrics of this engine; each carries `model_name`."""
        self._name = model_name

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(name, what, ["model_name"], buckets=buckets, registry=self.registry)
            return metric.labels(model_name)

        def counter(name: str, what: str) -> Counter:
            return Counter(name, what, ["model_name"], registry=self.registry).labels(model_name)

        self.ttft = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_S
        )
        self.itl = histogram(
            "vllm:inter_token_latency_seconds", "From one token to the next.", _BETWEEN_S
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
        self._prompt_sizes = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_sizes = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )
        self._floor = histogram(
            "penstock:request_floor_ratio",
            "The least time of a request's steps over the time they took.",
            tuple(i / 20 for i in range(1, 21)),
        )
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._output_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._outcomes = Counter(
            "vllm:request_success",
            "Requests that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self.registry.register(_EngineCollector(llm, model_name))

    def ended(self, work: Work, last: RequestOutput | None, outcome: str) -> None:
        """Count a request."""
        self._outcomes.labels(self._name, outcome).inc()
        self._prompt_tokens.inc(len(work.prompt.tokens))
        self._prompt_sizes.observe(len(work.prompt.tokens))
        if last is None:
            return
        made = sum(len(x.token_ids) for x in last.outputs)
        self._output_tokens.inc(made)
        self._output_sizes.observe(made)
        metrics = last.metrics
        times = metrics.token_times
        if len(times) > 1:
            self._tpot.observe((times[-1] - times[0]) / (len(times) - 1))
        for histogram, value in (
            (self._e2e, metrics.e2e_s),
            (self._queue, metrics.queue_s),
            (self._floor, metrics.achieved),
        ):
            if value is not None:
                histogram.observe(value)

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own counters, as they stand."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._name = model_name

    def collect(self) -> Iterator[Metric]:
        """Read them."""
        stats = self._llm.stats()
        prefix = stats["prefix"]
        blocks = stats["blocks"]
        gauges = (
            ("vllm:num_requests_running", "Sequences in the batch.", stats["running"]),
            ("vllm:num_requests_waiting", "Sequences in the queue.", stats["waiting"]),
            (
                "vllm:kv_cache_usage_perc",
                "Share of the cache's blocks in use; 1 is all.",
                stats["used_blocks"] / blocks if blocks else 0.0,
            ),
            ("vllm:num_requests_swapped", "Sequences that were swapped out.", stats["swapped"]),
            ("penstock:kv_cache_blocks", "Blocks of the cache.", blocks),
            (
                "penstock:kv_cache_idle_blocks",
                "Blocks not in use whose contents are kept.",
                stats["cached_blocks"],
            ),
        )
        for name, what, value in gauges:
            gauge = GaugeMetricFamily(name, what, labels=["model_name"])
            gauge.add_metric([self._name], value)
            yield gauge
        counters = (
            ("vllm:num_preemptions", "Sequences that gave way.", stats["preemptions"]),
            (
                "penstock:preemptions_swap",
                "Of these, by copying their blocks.",
                stats["preemptions_swap"],
            ),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", prefix["queries"]),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", prefix["hits"]),
            ("penstock:steps", "Steps of the engine.", stats["steps"]),
        )
        for name, what, value in counters:
            counter = CounterMetricFamily(name, what, labels=["model_name"])
            counter.add_metric([self._name], value)
            yield counter
        yield from self._ledger()

    def _ledger(self) -> Iterator[Metric]:
        """Where the steps' time went, and what it is of the floor."""
        ledger = self._llm.engine.ledger
        seconds = CounterMetricFamily(
            "penstock:step_seconds",
            "Time of steps by cause: forward, and what is lost outside of it.",
            labels=["model_name", "phase", "cause"],
        )
        floors = GaugeMetricFamily(
            "penstock:floor_ratio",
            "The least time of all steps over the time they took; 1 is all this machine has.",
            labels=["model_name", "phase"],
        )
        for phase, totals in (("prefill", ledger.prefill), ("decode", ledger.decode)):
            for cause, spent in {"forward": totals.forward_s, **totals.lost}.items():
                seconds.add_metric([self._name, phase, cause], spent)
            if totals.share is not None:
                floors.add_metric([self._name, phase], totals.share)
        yield seconds
        yield floors
