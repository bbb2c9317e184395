"""What the records of a run come to.

Every definition is in docs/benchmarking.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.serve.load import LoadResult
from penstock.bench.serve.prefix_oracle import reusable_tokens
from penstock.bench.serve.record import RequestRecord
from penstock.bench.serve.workload import Workload
from penstock.errors import ConfigError, nearest

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}

NAMED_GOODPUTS = {"chat": {"ttft": 0.5, "tpot": 0.05}, "voice": {"ttft": 0.2, "tpot": 0.03}}
"""Service levels in seconds."""

LAG_LIMIT_S = 0.005
BUSY_LIMIT = 0.9  # of a core


def parse_goodput(
    words: Sequence[str], metrics: Sequence[str] = ("ttft", "tpot", "e2el")
) -> dict[str, float]:
    """`ttft:500 tpot:50` or a name, to seconds by metric. Raises `ConfigError`."""
    levels: dict[str, float] = {}
    for word in " ".join(words).split():
        if word in NAMED_GOODPUTS:
            levels |= NAMED_GOODPUTS[word]
            continue
        name, _, value = word.partition(":")
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = -1.0
        if name not in metrics or not 0 < limit_ms < float("inf"):
            known = (*NAMED_GOODPUTS, *(f"{metric}:MS" for metric in metrics))
            raise ConfigError(
                f"--goodput {word!r} isn't one of {', '.join(known)}, MS a positive number of "
                f"milliseconds.{nearest(word, NAMED_GOODPUTS)}"
            )
        levels[name] = limit_ms / 1e3
    if words and not levels:
        raise ConfigError(
            f"--goodput is empty: say {', '.join(NAMED_GOODPUTS)} or limits such as "
            f"{metrics[0]}:500."
        )
    return levels


def meets(record: RequestRecord, levels: Mapping[str, float]) -> bool:
    """Whether a request was answered in full within every level.

    A figure that an answer doesn't have (the TPOT of a single token) breaks none.
    """
    values = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.e2e_s}
    return record.done and all(
        (value := values[name]) is None or value <= limit for name, limit in levels.items()
    )


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a latency in seconds, over requests or (ITL) over gaps."""

    count: int
    mean: float
    std: float
    percentiles: dict[str, float]  # `p50`, `p99`, `p99.9`

    @classmethod
    def of(cls, values: Sequence[float], percentiles: Sequence[float]) -> Distribution | None:
        """None where there are no values; percentiles interpolate linearly."""
        if not len(values):
            return None
        array = np.asarray(values, np.float64)
        found = np.percentile(array, percentiles).tolist()
        return cls(
            count=len(array),
            mean=float(array.mean()),
            std=float(array.std()),
            percentiles={f"p{p:g}": v for p, v in zip(percentiles, found, strict=True)},
        )

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"count": self.count, "mean": self.mean, "std": self.std, **self.percentiles}


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """How much of the prompts a cache had ready."""

    server: float | None  # share of prompt tokens that the server says were cached
    oracle: float | None  # share that a cache without limits could have had
    block_size: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers; rates are per second of its duration."""

    duration_s: float
    completed: int
    failed: int
    unfinished: int  # under way when the run was stopped
    not_sent: int
    requests_per_s: float
    input_tokens: int
    output_tokens: int
    latencies: dict[str, Distribution | None]  # by METRICS
    goodput: dict[str, float]  # levels in seconds; empty: not asked for
    good: int  # requests within them
    prefix: PrefixHits
    errors: dict[str, tuple[int, str]]  # kind → how many, and the first one's message
    rejections: int
    peak_concurrency: int
    counted_by_server: bool  # output tokens, for every answer
    tokens_per_chunk: float
    lag: Distribution | None  # the client's own, of sending
    loop_lag: Distribution | None  # of noticing what has come
    client_cpu: float  # cores
    client_cpu_per_token_s: float

    @property
    def client_was_slow(self) -> bool:
        """Whether the client may have been the bottleneck.

        It sent more than 1% of the requests over 5 ms and a twentieth of the median TTFT late, or
        kept one core busy, which is all that it can use.
        """
        ttft = self.latencies["ttft"]
        limit = max(LAG_LIMIT_S, 0.05 * ttft.percentiles["p50"] if ttft else 0.0)
        late = self.lag is not None and self.lag.percentiles["p99"] > limit
        return late or self.client_cpu > BUSY_LIMIT

    def rate(self, amount: float) -> float:
        """`amount` per second of the run."""
        return amount / self.duration_s if self.duration_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        goodput = None
        if self.goodput:
            goodput = {
                "levels_s": self.goodput,
                "requests": self.good,
                "requests_per_s": self.rate(self.good),
            }
        lag, loop_lag = self.lag, self.loop_lag
        return {
            "duration_s": self.duration_s,
            "completed": self.completed,
            "failed": self.failed,
            "unfinished": self.unfinished,
            "not_sent": self.not_sent,
            "requests_per_s": self.requests_per_s,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "input_tokens_per_s": self.rate(self.input_tokens),
            "output_tokens_per_s": self.rate(self.output_tokens),
            "total_tokens_per_s": self.rate(self.input_tokens + self.output_tokens),
            "peak_concurrency": self.peak_concurrency,
            **{f"{k}_s": None if d is None else d.as_dict() for k, d in self.latencies.items()},
            "goodput": goodput,
            "prefix_hit_rate": {
                "server": self.prefix.server,
                "oracle": self.prefix.oracle,
                "block_size": self.prefix.block_size,
            },
            "errors": {k: {"count": n, "first": m} for k, (n, m) in self.errors.items()},
            "rejections": self.rejections,
            "output_tokens_counted_by": "server" if self.counted_by_server else "chunks",
            "tokens_per_chunk": self.tokens_per_chunk,
            "client": {
                "send_lag_s": None if lag is None else lag.as_dict(),
                "event_loop_lag_s": None if loop_lag is None else loop_lag.as_dict(),
                "cpu_cores": self.client_cpu,
                "cpu_per_token_s": self.client_cpu_per_token_s,
                "was_slow": self.client_was_slow,
            },
        }


def figures(
    result: LoadResult,
    workload: Workload,
    *,
    percentiles: Sequence[float] = (50, 90, 99),
    goodput: Mapping[str, float] | None = None,
    block_size: int = 16,
) -> Figures:
    """Add a run up; latencies and tokens are those of answers that came in full."""
    records = result.records
    done = [r for r in records if r.done]
    wanted = sorted({50.0, 99.0, *percentiles})
    errors: Counter[str] = Counter(r.error for r in records if r.error is not None)
    first = {r.error: r.message or "" for r in reversed(records) if r.error is not None}
    output_tokens = sum(r.output_tokens for r in done)
    chunks = sum(len(r.token_times_s) for r in records)
    levels = dict(goodput or {})
    lags = [lag for r in records if (lag := r.lag_s) is not None]
    duration = result.duration_s
    return Figures(
        duration_s=duration,
        completed=len(done),
        failed=sum(r.failed for r in records),
        unfinished=sum(r.end_s is None for r in records),
        not_sent=workload.num_requests - len(records),
        requests_per_s=len(done) / duration if duration else 0.0,
        input_tokens=sum(r.input_tokens for r in done),
        output_tokens=output_tokens,
        latencies={
            "ttft": Distribution.of([v for r in done if (v := r.ttft_s) is not None], wanted),
            "tpot": Distribution.of([v for r in done if (v := r.tpot_s) is not None], wanted),
            "itl": Distribution.of([gap for r in done for gap in r.itl_s], wanted),
            "e2el": Distribution.of([v for r in done if (v := r.e2e_s) is not None], wanted),
        },
        goodput=levels,
        good=sum(meets(r, levels) for r in records) if levels else 0,
        prefix=_prefix_hits(records, workload, block_size),
        errors={kind: (n, first[kind]) for kind, n in errors.most_common()},
        rejections=sum(r.rejections for r in records),
        peak_concurrency=int(max(concurrency(records)[1], default=0)),
        counted_by_server=all(r.completion_tokens is not None for r in done),
        tokens_per_chunk=output_tokens / max(1, sum(len(r.token_times_s) for r in done)),
        lag=Distribution.of(lags, wanted),
        loop_lag=Distribution.of(result.loop_lags_s, wanted),
        client_cpu=result.client_cpu_s / duration if duration else 0.0,
        client_cpu_per_token_s=result.client_cpu_s / max(1, chunks),
    )


def _prefix_hits(
    records: Sequence[RequestRecord], workload: Workload, block_size: int
) -> PrefixHits:
    """Of completed requests as the server says; of all that were sent as the oracle does."""
    told = [r for r in records if r.done and r.cached_tokens is not None]
    prompts = sum(r.input_tokens for r in told)
    server = sum(r.cached_tokens or 0 for r in told) / prompts if prompts else None
    oracle = None
    # what a conversation's later turns share depends on the answers' tokens
    if all(len(c.turns) == 1 for c in workload.conversations):
        sent = sorted(
            (r for r in records if r.sent_s is not None), key=lambda r: (r.intended_s, r.index)
        )
        contents = [workload.conversations[r.index].turns[0].prompt for r in sent]
        tokens = sum(map(len, contents))
        if tokens:
            oracle = sum(reusable_tokens(contents, block_size)) / tokens
    return PrefixHits(server, oracle, block_size)


def concurrency(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """Requests under way after each change: times in seconds, and numbers."""
    changes = sorted(
        [(r.sent_s, 1) for r in records if r.sent_s is not None]
        + [(r.end_s, -1) for r in records if r.sent_s is not None and r.end_s is not None]
    )
    numbers: NDArray[np.int64] = np.cumsum([step for _, step in changes], dtype=np.int64)
    return [when for when, _ in changes], numbers.tolist()


def throughput(
    records: Sequence[RequestRecord], duration_s: float, bins: int
) -> tuple[float, list[float]]:
    """Output tokens per second over the run: a bin's width in seconds, and each bin's rate.

    An answer's tokens are spread evenly over its chunks.
    """
    width = duration_s / bins if duration_s else 1.0
    totals = np.zeros(bins)
    for r in records:
        if r.token_times_s:
            at = np.minimum((np.asarray(r.token_times_s) / width).astype(int), bins - 1)
            np.add.at(totals, at, r.output_tokens / len(r.token_times_s))
    return width, (totals / width).tolist()
