"""Prometheus metrics, under vLLM's names where vLLM has them.

Counters of the engine are read when somebody asks, so they move with every step; times and sizes of
requests are observed as they end. What an answer's status says is counted for each HTTP request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from penstock.sampling import SamplingParams
from penstock.server.demand import demand_of
from penstock.server.errors import ApiError

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
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SAMPLES = (1, 2, 5, 10, 20)
_SHARES = (*(i / 20 for i in range(1, 21)), 1.25, 1.5, 2.0, 3.0)

_ENGINE = "0"
"""vLLM numbers the engines behind one server. Penstock has one."""
_LABELS = ["model_name", "engine"]

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
            metric = Histogram(name, what, _LABELS, buckets=buckets, registry=self.registry)
            return metric.labels(model_name, _ENGINE)

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
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._engine = _EngineCollector(llm, model_name)
        self.registry.register(self._engine)

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
        """Count a request that the engine was asked for."""
        self._outcomes.labels(self._name, _ENGINE, outcome).inc()
        if last is None and outcome == "error":  # the engine didn't take it
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


class _EngineCollector(Collector):
    """The engine's own counters, as they stand."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = [model_name, _ENGINE]
        self._steps = [0] * (len(_STEP_TOKENS) + 1)  # by bucket
        self._first = self._last = llm.engine.token_counts.sum  # before any step, and by now

    def stepped(self) -> None:
        """Between two steps: a Histogram's lock and labels would take ten times as long."""
        before, self._last = self._last, self._llm.engine.token_counts.sum
        self._steps[bisect_left(_STEP_TOKENS, self._last - before)] += 1

    def collect(self) -> Iterator[Metric]:
        """Read them."""
        stats = self._llm.stats()
        prefix = stats["prefix"]
        blocks = stats["blocks"]
        yield from self._gauges(
            (
                (
                    "vllm:num_requests_running",
                    "Requests of which a sample is in the batch.",
                    stats["requests_running"],
                ),
                (
                    "vllm:num_requests_waiting",
                    "Requests in the queue.",
                    stats["requests_waiting"],
                ),
                (
                    "vllm:num_requests_swapped",
                    "Requests that were swapped out.",
                    stats["requests_swapped"],
                ),
                (
                    "vllm:kv_cache_usage_perc",
                    "Share of the cache's blocks in use; 1 is all.",
                    stats["used_blocks"] / blocks if blocks else 0.0,
                ),
                (
                    "penstock:kv_fragmentation",
                    "Share of the places in blocks in use that holds no token.",
                    stats["kv_fragmentation"],
                ),
                (
                    "penstock:sequences_running",
                    "Sequences in the batch: samples of requests.",
                    stats["running"],
                ),
                (
                    "penstock:demand",
                    "Sequences that run or wait over those that can run at once; an autoscaler's "
                    "signal: above 1 requests wait for another instance.",
                    demand_of(stats, self._llm.config.scheduler.max_num_seqs),
                ),
                (
                    "penstock:max_sequences",
                    "Sequences that a step has room for (--max-num-seqs).",
                    self._llm.config.scheduler.max_num_seqs,
                ),
                ("penstock:kv_cache_blocks", "Blocks of the cache.", blocks),
                (
                    "penstock:kv_cache_idle_blocks",
                    "Blocks not in use whose contents are kept.",
                    stats["cached_blocks"],
                ),
                (
                    "penstock:kv_cache_pinned_blocks",
                    "Of blocks, those that a pin keeps from being given up.",
                    stats["pinned_blocks"],
                ),
            )
        )
        yield from self._counters(
            (
                (
                    "vllm:prompt_tokens",
                    "Tokens of prompts, as they are computed; those found in the cache count when "
                    "a request starts, those computed again don't.",
                    stats["prompt_tokens"],
                ),
                (
                    "vllm:generation_tokens",
                    "Tokens generated, counted with every step.",
                    stats["generation_tokens"],
                ),
                ("vllm:num_preemptions", "Sequences that gave way.", stats["preemptions"]),
                (
                    "penstock:preemptions_swap",
                    "Of these, by copying their blocks.",
                    stats["preemptions_swap"],
                ),
                ("vllm:prefix_cache_queries", "Prompt tokens looked up.", prefix["queries"]),
                ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", prefix["hits"]),
                ("penstock:steps", "Steps of the engine.", stats["steps"]),
                (
                    "penstock:jumped_tokens",
                    "Of the tokens generated, those that a grammar forced, without a step each.",
                    stats["jumped_tokens"],
                ),
                (
                    "penstock:grammar_cache_queries",
                    "Forms of outputs that were asked for.",
                    stats["grammar_hits"] + stats["grammar_misses"],
                ),
                (
                    "penstock:grammar_cache_hits",
                    "Of these, those that were compiled already.",
                    stats["grammar_hits"],
                ),
            )
        )
        yield from self._disk(stats)
        yield from self._pictures(stats)
        yield from self._speculation(stats)
        yield self._step_sizes()
        yield self._cache_config()
        yield from self._ledger()

    def _gauges(self, found: Iterable[tuple[str, str, float]]) -> Iterator[Metric]:
        for name, what, value in found:
            gauge = GaugeMetricFamily(name, what, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self, found: Iterable[tuple[str, str, float]]) -> Iterator[Metric]:
        for name, what, value in found:
            counter = CounterMetricFamily(name, what, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter

    def _disk(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """Of blocks on disk, where some are kept there."""
        if "disk_blocks" in stats:
            yield from self._counters(
                (f"penstock:prefix_disk_blocks_{name}", text, stats[f"disk_blocks_{name}"])
                for name, text in (
                    ("read", "Blocks of prompts read from disk."),
                    ("written", "Blocks written to disk."),
                    ("dropped", "Blocks that disks were too slow or too full for."),
                    ("damaged", "Blocks whose files were damaged, and were removed."),
                )
            )

    def _pictures(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """Of a model that sees."""
        if "pictures" in stats:
            yield from self._counters(
                (
                    ("vllm:mm_cache_queries", "Pictures of prompts.", stats["pictures"]),
                    (
                        "vllm:mm_cache_hits",
                        "Of these, those that had been through the tower before.",
                        stats["picture_hits"],
                    ),
                    (
                        "penstock:picture_tiles",
                        "Tiles of pictures that went through the tower.",
                        stats["picture_tiles"],
                    ),
                )
            )

    def _speculation(self, stats: dict[str, Any]) -> Iterator[Metric]:
        """What became of drafts; nothing where there are none."""
        if "spec_decode_num_drafts" not in stats:
            return
        yield from self._counters(
            (
                (
                    "vllm:spec_decode_num_drafts",
                    "Drafts that were verified.",
                    stats["spec_decode_num_drafts"],
                ),
                (
                    "vllm:spec_decode_num_draft_tokens",
                    "Tokens of drafts.",
                    stats["spec_decode_num_draft_tokens"],
                ),
                (
                    "vllm:spec_decode_num_accepted_tokens",
                    "Of these, those that were right.",
                    stats["spec_decode_num_accepted_tokens"],
                ),
            )
        )
        found = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "The same by place in the draft, from 0.",
            labels=[*_LABELS, "position"],
        )
        for place, count in enumerate(stats["spec_decode_num_accepted_tokens_per_pos"]):
            found.add_metric([*self._labels, str(place)], count)
        yield found
        yield from self._gauges(
            [
                (
                    "penstock:spec_decode_on",
                    "1 while drafts are predicted to pay.",
                    stats["spec_decode_on"],
                )
            ]
        )

    def _step_sizes(self) -> Metric:
        edges = [*(str(float(edge)) for edge in _STEP_TOKENS), "+Inf"]
        found = HistogramMetricFamily(
            "vllm:iteration_tokens_total",
            "Tokens that a step has added to those of prompts and to those generated.",
            labels=_LABELS,
        )
        counts = list(zip(edges, accumulate(list(self._steps)), strict=True))
        found.add_metric(self._labels, counts, self._last - self._first)
        return found

    def _cache_config(self) -> Metric:
        """The settings that vLLM tells too, as Python writes them."""
        config, runtime = self._llm.config, self._llm.runtime
        said = {
            "block_size": runtime.layout.block_size,
            "cache_dtype": config.cache.kv_cache_dtype,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
            "gpu_memory_utilization": config.cache.memory_fraction,
            "num_gpu_blocks": runtime.num_blocks,
            "num_gpu_blocks_override": config.cache.num_blocks,
            "swap_space": config.scheduler.swap_space,
        }
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache's configuration.", labels=[*_LABELS, *said]
        )
        info.add_metric([*self._labels, *map(str, said.values())], 1)
        return info

    def _ledger(self) -> Iterator[Metric]:
        """Where the steps' time went, and what it is of the floor."""
        ledger = self._llm.engine.ledger
        seconds = CounterMetricFamily(
            "penstock:step_seconds",
            "Time of steps by cause: forward, and what is lost outside of it.",
            labels=[*_LABELS, "phase", "cause"],
        )
        floors = GaugeMetricFamily(
            "penstock:floor_ratio",
            "The least time of all steps, by memory reads and products, over the time they took. "
            "1 is all that memory gives; what a CPU's cache holds isn't read from memory, so a "
            "model that fits into it can pass 1.",
            labels=[*_LABELS, "phase"],
        )
        for phase, totals in (("prefill", ledger.prefill), ("decode", ledger.decode)):
            for cause, spent in {"forward": totals.forward_s, **totals.lost}.items():
                seconds.add_metric([*self._labels, phase, cause], spent)
            if totals.share is not None:
                floors.add_metric([*self._labels, phase], totals.share)
        yield seconds
        yield floors
