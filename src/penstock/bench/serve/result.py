"""What a run of `penstock bench serve` found: a table for a reader, JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.bench.report import count, percent, seconds
from penstock.bench.serve.figures import Distribution, Figures
from penstock.bench.serve.record import RequestRecord

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
SEVERAL = 1.05  # tokens a chunk, beyond which gaps aren't of single tokens


@dataclass(frozen=True, slots=True)
class ServeResult:
    """One run's result."""

    figures: Figures
    records: Sequence[RequestRecord]
    interrupted: bool
    server: str  # host:port
    model: str
    load: str
    setup: dict[str, Any]
    remarks: tuple[str, ...]

    def as_dict(self, environment: Mapping[str, Any], *, detailed: bool = False) -> dict[str, Any]:
        """What is kept; detailed: with every request's times."""
        found = {
            "benchmark": "serve",
            "partial": self.interrupted,
            "setup": self.setup,
            "results": self.figures.as_dict(),
            **environment,
        }
        if detailed:
            found["requests"] = [record.as_dict() for record in self.records]
        return found

    def as_json(self, environment: Mapping[str, Any], *, detailed: bool = False) -> str:
        """The same as text."""
        return json.dumps(self.as_dict(environment, detailed=detailed), indent=2) + "\n"

    @property
    def title(self) -> str:
        """The heading of table and page."""
        partial = "PARTIAL, stopped before its end: " if self.interrupted else ""
        return f"{partial}{self.model} at {self.server}, {self.load}"

    def rows(self) -> list[tuple[str, str]]:
        """What isn't a latency: names and values."""
        f = self.figures
        ended = [f"{f.completed:,} answered"]
        ended += [f"{f.failed:,} failed"] if f.failed else []
        ended += [f"{f.unfinished:,} unfinished"] if f.unfinished else []
        ended += [f"{f.not_sent:,} not sent"] if f.not_sent else []
        rows = [
            ("requests", ", ".join(ended)),
            ("duration", seconds(f.duration_s)),
            ("requests/s", f"{f.requests_per_s:,.2f}"),
            ("output tokens/s", f"{f.rate(f.output_tokens):,.1f}"),
            ("input tokens/s", f"{f.rate(f.input_tokens):,.1f}"),
            ("total tokens/s", f"{f.rate(f.input_tokens + f.output_tokens):,.1f}"),
            ("most at once", f"{f.peak_concurrency:,}"),
        ]
        if f.goodput:
            levels = " ".join(f"{k}:{v * 1e3:g}" for k, v in f.goodput.items())
            whole = f.completed + f.failed
            share = f" ({percent(f.good / whole)} of the requests)" if whole else ""
            rows.append((f"goodput ({levels})", f"{f.rate(f.good):,.2f} requests/s{share}"))
        if f.prefix.server is not None or f.prefix.oracle:
            said = "not told" if f.prefix.server is None else percent(f.prefix.server)
            could = f.prefix.oracle
            bound = (
                "" if could is None else f"; {percent(could)} possible (blocks of "
                f"{f.prefix.block_size} tokens, never evicted)"
            )  # fmt: skip
            rows.append(("prefix hits", said + bound))
        return rows

    def table(self, metrics: Sequence[str]) -> RenderableType:
        """For a terminal; metrics: of METRICS, with their percentiles."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, value in self.rows():
            head.add_row(Text(name), Text(value))
        parts: list[RenderableType] = [Text(self.title, style="bold"), head]
        shown = {m: d for m in metrics if (d := self.figures.latencies[m]) is not None}
        if shown:
            parts += [Text(), _latencies(shown)]
        parts += [Text(f"{kind}: {n:,}, the first: {m}", style="red") for kind, (n, m) in
                  self.figures.errors.items()]  # fmt: skip
        parts += [Text(line, style="dim") for line in (*self.remarks, *self.notes())]
        parts += [Text(line, style="yellow") for line in self.warnings()]
        return Group(*parts)

    def notes(self) -> list[str]:
        """How to read the figures."""
        f = self.figures
        notes = []
        if f.rejections:
            notes.append(f"{count(f.rejections, 'answer')} with status 429 (too many requests).")
        if not f.counted_by_server:
            notes.append("The server doesn't count tokens: each chunk of an answer counts as one.")
        elif f.completed and not 1 / SEVERAL < f.tokens_per_chunk < SEVERAL:
            notes.append(
                f"Chunks hold {f.tokens_per_chunk:.2f} tokens in the mean: ITL is the gap between "
                "chunks."
            )
        if f.lag is not None and f.loop_lag is not None:
            notes.append(
                f"Client: sent 99% within {seconds(f.lag.percentiles['p99'])} of when it meant to, "
                f"event loop late by {seconds(f.loop_lag.percentiles['p99'])} (P99), "
                f"{f.client_cpu:.2f} cores, {seconds(f.client_cpu_per_token_s)} a token."
            )
        return notes

    def warnings(self) -> list[str]:
        """Why the figures may not be the server's."""
        f = self.figures
        warnings = []
        if f.client_was_slow:
            warnings.append(
                "The client may have been the bottleneck: it was late or kept a core busy. Lower "
                "the load, or run it on another machine."
            )
        if f.failed:
            warnings.append("Requests failed: latencies are of those that were answered in full.")
        return warnings


def _latencies(shown: Mapping[str, Distribution]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    names = [name.upper() for name in next(iter(shown.values())).percentiles]
    for name in ("", "mean", "std", *names):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for metric, found in shown.items():
        table.add_row(
            NAMES[metric],
            *map(seconds, (found.mean, found.std, *found.percentiles.values())),
        )
    return table
