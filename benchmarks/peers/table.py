"""What the runs say: speeds, and Penstock's ratio to the best peer of each kind, as Markdown.

Everything is read from the JSON that a run writes, so an old result can be shown again.
A ratio is the median of the rounds' ratios: a round's runs lie close together in time, and what
slows the whole machine down slows both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.rounds import median

from penstock.bench.report import count

OURS = "Penstock"


@dataclass(frozen=True, slots=True)
class Ratio:
    """Penstock in one format, one work, against the best of some peers."""

    work: str
    ours: dict[str, Any]  # contenders, as in the JSON
    best: dict[str, Any]
    ratio: float


def name(contender: dict[str, Any]) -> str:
    return f"{contender['peer']} {contender['format']}"


def speed(contender: dict[str, Any], work: str) -> float | None:
    """Tokens/s, the median of the rounds."""
    value: float | None = contender["tokens_per_s"].get(work)
    return value


def compare(ours: dict[str, Any], peers: Iterable[dict[str, Any]], work: str) -> Ratio | None:
    """Against the fastest of `peers`; None where either side has no figure."""
    rivals = [peer for peer in peers if speed(peer, work) is not None]
    if not rivals or speed(ours, work) is None:
        return None
    best = max(rivals, key=lambda peer: speed(peer, work) or 0.0)
    pairs = zip(ours["samples"][work], best["samples"][work], strict=True)
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    return Ratio(work, ours, best, statistics.median(ratios)) if ratios else None


def ratios(result: dict[str, Any], *, equal_bits: bool) -> list[Ratio]:
    """Every format of Penstock in every work, against peers of as many bits or of any."""
    ours = [c for c in result["contenders"] if c["peer"] == OURS]
    peers = [c for c in result["contenders"] if c["peer"] != OURS]
    found = []
    for mine in ours:
        rivals = [c for c in peers if not equal_bits or c["bits"] == mine["bits"]]
        found += [compare(mine, rivals, work) for work in result["setup"]["works"]]
    return [ratio for ratio in found if ratio is not None]


def bandwidth(result: dict[str, Any]) -> float | None:
    """Bytes/s that all threads read, the median of all the times it was measured."""
    return median(
        [run[side]["read_bytes_per_s"] for run in result["runs"] for side in ("before", "after")]
    )


def markdown(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """A table; the first two columns are words, the others figures."""
    rule = ["---" if i < 2 else "---:" for i in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows])


def speeds_table(result: dict[str, Any]) -> str:
    """Tokens/s of every contender; single decoding with its share of the memory bandwidth."""
    works, read = result["setup"]["works"], bandwidth(result)
    rows = []
    for contender in sorted(result["contenders"], key=lambda c: (-c["bits"], c["peer"] != OURS)):
        size = contender["weight_bytes"]
        cells = [name(contender), contender["head"], f"{size / 1e6:,.0f}"]
        for work in works:
            value = speed(contender, work)
            cell = "–" if value is None else f"{value:,.1f}"
            if value is not None and read and work.startswith("decode@"):
                cell += f" ({value * size / read:.0%})"
            cells.append(cell)
        rows.append(cells)
    return markdown(rows, ["weights", "head", "MB/token", *works])


def ratio_table(result: dict[str, Any]) -> str:
    """Penstock ÷ the best peer: at equal bits, and of any precision."""
    works = result["setup"]["works"]
    rows: list[list[str]] = []
    for title, equal in (("equal bits", True), ("any", False)):
        found = {(r.ours["format"], r.work): r for r in ratios(result, equal_bits=equal)}
        for form in dict.fromkeys(form for form, _ in found):
            cells = [_cell(found.get((form, work))) for work in works]
            rows.append([f"{OURS} {form}", title, *cells])
    if not rows:
        return "No peer has a figure to compare Penstock's with."
    return markdown(rows, ["Penstock ÷ best peer", "peers", *works])


def _cell(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{ratio.ratio:.2f}× {name(ratio.best)}"


def report(result: dict[str, Any]) -> str:
    """Everything that a reader wants to know."""
    setup, where, read = result["setup"], result["hardware"], bandwidth(result)
    lines = [
        f"{setup['model']}: {where['cores']} cores of {where['processor']} ({result['isa']}), "
        f"{count(setup['threads'], 'thread')}, medians of {count(setup['rounds'], 'round')}, "
        "tokens/s" + (f" (share of {read / 1e9:.1f} GB/s read)" if read else ""),
        "",
        speeds_table(result),
        "",
        ratio_table(result),
        "",
        *(f"{peer}: {version}" for peer, version in result["peers"].items()),
        *(f"{peer} skipped: {reason}" for peer, reason in result["skipped"].items()),
        *(f"{name(c)} failed: {c['error']}" for c in result["contenders"] if c["error"]),
    ]
    return "\n".join(lines)
