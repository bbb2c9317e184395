"""What each way to choose quantized values costs in quality, in each format, on the embedded model.

    python benchmarks/methods.py --json benchmarks/results/methods-stories.json
    python benchmarks/methods_tables.py benchmarks/results/methods-stories.json docs

Calibrated on TinyStories that the model was trained on, measured on those that its recipe holds
out. Rows are written as they are measured, and --resume goes on with a run that was interrupted.
What a method can't take is a row that says why. --only takes a part of the rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from drift import ROOT, held_out, leading
from penstock.bench.drift import measure_drift
from penstock.bench.reader import LocalReader, open_reader
from penstock.bench.texts import Text
from penstock.bench.variant import Variant
from penstock.cache import PagedLayout
from penstock.errors import ConfigError
from penstock.models.checkpoint import Source
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel
from penstock.models.registry import read_spec
from penstock.models.sources import open_source
from penstock.models.weights import load_weights, stored_formats
from penstock.nn import Decoder
from penstock.pipeline import qat
from penstock.pipeline.calibration import from_texts
from penstock.pipeline.config import METHODS, QuantizeConfig
from penstock.pipeline.overlay import Overlay
from penstock.pipeline.parts import Parts, bits_per_weight
from penstock.pipeline.quantize import quantize_model
from penstock.pipeline.sensitivity import choose, measure, num_weights
from penstock.quant import Codes, Scheme, parse_scheme
from penstock.quant.methods.calibrate import CALIBRATORS
from penstock.runtime import Runner, Runtime
from penstock.tokenizer import Tokenizer
from remembered import Remembered
from rows import Row, Rows

WINDOW, BLOCK = 512, 32
LESSON = 128
"""Tokens of a window that is trained on."""

OUTLIERS, FACTOR = 6, 64.0

FORMATS = (
    *("w4a16-g128", "w4a16-g32", "w4a8-g32", "w8a8", "w8a16", "fp8", "nf4-g64", "mxfp4", "nvfp4"),
    *("w4a16-channel", "w4a16-tensor", "w8a16-g128", "w8a16-tensor", "w8a8-static"),
    *("w4a16-g128-asym", "w4a16-channel-asym", "w4a16-tensor-asym", "w8a8-asym"),
    *("w8a16-g128-asym", "w8a16-asym", "w8a16-tensor-asym", "fp8-tensor", "fp8-block", "fp8-e5m2"),
    *("fp8-w8a8", "fp8-w8a8-block", "fp8-w8a8-tensor-static"),
)
TRAINED = ("w4a16-g128", "nf4-g64")
"""Integers and levels of 4 bits: training takes ten times as long as everything else."""

CANDIDATES = ("w4a16-g128", "w4a16-g64", "w4a16-g32", "w8a16")
BUDGET = "4.5bpw"

Tensors = Iterable[tuple[str, Tensor | Codes]]


@dataclass(frozen=True, slots=True)
class Case:
    """What names a row."""

    part: str
    scheme: str
    method: str
    calibrator: str = ""  # of static activations


def grid() -> Iterator[Case]:
    """Every method in every format, training last; static activations by their largest value."""
    for methods in (METHODS, ("qat",)):
        for scheme in FORMATS:
            for method in methods:
                yield Case("grid", scheme, method, "minmax" if scheme.endswith("-static") else "")


def calibrators() -> Iterator[Case]:
    """Static activations by every calibrator, beside activations of a token's own scale."""
    for method in ("rtn", "smoothquant", "smoothquant+gptq"):
        for calibrator in CALIBRATORS:
            yield Case("calibrators", "w8a8-static", method, calibrator)


def outliers() -> Iterator[Case]:
    """Eight bits on a model whose activations have channels that are far too large."""
    for method in ("rtn", "gptq", "smoothquant", "smoothquant+gptq"):
        yield Case("outliers", "w8a8", method)
    for calibrator in CALIBRATORS:
        for method in ("rtn", "smoothquant"):
            yield Case("outliers", "w8a8-static", method, calibrator)


def mixed() -> Iterator[Case]:
    """A mixture within a budget, beside the candidates it is made of."""
    for scheme in CANDIDATES:
        yield Case("mixed", scheme, "rtn")
    yield Case("mixed", f"mixed, {BUDGET}", "rtn")


PARTS: dict[str, Callable[[], Iterator[Case]]] = {
    "outliers": outliers, "calibrators": calibrators, "grid": grid, "mixed": mixed,
}  # fmt: skip


def why_not(case: Case) -> str | None:
    """Why a case isn't measured, where that is known beforehand."""
    if case.part != "grid":
        return None
    scheme = parse_scheme(case.scheme)
    if "smoothquant" in case.method and scheme.activations == "float":
        return "activations stay in bfloat16: there is nothing to smooth"
    trainable = scheme.rows == 1 and scheme.kind != "nvfp4"
    trainable = trainable and scheme.activations != "int8_static"
    if case.method == "qat" and trainable and case.scheme not in TRAINED:
        return f"trained are only {', '.join(TRAINED)}: it takes long"
    return None


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
    """The model, its texts, and how a case is quantized and measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        folder = resolve("stories")
        self.source = open_source(folder)
        tokenizer = Tokenizer.from_folder(folder)
        encoded = [tokenizer.encode(text.strip()) for text in held_out(options.data)]
        self.held_out = Text("held-out TinyStories", leading(encoded, options.tokens))
        texts = held_out(options.data, held=False)
        self.calibration = from_texts(texts, tokenizer, "TinyStories", num_samples=options.samples)
        self.lessons = from_texts(texts, tokenizer, "TinyStories", num_samples=1024, window=LESSON)
        self.training = qat.QatOptions(steps=options.steps, batch=8)
        self.setup: Row = {
            "model": "stories", "about": "`stories`", "window": WINDOW, "tokens": options.tokens,
            "calibration": {
                "name": self.calibration.name, "tokens": self.calibration.num_tokens,
                "sha256": self.calibration.sha256,
            },
            "qat": asdict(self.training),
        }  # fmt: skip

    @cached_property
    def planted(self) -> Overlay:
        """The model with outliers, which computes the same in bfloat16."""
        return with_outliers(self.source)

    @cached_property
    def mixture(self) -> dict[str, Scheme]:
        """Each matrix's scheme within the budget."""
        schemes = [parse_scheme(name) for name in CANDIDATES]
        found = measure(self.source, schemes, self.calibration.first(4))
        return choose(found, BUDGET, schemes, num_weights(self.source))

    def quantize(self, case: Case) -> tuple[Tensors, float]:
        """A case's tensors, and bits a weight of the layers' matrices."""
        if case.scheme.startswith("mixed"):
            config = QuantizeConfig(parse_scheme(CANDIDATES[0]), special=self.mixture)
            return quantize_model(self.source, config), self.bits(self.mixture)
        scheme = parse_scheme(case.scheme)
        bits = self.bits({m: scheme for m in Parts.of(self.source).modules() if m != "head"})
        if case.method == "qat":
            config = QuantizeConfig(scheme)
            return qat.train(self.source, config, self.lessons, self.training), bits
        config = QuantizeConfig(scheme, case.method)
        if case.calibrator:
            config = QuantizeConfig(scheme, case.method, calibrator=case.calibrator)
        source = self.planted if case.part == "outliers" else self.source
        return quantize_model(source, config, self.calibration), bits

    def bits(self, schemes: dict[str, Scheme]) -> float:
        """A weight's, on average over matrices in these schemes."""
        parts = Parts.of(self.source)
        sizes = {m: parts.shape(m) for m in schemes}
        total = sum(bits_per_weight(s, *sizes[m]) * sizes[m][0] * sizes[m][1]
                    for m, s in schemes.items())  # fmt: skip
        return total / num_weights(self.source)

    def row(self, case: Case, reference: Remembered) -> Row:
        """A case's figures, or why there are none."""
        reason = why_not(case)
        if reason is not None:
            return {"not": reason}
        start = time.perf_counter()
        try:
            lazy, bits = self.quantize(case)
        except ConfigError as error:
            return {"not": str(error)}
        tensors = list(lazy)
        seconds = time.perf_counter() - start
        base = self.planted if case.part == "outliers" else self.source
        reader = LocalReader(runtime_of(Overlay(base, tensors)))
        found = measure_drift(reference, reader, [self.held_out], WINDOW, WINDOW // 2)
        return {"bits": bits, "seconds": round(seconds, 2), **found.as_dict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "text")
    parser.add_argument("--samples", type=int, default=8, help=f"windows of {WINDOW} tokens")
    parser.add_argument("--tokens", type=int, default=4096, help="of the held-out text")
    parser.add_argument("--steps", type=int, default=100, help="of QAT")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--json", type=Path, help="write the figures here, row by row")
    parser.add_argument("--resume", action="store_true", help="go on with the rows in --json")
    options = parser.parse_args()
    bench = Bench(options)
    rows = Rows("methods", bench.setup, options.json, options.resume)
    with open_reader(Variant("stories", dtype="bfloat16"), WINDOW) as reader:
        reference = Remembered(reader)
        for case in (case for part in options.only for case in PARTS[part]()):
            if rows.find(**asdict(case)) is not None:
                continue
            row = bench.row(case, reference)
            rows.add({**asdict(case), **row})
            said = row.get("not") or f"KL {row['kl']:.5f}, perplexity {row['perplexity']:.3f}"
            print(case.part, case.scheme, case.method, case.calibrator, said, flush=True)


if __name__ == "__main__":
    main()
