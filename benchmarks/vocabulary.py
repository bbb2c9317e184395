"""What a reduced vocabulary saves and costs: the head's bytes, tokens/s, longer texts.

    python benchmarks/vocabulary.py --json benchmarks/results/vocabulary-stories.json \
        --page docs/vocabulary.md
    python benchmarks/vocabulary.py path/to/model --text ours.txt --held-out theirs.txt \
        --sizes 16384 32768 65536 --quantization w4a8

Tokens are chosen by --text, and their cost is measured on --held-out. Without them: the stories
that the embedded model was trained on, and those that its recipe holds out. Documents in a text are
parted by <|endoftext|>.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drift import ROOT, held_out
from pages import write_between
from penstock import LLM, SamplingParams
from penstock.bench.environment import environment
from penstock.bench.texts import MARK
from penstock.hardware import detect
from penstock.models.hub import resolve
from penstock.pipeline.vocabulary import reduce_vocabulary
from penstock.tokenizer import Tokenizer

TOKENS = 64
ROUNDS = 5


@dataclass(slots=True)
class Row:
    """One size."""

    tokens: int
    head_bytes: int
    text_tokens: int  # of the held-out text
    rewritten: float  # share of its tokens, as the whole vocabulary has them, that are left out
    tokens_per_s: float = 0.0  # decoding one sequence, the best of the rounds


def load(model: str | Path, quantization: str | None) -> LLM:
    return LLM(model, quantization=quantization, max_num_seqs=1, max_model_len=256)


def measure(llm: LLM, whole: Tokenizer, documents: list[str]) -> Row:
    runtime = llm.runtime
    decoder, found = runtime.model.spec.decoder, runtime.vocab_map
    before = [i for text in documents for i in whole.encode(text)]
    after = sum(len(llm.get_tokenizer().encode(text)) for text in documents)
    out = 0 if found is None else sum(not found.has(i) for i in before)
    size = runtime.model.model.formats.head.nbytes(decoder.vocab_size, decoder.hidden)
    return Row(decoder.vocab_size, size, after, out / len(before))


def speed(llm: LLM) -> float:
    """Tokens a second of one sequence, after its first token."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS + 1, ignore_eos=True)
    (out,) = llm.generate("Once upon a time", params)
    times = out.metrics.token_times
    return TOKENS / (times[-1] - times[0])


def table(rows: list[Row]) -> str:
    """Markdown; the whole vocabulary comes first."""
    whole = rows[0]
    lines = [
        "| tokens | head | tokens/s, one sequence | held-out tokens that are left out "
        "| held-out text gets longer by |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.tokens:,} | {row.head_bytes / 1e6:.2f} MB "
        f"| {row.tokens_per_s:.0f} ({row.tokens_per_s / whole.tokens_per_s:.2f}×) "
        f"| {row.rewritten:.2%} | {row.text_tokens / whole.text_tokens - 1:.2%} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


def texts_of(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    if options.text is None:
        return held_out(options.data, held=False), held_out(options.data)
    if options.held_out is None:
        raise SystemExit("--text chooses tokens; give --held-out to measure them on.")
    found = [f.read_text(encoding="utf-8").split(MARK) for f in (options.text, options.held_out)]
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="stories")
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 1024, 512])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "text")
    parser.add_argument("--quantization")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--page", type=Path, help="put the table between this page's marks")
    options = parser.parse_args()
    texts, documents = texts_of(options)
    whole = Tokenizer.from_folder(resolve(options.model))
    with tempfile.TemporaryDirectory() as work:
        models: list[str | Path] = [options.model]
        for size in options.sizes:
            models.append(Path(work) / str(size))
            reduce_vocabulary(options.model, models[-1], size=size, texts=texts)
        llms = [load(model, options.quantization) for model in models]
        rows = [measure(llm, whole, documents) for llm in llms]
        for _ in range(ROUNDS):  # in turn, so that a busy machine is busy for all
            for llm, row in zip(llms, rows, strict=True):
                row.tokens_per_s = max(row.tokens_per_s, speed(llm))
    text = table(rows)
    print(text)
    if options.json:
        setup: dict[str, Any] = {
            "model": Path(options.model).name, "quantization": options.quantization,
            "text": str(options.text or "TinyStories"),
            "held_out": str(options.held_out or "held-out TinyStories"),
        }  # fmt: skip
        found = {
            "benchmark": "vocabulary",
            "setup": setup,
            "results": [asdict(row) for row in rows],
            **environment(detect()),
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.page:
        write_between(options.page, text, ("<!-- vocabulary -->\n", "<!-- /vocabulary -->"))


if __name__ == "__main__":
    main()
