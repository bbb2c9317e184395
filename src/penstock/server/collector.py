"""What the engine counts itself, as Prometheus metrics: read when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from penstock.server.demand import demand_of

if TYPE_CHECKING:
    from penstock.engine import AsyncLLM

ENGINE = "0"
"""vLLM numbers the engines behind one server. Penstock has one."""
LABELS = ["model_name", "engine"]
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineCollector(Collector):
    """The engine's own counters, as they stand."""

    def __init__(self, llm: AsyncLLM, model_name: str) -> None:
        self._llm = llm
        self._labels = [model_name, ENGINE]
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
            gauge = GaugeMetricFamily(name, what, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge

    def _counters(self, found: Iterable[tuple[str, str, float]]) -> Iterator[Metric]:
        for name, what, value in found:
            counter = CounterMetricFamily(name, what, labels=LABELS)
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
            labels=[*LABELS, "position"],
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
            labels=LABELS,
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
            "vllm:cache_config_info", "The cache's configuration.", labels=[*LABELS, *said]
        )
        info.add_metric([*self._labels, *map(str, said.values())], 1)
        return info

    def _ledger(self) -> Iterator[Metric]:
        """Where the steps' time went, and what it is of the floor."""
        ledger = self._llm.engine.ledger
        seconds = CounterMetricFamily(
            "penstock:step_seconds",
            "Time of steps by cause: forward, and what is lost outside of it.",
            labels=[*LABELS, "phase", "cause"],
        )
        floors = GaugeMetricFamily(
            "penstock:floor_ratio",
            "The least time of all steps, by memory reads and products, over the time they took. "
            "1 is all that memory gives; what a CPU's cache holds isn't read from memory, so a "
            "model that fits into it can pass 1.",
            labels=[*LABELS, "phase"],
        )
        for phase, totals in (("prefill", ledger.prefill), ("decode", ledger.decode)):
            for cause, spent in {"forward": totals.forward_s, **totals.lost}.items():
                seconds.add_metric([*self._labels, phase, cause], spent)
            if totals.share is not None:
                floors.add_metric([*self._labels, phase], totals.share)
        yield seconds
        yield floors
