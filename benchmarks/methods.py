"""What each way to choose quantized values costs in quality, on the embedded model.

    python benchmarks/methods.py --json benchmarks/results/methods-stories.json --pages docs/methods

Calibrated on TinyStories that the model was trained on, measured on those that its recipe holds
out. --only takes a part of the rows: rounding, mixed, outliers, qat.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from drift import ROOT, held_out, write_into
from penstock.bench.drift import Drift, Variant, load, measure_drift
from penstock.bench.environment import environment
from penstock.cache import PagedLayout
from penstock.hardware import detect
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel
from penstock.models.registry import read_spec
from penstock.models.sources import open_source
from penstock.models.weights import Source, load_weights, stored_formats
from penstock.nn import Decoder
from penstock.pipeline import qat
from penstock.pipeline.calibration import CalibrationSet, from_texts
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.parts import Parts, bits_per_weight
from penstock.pipeline.quantize import quantize_model
from penstock.pipeline.sensitivity import choose, measure, num_weights
from penstock.quant import Codes, Scheme, parse_scheme
from penstock.runtime import Runner, Runtime
from penstock.tokenizer import Tokenizer

WINDOW, BLOCK = 512, 32
CANDIDATES = ("w4a16-g128", "w4a16-g64", "w4a16-g32", "w8a16")
BUDGET = "4.5bpw"
OUTLIERS, FACTOR = 6, 64.0

Tensors = Iterable[tuple[str, Tensor | Codes]]


@dataclass(frozen=True, slots=True)
class Row:
    part: str
    scheme: str
    method: str
    bits: float  # a weight of the layers' matrices
    drift: Drift
    seconds: float  # to quantize


def runtime_of(source: Source) -> Runtime:
    """A model on `source` in its own formats, for one sequence of WINDOW tokens."""
    spec = read_spec(source.path)
    formats = stored_formats(spec, source, torch.bfloat16)
    decoder = Decoder(spec.decoder, formats, torch.bfloat16, WINDOW).eval()
    load_weights(decoder, spec, source)
    heads = tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in spec.decoder.layers)
    layout, blocks = PagedLayout(heads, torch.bfloat16, BLOCK), -(-WINDOW // BLOCK)
    loaded = LoadedModel(decoder, spec, torch.bfloat16, WINDOW, {}, ())
    return Runtime(loaded, None, layout, blocks, Runner(decoder, layout.allocate(blocks)))


def with_outliers(source: Source) -> Overlay:
    """The same function with OUTLIERS channels of each norm FACTOR times as large: a power of two.

    A norm's channels go up and the columns that read them down, so in bfloat16 not a bit of any
    product changes.
    """
    parts, changed = Parts.of(source), dict[str, Tensor | Codes]()
    for i in range(parts.num_layers):
        for norm, module in (("attention_norm", "attention.qkv"), ("mlp_norm", "mlp.up")):
            (name,) = parts.names[f"layers.{i}.{norm}.weight"]
            weight = parts.read(name)
            scale = torch.ones_like(weight)
            scale[weight.abs().argsort(descending=True)[:OUTLIERS]] = FACTOR
            changed[name] = (weight * scale).to(torch.bfloat16)
            for part in parts.names[f"layers.{i}.{module}.weight"]:
                changed[part] = (parts.read(part) / scale).to(torch.bfloat16)
    return Overlay(source, changed.items())


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = resolve("stories")
        self.source = open_source(self.folder)
        tokenizer = Tokenizer.from_folder(self.folder)
        self.held_out = [t for text in held_out(options.data) for t in tokenizer.encode(text)]
        self.held_out = self.held_out[: options.tokens]
        from recipes.stories import prepare

        cased = prepare.read_cased(options.data / "tinystories" / "train_2M.txt")
        texts = [text for text in cased if not prepare.is_held_out(text)]
        self.calibration = from_texts(texts, tokenizer, "TinyStories", num_samples=options.samples)
        self.lessons = from_texts(texts, tokenizer, "TinyStories", num_samples=1024, window=128)
        self.steps = options.steps
        self.reference = load("stories", Variant(), WINDOW)

    def row(
        self, part: str, scheme: str, method: str, make: Callable[[], Tensors], bits: float,
        base: Source | None = None,
    ) -> Row:  # fmt: skip
        start = time.perf_counter()
        tensors = list(make())
        seconds = time.perf_counter() - start
        runtime = runtime_of(Overlay(base or self.source, tensors))
        found = measure_drift(self.reference, runtime, self.held_out, WINDOW)
        print(
            f"{scheme} {method}: KL {found.kl:.5f}, perplexity {found.perplexity:.3f}", flush=True
        )
        return Row(part, scheme, method, bits, found, seconds)

    def bits(self, schemes: dict[str, Scheme]) -> float:
        parts = Parts.of(self.source)
        sizes = {m: parts.shape(m) for m in schemes}
        total = sum(bits_per_weight(s, *sizes[m]) * sizes[m][0] * sizes[m][1]
                    for m, s in schemes.items())  # fmt: skip
        return total / num_weights(self.source)

    def uniform(self, scheme: Scheme) -> float:
        return self.bits({m: scheme for m in Parts.of(self.source).modules() if m != "head"})

    def quantize(self, config: QuantizeConfig, text: CalibrationSet | None = None) -> Tensors:
        return quantize_model(self.source, config, text or self.calibration)

    def rounding(self) -> Iterator[Row]:
        scheme = parse_scheme("w4a16-g128")
        for method in ("rtn", "gptq", "awq"):
            config = QuantizeConfig(scheme, method)
            yield self.row("rounding", scheme.name, method, lambda c=config: self.quantize(c),
                           self.uniform(scheme))  # fmt: skip

    def mixed(self) -> Iterator[Row]:
        schemes = [parse_scheme(name) for name in CANDIDATES]
        for name in ("w4a16-g32", "w8a16"):
            config = QuantizeConfig(parse_scheme(name))
            yield self.row("mixed", name, "rtn", lambda c=config: self.quantize(c),
                           self.uniform(config.scheme))  # fmt: skip
        found = measure(self.source, schemes, self.calibration.first(4))
        special = choose(found, BUDGET, schemes, num_weights(self.source))
        config = QuantizeConfig(schemes[0], special=special)
        yield self.row("mixed", f"mixed, {BUDGET}", "rtn", lambda: self.quantize(config),
                       self.bits(special))  # fmt: skip

    def outliers(self) -> Iterator[Row]:
        planted = with_outliers(self.source)
        scheme = parse_scheme("w8a8")
        for method in ("rtn", "smoothquant"):
            config = QuantizeConfig(scheme, method)
            yield self.row(
                "outliers", "w8a8", method,
                lambda c=config: quantize_model(planted, c, self.calibration),
                self.uniform(scheme), planted,
            )  # fmt: skip

    def qat(self) -> Iterator[Row]:
        config = QuantizeConfig(parse_scheme("w4a16-g128"))
        options = qat.QatOptions(steps=self.steps, batch=8)
        yield self.row(
            "qat", "w4a16-g128", f"qat, {self.steps} steps",
            lambda: qat.train(self.source, config, self.lessons, options),
            self.uniform(config.scheme),
        )  # fmt: skip


PARTS = ("rounding", "mixed", "outliers", "qat")
PAGES = {
    "gptq.md": lambda r: r.part == "rounding" and r.method in ("rtn", "gptq"),
    "awq.md": lambda r: r.part == "rounding" and r.method in ("rtn", "awq", "awq+gptq"),
    "smoothquant.md": lambda r: r.part == "outliers",
    "mixed-precision.md": lambda r: r.part == "mixed",
    "qat.md": lambda r: (
        r.part == "qat" or (r.part == "rounding" and r.method == "rtn" and r.scheme == "w4a16-g128")
    ),
}


def table(rows: list[Row]) -> str:
    """Markdown."""
    lines = [
        "| scheme | method | bits a weight | KL from bfloat16 | same likeliest token "
        "| perplexity |",
        "|---|---|---|---|---|---|",
        f"| bfloat16 | | 16 | 0 | 100% | {rows[0].drift.reference_perplexity:.3f} |",
    ]
    lines += [
        f"| {r.scheme} | {r.method} | {r.bits:.2f} | {r.drift.kl:.5f} | {r.drift.agreement:.1%} "
        f"| {r.drift.perplexity:.3f} |"
        for r in rows
    ]
    return "\n".join([*lines, ""])


def write(file: Path, bench: Bench, rows: list[Row]) -> None:
    result = {
        "benchmark": "methods",
        "setup": {
            "model": "stories", "window": WINDOW, "tokens": len(bench.held_out),
            "calibration": {
                "name": bench.calibration.name, "tokens": bench.calibration.num_tokens,
                "sha256": bench.calibration.sha256,
            },
        },
        "results": [asdict(row) for row in rows],
        **environment(detect()),
    }  # fmt: skip
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "text")
    parser.add_argument("--samples", type=int, default=32, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--tokens", type=int, help="of the held-out text; default: all")
    parser.add_argument("--steps", type=int, default=100, help="of QAT")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--pages", type=Path, help="put tables into the pages of this folder")
    options = parser.parse_args()
    bench, rows = Bench(options), list[Row]()
    for part in options.only:
        for row in getattr(bench, part)():
            rows.append(row)
            if options.json:
                write(options.json, bench, rows)
    print(f"\n{table(rows)}")
    for name, wanted in PAGES.items() if options.pages else ():
        chosen = [row for row in rows if wanted(row)]
        if chosen:
            write_into(options.pages / name, table(chosen))


if __name__ == "__main__":
    main()
