"""What each format costs in quality: KL from bfloat16, agreement and perplexity on held-out text.

What `penstock drift` measures, for all formats in one table.

    python benchmarks/drift.py --json benchmarks/results/drift-stories.json \
        --page docs/quantization.md
    python benchmarks/drift.py path/to/a/model --text book.txt

Without --text: the TinyStories documents that the embedded model's recipe holds out. Documents in
a text are parted by <|endoftext|>; each starts with the tokens its model expects at the start.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from penstock.bench.drift import Drift, measure_drift
from penstock.bench.environment import environment
from penstock.bench.reader import Reader, open_reader
from penstock.bench.texts import MARK, Text
from penstock.bench.variant import Variant
from penstock.bench.workload import longest
from penstock.errors import PenstockError
from penstock.hardware import detect
from penstock.quant import formats_of

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 512
MARKS = "<!-- drift -->\n", "<!-- /drift -->"

FORMATS = (
    *("w8a16", "w8a8", "w4a16-g32"),
    *(f"w4a8-g{group}{zero}" for group in (32, 64, 128) for zero in ("", "-asym")),
    "kv=int8",
    "kv=fp8",
)
"""Options of `penstock drift`."""

TYPICAL = 4096
"""Rows and columns of the matrix whose bytes a weight are told."""

Rows = Sequence[tuple[str, Drift | str]]


def name_of(words: str) -> str:
    """`fp8 cache` of kv=fp8; a quantization's own."""
    return f"{words.removeprefix('kv=')} cache" if words.startswith("kv=") else words


def bytes_per_weight(words: str) -> float:
    """Of a layer's matrix, scales and zero points included."""
    quantization = None if words.startswith("kv=") else words
    matrix = formats_of(quantization, torch.bfloat16).matrix
    return matrix.nbytes(TYPICAL, TYPICAL) / TYPICAL**2


def measure(
    model: str, documents: Sequence[str], limit: int | None, window: int, stride: int
) -> Iterator[tuple[str, Drift | str]]:
    """Each format's drift, or why there is none: the words of the error."""
    exact = Variant(model, dtype="bfloat16")
    with open_reader(exact, window) as reference:
        encoded = reference.encode(documents)
        starts = [0, *accumulate(map(len, encoded))]
        ends = [
            len(ids) if limit is None else max(0, limit - start)
            for ids, start in zip(encoded, starts, strict=False)
        ]
        text = Text("text", [i[:n] for i, n in zip(encoded, ends, strict=True) if len(i[:n]) > 1])
        for words in FORMATS:
            try:
                with open_reader(exact.with_options(words), window) as reader:
                    yield words, _held(reference, reader, text, window, stride)
            except PenstockError as error:
                yield words, str(error)


def _held(reference: Reader, reader: Reader, text: Text, window: int, stride: int) -> Drift | str:
    same = reader.about.weights == reference.about.weights
    if same and reader.about.cache == reference.about.cache:
        return "it leaves the model as it is"
    return measure_drift(reference, reader, [text], window, stride)


def held_out(data: Path, held: bool = True) -> list[str]:
    """The stories that the embedded model never saw, as its recipe picks them; or the others."""
    sys.path.insert(0, str(ROOT))
    from recipes.stories import prepare
    from recipes.stories.truecase import Truecaser

    cased = prepare.read_cased(data / "tinystories" / "train_2M.txt")
    recased = prepare.read_lowercase(
        data / "tinystories" / "train_lowercase_tail.txt", Truecaser.learn(cased)
    )
    seen: set[str] = set()
    documents: list[str] = []
    for source in (cased, recased):
        kept = [text for text in source if prepare.is_held_out(text) is held]
        documents += prepare.deduplicate(kept, seen)
    return documents


def table(rows: Rows) -> str:
    """Markdown."""
    lines = [
        "| format | bytes a weight | KL from bfloat16 | 99% of positions below "
        "| same likeliest token | perplexity |",
        "|---|---|---|---|---|---|",
    ]
    measured = [found for _, found in rows if isinstance(found, Drift)]
    if measured:
        first = measured[0]
        lines.append(f"| bfloat16 | 2.000 | 0 | 0 | 100% | {first.reference_perplexity:.3f} |")
    for words, found in rows:
        name, size = name_of(words), f"{bytes_per_weight(words):.3f}"
        if isinstance(found, str):
            lines.append(f"| {name} | {size} | – | – | – | – |")
            continue
        lines.append(
            f"| {name} | {size} | {found.kl:.5f} | {found.kl_p99:.4f} "
            f"| {found.agreement:.1%} | {found.perplexity:.3f} |"
        )
    skipped = [f"{name_of(w)}: not measured, {text}" for w, text in rows if isinstance(text, str)]
    return "\n".join([*lines, *(["", *skipped] if skipped else []), ""])


def write_between(page: Path, text: str, marks: tuple[str, str]) -> None:
    """Put `text` between the page's marks."""
    first, last = marks
    pattern = re.compile(f"{re.escape(first)}.*?{re.escape(last)}", re.DOTALL)
    before = page.read_text(encoding="utf-8")
    if not pattern.search(before):
        raise SystemExit(f"{page} has no {first.strip()} … {last}.")
    page.write_text(pattern.sub(lambda _: f"{first}{text}{last}", before), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "text")
    parser.add_argument("--window", type=int, help=f"tokens; default: the model's, up to {WINDOW}")
    parser.add_argument("--tokens", type=int, help="stop after so many")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--page", type=Path, help="put the table between this page's marks")
    options = parser.parse_args()
    if options.text:
        documents = options.text.read_text(encoding="utf-8").split(MARK)
    else:
        documents = held_out(options.data)
    documents = [text.strip() for text in documents if text.strip()]
    window = options.window or min(longest(options.model), WINDOW)
    stride = max(1, window // 2)
    rows: list[tuple[str, Drift | str]] = []
    for words, found in measure(options.model, documents, options.tokens, window, stride):
        rows.append((words, found))
        print(f"{words}: {found if isinstance(found, str) else f'KL {found.kl:.5f}'}")
    text = table(rows)
    positions = max((x.positions for _, x in rows if isinstance(x, Drift)), default=0)
    print(f"\n{positions:,} positions in windows of {window}, {stride} tokens new\n\n{text}")
    if options.json:
        result = {
            "benchmark": "drift",
            "setup": {
                "model": Path(options.model).name, "positions": positions, "window": window,
                "stride": stride, "documents": len(documents),
                "text": str(options.text or "held-out TinyStories"),
            },
            "results": [
                {
                    "format": name_of(words),
                    "bytes_per_weight": bytes_per_weight(words),
                    **({"skipped": found} if isinstance(found, str) else found.as_dict()),
                }
                for words, found in rows
            ],
            **environment(detect()),
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.page:
        write_between(options.page, text, MARKS)


if __name__ == "__main__":
    main()
