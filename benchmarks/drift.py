"""What each format costs in quality: KL from bfloat16, agreement and perplexity on held-out text.

What `penstock drift` measures, for all formats in one table.

    python benchmarks/drift.py --json benchmarks/results/drift-stories.json --docs docs
    python benchmarks/drift.py path/to/a/model --text book.txt
    python benchmarks/drift.py --dtypes --json benchmarks/results/drift-dtypes.json --docs docs

The figures are written format by format; --resume goes on with a run that was interrupted.

Without --text: the TinyStories documents that the embedded model's recipe holds out. Documents in
a text are parted by <|endoftext|>; each starts with the tokens its model expects at the start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from pages import fill
from penstock.bench.drift import measure_drift
from penstock.bench.reader import LocalReader, Reader, open_reader
from penstock.bench.texts import MARK, Text
from penstock.bench.variant import Variant
from penstock.bench.workload import longest
from penstock.errors import PenstockError
from penstock.quant import formats_of
from penstock.runtime import load_runtime
from remembered import Remembered
from rows import Row, Rows

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 512

FORMATS = (
    *("w8a16", "w8a16-g32", "w8a16-tensor", "w8a8", "w8a8-asym"),
    *("fp8", "fp8-tensor", "fp8-block", "fp8-e5m2", "fp8-w8a8", "fp8-w8a8-block"),
    *(f"w4a16-{shared}" for shared in ("g32", "channel", "channel-asym", "tensor")),
    *(f"w4a8-g{group}{zero}" for group in (32, 64, 128) for zero in ("", "-asym")),
    *("nf4-g64", "mxfp4", "nvfp4"),
    *("kv=int8", "kv=fp8", "kv=int4", "kv=kivi", "kv=kivi window=32", "kv=kivi window=1"),
)
"""Options of `penstock drift`; window: `kv_recent_window`."""

DTYPES = ("tf32", "float16", "bfloat16")
"""What --dtypes holds against float32: of products, of references, as every model runs."""

TYPICAL = 4096
"""Rows and columns of the matrix whose bytes a weight are told."""


def is_cache(words: str) -> bool:
    """Whether it is keys and values that are stored otherwise."""
    return words.startswith("kv=")


def name_of(words: str) -> str:
    """`kivi cache, window of 32` of kv=kivi window=32; a quantization's own."""
    if not is_cache(words):
        return words
    kind, _, window = words.removeprefix("kv=").partition(" window=")
    return f"{kind} cache, window of {window}" if window else f"{kind} cache"


def bytes_per_weight(words: str) -> float:
    """Of a layer's matrix, scales and zero points included."""
    quantization = None if is_cache(words) else words
    matrix = formats_of(quantization, torch.bfloat16).matrix
    return matrix.nbytes(TYPICAL, TYPICAL) / TYPICAL**2


@contextmanager
def reading(exact: Variant, words: str, window: int) -> Iterator[Reader]:
    """A reader of the model in the form that `words` say."""
    options, _, recent = words.partition(" window=")
    variant = exact.with_options(options)
    if not recent:
        with open_reader(variant, window) as reader:
            yield reader
        return
    config = variant.config(window)
    cache = replace(config.cache, kv_recent_window=int(recent))
    yield LocalReader(load_runtime(replace(config, cache=cache)))


def measure(
    rows: Rows, model: str, documents: Sequence[str], limit: int | None, window: int, stride: int
) -> None:
    """Add each format's drift, or why there is none: the words of the error."""
    exact = Variant(model, dtype="bfloat16")
    with open_reader(exact, window) as reader:
        reference = Remembered(reader)
        text = Text("text", leading(reference.encode(documents), limit))
        for words in FORMATS:
            if rows.find(format=words) is not None:
                continue
            try:
                with reading(exact, words, window) as other:
                    found = _held(reference, other, text, window, stride)
            except PenstockError as error:
                found = {"skipped": str(error)}
            rows.add({"format": words, "bytes_per_weight": bytes_per_weight(words), **found})
            print(f"{words}: KL {found.get('kl')} {found.get('skipped', '')}", flush=True)


def measure_dtypes(
    rows: Rows, model: str, documents: Sequence[str], limit: int | None, window: int, stride: int
) -> None:
    """Add the drift of each dtype from float32."""
    with open_reader(Variant(model, dtype="float32"), window) as reader:
        reference = Remembered(reader)
        text = Text("text", leading(reference.encode(documents), limit))
        for dtype in DTYPES:
            if rows.find(format=dtype) is not None:
                continue
            with open_reader(Variant(model, dtype=dtype), window) as other:
                found = measure_drift(reference, other, [text], window, stride).as_dict()
            rows.add({"format": dtype, "from": "float32", **found})
            print(f"{dtype}: KL {found['kl']}", flush=True)


def leading(documents: Sequence[list[int]], limit: int | None) -> list[list[int]]:
    """The first `limit` tokens, or all; what is too short to predict anything is left out."""
    starts = [0, *accumulate(map(len, documents))]
    kept = [
        ids if limit is None else ids[: max(0, limit - start)]
        for ids, start in zip(documents, starts, strict=False)
    ]
    return [ids for ids in kept if len(ids) > 1]


def _held(reference: Reader, reader: Reader, text: Text, window: int, stride: int) -> Row:
    same = reader.about.weights == reference.about.weights
    if same and reader.about.cache == reference.about.cache:
        return {"skipped": "it leaves the model as it is"}
    return measure_drift(reference, reader, [text], window, stride).as_dict()


def held_out(data: Path, held: bool = True) -> list[str]:
    """The stories that the embedded model never saw, as its recipe picks them; or the others."""
    sys.path.insert(0, str(ROOT))
    from recipes.prepare import split
    from recipes.sources import read_tinystories

    training, kept = split(read_tinystories(data))
    return (kept if held else training)["tinystories"]


def table(rows: Sequence[Row], *, size: bool = True) -> str:
    """Markdown; size: with the bytes a weight."""
    columns = ["format", "KL from bfloat16", "99% of positions below", "same likeliest token"]
    columns = [*columns[:1], *(["bytes a weight"] if size else []), *columns[1:], "perplexity"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]

    def line(name: str, nbytes: float, *figures: str) -> None:
        cells = [name, *([f"{nbytes:.3f}"] if size else []), *figures]
        lines.append("| " + " | ".join(cells) + " |")

    measured = [row for row in rows if "skipped" not in row]
    if measured:
        line("bfloat16", 2.0, "0", "0", "100%", f"{measured[0]['reference_perplexity']:.3f}")
    for row in rows:
        name, nbytes = name_of(row["format"]), row["bytes_per_weight"]
        if "skipped" in row:
            line(name, nbytes, "–", "–", "–", "–")
            continue
        line(
            name, nbytes, f"{row['kl']:.5f}", f"{row['kl_p99']:.4f}",
            f"{row['same_likeliest_token']:.1%}", f"{row['perplexity']:.3f}",
        )  # fmt: skip
    notes = [
        f"{name_of(row['format'])}: not measured, {row['skipped']}"
        for row in rows
        if "skipped" in row
    ]
    return "\n".join([*lines, *(["", *notes] if notes else []), ""])


def table_of_dtypes(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| dtype | KL from float32 | 99% of positions below | same likeliest token | perplexity |",
        "|---|---|---|---|---|",
        f"| float32 | 0 | 0 | 100% | {rows[0]['reference_perplexity']:.4f} |",
    ]
    lines += [
        f"| {row['format']} | {row['kl']:.7f} | {row['kl_p99']:.6f} | "
        f"{row['same_likeliest_token']:.2%} | {row['perplexity']:.4f} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


def tables(rows: Sequence[Row]) -> dict[str, Callable[[], str]]:
    """The tables that pages may ask for: `weights`, `caches`, and `cache NAME` for each."""
    if rows and rows[0].get("from") == "float32":
        return {"all": partial(table_of_dtypes, rows)}
    weights = [row for row in rows if not is_cache(row["format"])]
    caches = [row for row in rows if is_cache(row["format"])]

    def of_cache(name: str) -> str:
        return table([r for r in caches if name_of(r["format"]).split()[0] == name], size=False)

    names = {name_of(row["format"]).split()[0] for row in caches}
    return {
        "weights": partial(table, weights),
        "caches": partial(table, caches, size=False),
        **{f"cache {name}": partial(of_cache, name) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "text")
    parser.add_argument("--window", type=int, help=f"tokens; default: the model's, up to {WINDOW}")
    parser.add_argument("--tokens", type=int, help="stop after so many")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--resume", action="store_true", help="go on with the rows in --json")
    parser.add_argument("--dtypes", action="store_true", help="float32 against the others alone")
    parser.add_argument("--docs", type=Path, help="fill in the tables of the pages there")
    options = parser.parse_args()
    if options.text:
        documents = options.text.read_text(encoding="utf-8").split(MARK)
    else:
        documents = held_out(options.data)
    documents = [text.strip() for text in documents if text.strip()]
    window = options.window or min(longest(options.model), WINDOW)
    stride = max(1, window // 2)
    setup = {
        "model": Path(options.model).name, "window": window, "stride": stride,
        "documents": len(documents), "tokens": options.tokens,
        "text": str(options.text or "held-out TinyStories"),
    }  # fmt: skip
    rows = Rows("dtypes" if options.dtypes else "drift", setup, options.json, options.resume)
    measured = measure_dtypes if options.dtypes else measure
    measured(rows, options.model, documents, options.tokens, window, stride)
    positions = max((row.get("positions", 0) for row in rows.all), default=0)
    print(f"\n{positions:,} positions in windows of {window}, {stride} tokens new\n")
    print((table_of_dtypes if options.dtypes else table)(rows.all))
    if options.docs:
        fill(options.docs, "dtypes" if options.dtypes else "drift", tables(rows.all))


if __name__ == "__main__":
    main()
