"""Puts the figures of benchmarks/methods.py into the pages of methods and formats.

    python benchmarks/methods_tables.py benchmarks/results/methods-stories.json docs

A page has a table between `<!-- methods: NAME -->` and `<!-- /methods -->`; NAME is one of TABLES.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from methods import LESSON
from pages import fill
from penstock.pipeline.config import METHODS
from rows import Row

ALL = (*METHODS, "qat")
NONE = "–"
FAMILIES = {
    "int8": lambda name: name.startswith("w8"),
    "int4": lambda name: name.startswith("w4"),
    "fp8": lambda name: name.startswith("fp8"),
    "nf4": lambda name: name.startswith("nf4"),
    "mxfp4": lambda name: name == "mxfp4",
    "nvfp4": lambda name: name == "nvfp4",
}

Table = Callable[[Sequence[Row]], str]


def of_format(rows: Sequence[Row], family: str) -> str:
    """Every method in the formats of one family; columns where nothing could be measured go."""
    grid = [row for row in rows if row["part"] == "grid" and FAMILIES[family](row["scheme"])]
    methods = [m for m in ALL if any(row["method"] == m and "kl" in row for row in grid)]
    names = sorted({row["scheme"] for row in grid}, key=_order)
    found = [["format", "bits", *methods]]
    for name in names:
        of_name = {row["method"]: row for row in grid if row["scheme"] == name}
        cells = [_both(of_name.get(method)) for method in methods]
        found.append([name, _bits(of_name.values()), *cells])
    return _markdown(found) + _notes(grid, "scheme" if len(names) > 1 else "")


def of_method(rows: Sequence[Row], method: str) -> str:
    """One method beside rounding to nearest, in every format that it takes."""
    grid = [row for row in rows if row["part"] == "grid"]
    rtn = {row["scheme"]: row for row in grid if row["method"] == "rtn"}
    found = [["format", "bits", "KL, to nearest", f"KL, {method}", "less by",
              "perplexity, to nearest", f"perplexity, {method}"]]  # fmt: skip
    own = sorted(
        (row for row in grid if row["method"] == method), key=lambda r: _order(r["scheme"])
    )
    for row in own:
        base = rtn.get(row["scheme"])
        if "kl" not in row or base is None:
            continue
        found.append([
            row["scheme"], _bits([row]), f"{base['kl']:.5f}", f"{row['kl']:.5f}",
            f"{round(100 * (1 - row['kl'] / base['kl']))}%", f"{base['perplexity']:.3f}",
            f"{row['perplexity']:.3f}",
        ])  # fmt: skip
    return _markdown(found) + _notes(own, "scheme")


def nearest(rows: Sequence[Row]) -> str:
    """What shares a scale, rounded to nearest, with zero points and without."""
    by_name = {row["scheme"]: row for row in rows if _is(row, "grid", "rtn")}
    found = [["a scale for", "8 bits", "8 bits, zero point", "4 bits", "4 bits, zero point"]]
    shared = ("the matrix", "-tensor"), ("a row", "-channel"), ("128 values", "-g128")
    for words, suffix in shared:
        cells = []
        for bits in (8, 4):
            own = "" if bits == 8 and suffix == "-channel" else suffix
            cells += [_both(by_name.get(f"w{bits}a16{own}{zero}")) for zero in ("", "-asym")]
        found.append([words, *cells])
    return _markdown(found)


def outliers(rows: Sequence[Row]) -> str:
    """Methods for activations on the model with planted outliers."""
    found = [["format", "calibrator", "method", "KL", "same likeliest token", "perplexity"]]
    found += [
        [row["scheme"], row["calibrator"] or NONE, row["method"], f"{row['kl']:.5f}",
         f"{row['same_likeliest_token']:.1%}", f"{row['perplexity']:.3f}"]
        for row in rows if row["part"] == "outliers"
    ]  # fmt: skip
    return _markdown(found)


def calibrators(rows: Sequence[Row]) -> str:
    """Static activations by each calibrator, on the model as it is and with planted outliers."""
    own = [row for row in rows if row["part"] == "calibrators"]
    planted = [row for row in rows if row["part"] == "outliers"]
    methods = list(dict.fromkeys(row["method"] for row in own))
    found = [["activations", *methods, "outliers, rtn", "outliers, smoothquant"]]
    for name in ["", *dict.fromkeys(row["calibrator"] for row in own)]:
        plain = [r for r in rows if _is(r, "grid") and r["scheme"] == "w8a8"] if not name else own
        cells = [_first(plain, method, name) for method in methods]
        cells += [_first(planted, method, name) for method in ("rtn", "smoothquant")]
        found.append([name or "a scale for each token", *map(_both, cells)])
    return _markdown(found)


def mixed(rows: Sequence[Row]) -> str:
    """A mixture beside what it is made of."""
    own = sorted((row for row in rows if row["part"] == "mixed"), key=lambda row: row["bits"])
    found = [["format", "bits", "KL", "same likeliest token", "perplexity"]]
    found += [
        [row["scheme"], _bits([row]), f"{row['kl']:.5f}", f"{row['same_likeliest_token']:.1%}",
         f"{row['perplexity']:.3f}"] for row in own
    ]  # fmt: skip
    return _markdown(found)


TABLES: dict[str, Table] = {
    **{f"format {name}": partial(of_format, family=name) for name in FAMILIES},
    **{f"method {name}": partial(of_method, method=name) for name in ALL if name != "rtn"},
    "nearest": nearest,
    "outliers": outliers,
    "calibrators": calibrators,
    "mixed": mixed,
}


def caption(results: Row) -> str:
    """What was measured, and bfloat16's own perplexity."""
    setup, rows = results["setup"], results["results"]
    trained = setup["qat"]["steps"] * setup["qat"]["batch"] * LESSON
    perplexity = next(row["reference_perplexity"] for row in rows if "kl" in row)
    fitted = setup["calibration"]["tokens"]
    return (
        f"{setup['about']} on {setup['tokens']:,} held-out tokens; fitted to {fitted:,} others, "
        f"trained on {trained:,}. bfloat16's perplexity is {perplexity:.3f}.\n"
    )


def write_pages(results: Row, docs: Path) -> list[Path]:
    """Fill in every table that a page under `docs` asks for; returns these pages."""
    rows, below = results["results"], caption(results)
    made = {name: partial(_with_caption, make, rows, below) for name, make in TABLES.items()}
    return fill(docs, "methods", made)


def _with_caption(make: Table, rows: Sequence[Row], below: str) -> str:
    return f"{make(rows)}\n{below}"


def _order(name: str) -> tuple[bool, bool, str]:
    """By what is stored, then what multiplies, then what shares a scale."""
    return (not name.startswith("w8"), not name.startswith("w4"), name)


def _is(row: Row, part: str, method: str | None = None) -> bool:
    return row["part"] == part and method in (None, row["method"])


def _first(rows: Sequence[Row], method: str, calibrator: str) -> Row | None:
    return next(
        (r for r in rows if r["method"] == method and r["calibrator"] == calibrator), None
    )  # fmt: skip


def _both(row: Row | None) -> str:
    """KL, and perplexity in brackets."""
    if row is None or "kl" not in row:
        return NONE
    return f"{row['kl']:.5f} ({row['perplexity']:.2f})"


def _bits(rows: Any) -> str:
    return next((f"{row['bits']:.2f}" for row in rows if "bits" in row), NONE)


def _markdown(lines: list[list[str]]) -> str:
    first, *rest = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([first, "|---" * len(lines[0]) + "|", *rest, ""])


def _notes(rows: Sequence[Row], name: str) -> str:
    """Why cells are empty; `name`: the row's key that says of what."""
    names: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "not" in row:
            reason = re.sub(r"^layers\.\S+ in \S+: ", "", row["not"]).rstrip(".")
            names.setdefault((reason, row["method"]), []).append(row[name] if name else "")
    methods: dict[tuple[str, str], list[str]] = {}
    for (reason, method), of in names.items():
        said = ", ".join(sorted(of, key=_order)) if name else ""
        methods.setdefault((reason, said), []).append(f"`{method}`")
    lines = [
        f"- No {', '.join(of)}{' of ' * bool(said)}{said}: {reason}."
        for (reason, said), of in methods.items()
    ]
    return "\n" + "\n".join([*lines, ""]) if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("docs", type=Path)
    options = parser.parse_args()
    results = json.loads(options.results.read_text(encoding="utf-8"))
    for page in write_pages(results, options.docs):
        print(page)


if __name__ == "__main__":
    main()
