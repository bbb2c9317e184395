"""What each format costs in quality: KL from bfloat16, agreement and perplexity on held-out text.

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
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from penstock.bench.drift import Drift, Variant, drift
from penstock.bench.environment import environment
from penstock.bench.workload import longest
from penstock.hardware import detect
from penstock.models.hub import resolve
from penstock.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 512
MARKS = "<!-- drift -->\n", "<!-- /drift -->"

Rows = Sequence[tuple[Variant, Drift | str]]


def held_out(data: Path) -> list[str]:
    """The stories that the embedded model never saw, as its recipe picks them."""
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
        kept = [text for text in source if prepare.is_held_out(text)]
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
    for variant, found in rows:
        size = f"{variant.bytes_per_weight:.3f}"
        if isinstance(found, str):
            lines.append(f"| {variant.name} | {size} | – | – | – | – |")
            continue
        lines.append(
            f"| {variant.name} | {size} | {found.kl:.5f} | {found.kl_p99:.4f} "
            f"| {found.agreement:.1%} | {found.perplexity:.3f} |"
        )
    skipped = [f"{v.name}: not measured, {text}" for v, text in rows if isinstance(text, str)]
    return "\n".join([*lines, *(["", *skipped] if skipped else []), ""])


def write_into(page: Path, text: str) -> None:
    """Put `text` between the page's marks."""
    first, last = MARKS
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
        documents = options.text.read_text(encoding="utf-8").split("<|endoftext|>")
    else:
        documents = held_out(options.data)
    tokenizer = Tokenizer.from_folder(resolve(options.model))
    tokens = [t for text in documents for t in tokenizer.encode(text.strip())][: options.tokens]
    window = options.window or min(longest(options.model), WINDOW)
    rows: list[tuple[Variant, Drift | str]] = []
    for variant, found in drift(options.model, tokens, window):
        rows.append((variant, found))
        print(f"{variant.name}: {found if isinstance(found, str) else f'KL {found.kl:.5f}'}")
    text = table(rows)
    print(f"\n{len(tokens):,} tokens of {len(documents)} documents, windows of {window}\n\n{text}")
    if options.json:
        result = {
            "benchmark": "drift",
            "setup": {
                "model": Path(options.model).name, "tokens": len(tokens), "window": window,
                "documents": len(documents), "text": str(options.text or "held-out TinyStories"),
            },
            "results": [
                {
                    "format": variant.name,
                    "bytes_per_weight": variant.bytes_per_weight,
                    **({"skipped": found} if isinstance(found, str) else asdict(found)),
                }
                for variant, found in rows
            ],
            **environment(detect()),
        }  # fmt: skip
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.page:
        write_into(options.page, text)


if __name__ == "__main__":
    main()
