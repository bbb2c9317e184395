"""What the run says of each target, in a line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.document import Document

Find = Callable[[Document], float | bool | None]


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be shown: a share or factor of at least `least`, or that something is true."""

    name: str
    find: Find
    least: float | None = None


def _at(section: str, item: str, *path: str) -> Find:
    """A figure by where it lies; None where it wasn't measured."""

    def find(document: Document) -> float | bool | None:
        found = document.result(section, item)
        for key in path:
            if not isinstance(found, dict):
                return None
            found = found.get(key)
        return found if isinstance(found, int | float) else None

    return find


def _least(*finds: Find) -> Find:
    """The worst of several; None where one of them is missing."""

    def find(document: Document) -> float | bool | None:
        values = [one(document) for one in finds]
        if any(value is None for value in values):
            return None
        return min(value for value in values if value is not None)

    return find


def _equal(kind: str) -> Find:
    """Of every family; None where any is missing."""

    def find(document: Document) -> bool | None:
        checks = document.items("checks")
        found = [entry for name, entry in checks.items() if name.startswith(f"{kind}-")]
        if not found or any("result" not in each for each in found):
            return None
        return all(each["result"]["equal"] for each in found)

    return find


def _three_rates(document: Document) -> bool | None:
    """Whether three rates have percentiles of all of their requests."""
    found = [e["result"] for e in document.items("traffic").values() if "result" in e]
    if len(found) < 3:
        return None
    return all(one["ttft_s"] and one["tpot_s"] and one["completed"] == one["requests"]
               for one in found)  # fmt: skip


def _against_transformers(document: Document) -> float | None:
    """Our tokens a second over the best of transformers' ways, a late one's at most."""
    done = {n: e["result"] for n, e in document.items("peers").items() if "result" in e}
    ours = done.pop("penstock", {}).get("output_tokens_per_s")
    names = ("output_tokens_per_s", "output_tokens_per_s_below")
    theirs = [found[name] for found in done.values() for name in names if found.get(name)]
    return ours / max(theirs) if ours and theirs else None


_DECODE_32K = tuple(
    _at("ops", "attention-decode", f"batch-{b}", "achieved_of_copy") for b in (1, 8, 64)
)

TARGETS = (
    Target("8B shape, decode, batch 1: of the floor",
           _at("engine", "8b-decode-1", "achieved_of_copy"), 0.85),
    Target("the same in w4a16", _at("engine", "8b-w4a16-decode-1", "achieved_of_copy"), 0.70),
    Target("8B shape, decode, batch 64: of the floor",
           _at("engine", "8b-decode-64", "achieved_of_copy"), 0.70),
    Target("8B shape, prefill of 4,096 tokens: of the matrix rate",
           _at("engine", "8b-prefill-4096", "of_matrix_rate"), 0.65),
    Target("1B shape, decode, batch 1: of the floor",
           _at("engine", "1b-decode-1", "achieved_of_copy"), 0.70),
    Target("decode attention at 32k, the least of batch 1, 8, 64: of the copy bandwidth",
           _least(*_DECODE_32K), 0.85),
    Target("prefill attention of 4,096 tokens: of the matrix rate",
           _at("ops", "attention-prefill", "behind-0", "penstock", "achieved"), 0.55),
    Target("graphs: of launch gaps removed, batch 1",
           _at("engine", "gaps-1", "launch_gaps_removed"), 0.80),
    Target("host's time hidden, batch 8", _at("engine", "gaps-8", "host_hidden"), 0.90),
    Target("output tokens a second: times transformers' best", _against_transformers, 3.0),
    Target("TTFT and TPOT percentiles at three rates", _three_rates),
    Target("greedy tokens in float32 equal the CPU's, every family", _equal("greedy")),
    Target("bfloat16 by ==: alone, together, in chunks", _equal("invariance")),
    Target("kernels close to their references", _at("checks", "parity", "all_close")),
    Target("kernels' tests", _at("checks", "tests", "passed")),
)  # fmt: skip


def lines(document: Document) -> list[dict[str, Any]]:
    """Each target with its figure: met, not met, or None where it wasn't measured."""
    found = []
    for target in TARGETS:
        value = target.find(document)
        met: bool | None = None
        if value is not None:
            met = bool(value) if target.least is None else value >= target.least
        found.append({"target": target.name, "value": value, "least": target.least, "met": met})
    return found


def errors(document: Document) -> dict[str, str]:
    """Items that failed, each with the last line of its trace."""
    found = {}
    for section, items in document.read()["sections"].items():
        for name, entry in items.items():
            if "error" in entry:
                found[f"{section}: {name}"] = entry["error"].strip().splitlines()[-1][:200]
            for part, one in _ours(entry.get("result")):
                found[f"{section}: {name}, {part}"] = one["error"][:200]
    return found


def _ours(result: Any) -> list[tuple[str, dict[str, str]]]:
    """What of a comparison's parts failed in our own kernel."""
    parts = result.items() if isinstance(result, dict) else ()
    ours = ((k, v["penstock"]) for k, v in parts if isinstance(v, dict) and "penstock" in v)
    return [(part, one) for part, one in ours if isinstance(one, dict) and "error" in one]


def text(document: Document) -> str:
    """For a terminal: targets, then what failed."""
    words = {True: "met", False: "NOT MET", None: "not measured"}
    rows = []
    for line in lines(document):
        value, least = line["value"], line["least"]
        shown = "" if value is None else str(value) if least is None else f"{value:.3f}"
        wanted = "" if least is None else f"≥ {least:g}"
        rows.append(f"{words[line['met']]:>12}  {shown:>7} {wanted:<7} {line['target']}")
    failed = errors(document)
    rows += [f"{'ERROR':>12}  {name}: {why}" for name, why in failed.items()]
    return "\n".join(rows)
