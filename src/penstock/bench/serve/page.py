"""A run as one HTML file with its charts; it needs nothing else to be shown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from penstock.bench.report import seconds
from penstock.bench.serve.charts import STYLE, Axis, Series, chart
from penstock.bench.serve.figures import METRICS, concurrency, throughput
from penstock.bench.serve.record import RequestRecord
from penstock.bench.serve.result import NAMES, ServeResult

BINS = 60  # of throughput over time

_PAGE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1320px;"
    "margin:2rem auto;padding:0 1rem;color:#24292f;background:#fff}h1{font-size:1.3rem}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(480px,1fr));gap:1rem}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.15rem 1.2rem .15rem 0;"
    "text-align:left;font-variant-numeric:tabular-nums}.warning{color:#9a6700}.error{color:#cf222e}"
    ".note{color:#6e7781}pre{overflow:auto;font-size:12px}"
    "@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}"
    ".warning{color:#d29922}.error{color:#f85149}.note{color:#8b949e}}"
)


def html_page(result: ServeResult, environment: Mapping[str, Any]) -> str:
    """The page, readable in light and dark."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in result.rows()
    )
    lines = [("error", f"{kind}: {n:,}, the first: {message}")
             for kind, (n, message) in result.figures.errors.items()]  # fmt: skip
    lines += [("note", line) for line in (*result.remarks, *result.notes())]
    lines += [("warning", line) for line in result.warnings()]
    about = json.dumps({"setup": result.setup, **environment}, indent=2)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(result.title)}</title><style>{_PAGE}{STYLE}</style></head><body>",
            f"<h1>{escape(result.title)}</h1><table>{rows}</table>",
            _latency_table(result),
            *(f'<p class="{kind}">{escape(line)}</p>' for kind, line in lines),
            '<div class="charts">',
            *charts(result.records, result.figures.duration_s),
            "</div><details><summary>Workload, machine and versions</summary>",
            f"<pre>{escape(about)}</pre></details></body></html>",
            "",
        ]
    )


def _latency_table(result: ServeResult) -> str:
    shown = {m: d for m, d in result.figures.latencies.items() if d is not None}
    if not shown:
        return ""
    names = next(iter(shown.values())).percentiles
    head = "".join(
        f"<th>{escape(name)}</th>" for name in ("", "mean", "std", *map(str.upper, names))
    )
    body = "".join(
        f"<tr><th>{NAMES[m]}, {METRICS[m]}</th>"
        + "".join(f"<td>{seconds(v)}</td>" for v in (d.mean, d.std, *d.percentiles.values()))
        + "</tr>"
        for m, d in shown.items()
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def charts(records: Sequence[RequestRecord], duration_s: float) -> list[str]:
    """Latency distributions, throughput and concurrency over time, TTFT over prompt length."""
    done = [r for r in records if r.done]
    values: dict[str, list[float]] = {
        "ttft": [v for r in done if (v := r.ttft_s) is not None],
        "tpot": [v for r in done if (v := r.tpot_s) is not None],
        "itl": [gap for r in done for gap in r.itl_s],
        "e2el": [v for r in done if (v := r.e2e_s) is not None],
    }
    lines = [Series(NAMES[m], _distribution(found)) for m, found in values.items()]
    width, rates = throughput(records, duration_s, BINS)
    over_time = [(i * width, rate) for i, rate in enumerate(rates)] + [(duration_s, rates[-1])]
    times, running = concurrency(records)
    elapsed = Axis("seconds since the start", 0.0, max(duration_s, 1e-9))
    dots = [(float(r.input_tokens), 1e3 * t) for r in done if (t := r.ttft_s) is not None]
    return [
        chart(
            "Latencies",
            Axis.of("milliseconds", [x for line in lines for x, _ in line.points], log=True),
            Axis("share", 0.0, 1.0),
            lines,
        ),
        chart(
            "Throughput",
            elapsed,
            Axis.of("tokens/s", rates),
            [Series("output tokens/s", over_time, "steps")],
        ),
        chart(
            "Concurrency",
            elapsed,
            Axis.of("requests", running),
            [Series("requests under way", list(zip(times, running, strict=True)), "steps")],
        ),
        chart(
            "Time to first token",
            Axis.of("prompt tokens", [x for x, _ in dots]),
            Axis.of("ms", [y for _, y in dots]),
            [Series("requests", dots, "dots")],
        ),
    ]


def _distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution function, in milliseconds."""
    ordered = sorted(values)
    return [(1e3 * value, (i + 1) / len(ordered)) for i, value in enumerate(ordered)]
