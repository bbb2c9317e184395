"""What an export stores instead of a checkpoint's own tensors: merged, reduced, quantized.

In this order: an adapter is added, the vocabulary is cut, the matrices are quantized. Each step is
a source or a stream of tensors over the one before; nothing holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.exported import sha256
from penstock.models.lora import WEIGHTS, Merged
from penstock.models.sources import open_source, open_tokenizer
from penstock.models.weights import Source
from penstock.pipeline import qat, sensitivity
from penstock.pipeline.calibration import NUM_SAMPLES, WINDOW, CalibrationSet, calibration_set
from penstock.pipeline.config import METHODS, QuantizeConfig
from penstock.pipeline.quantize import LayerReport, quantize_model
from penstock.quant import Codes, Scheme, parse_scheme
from penstock.quant.files import Layout, write_checkpoint
from penstock.quant.files.writer import check_layout
from penstock.tokenizer import VocabMap

logger = logging.getLogger("penstock")

Say = Callable[[str], None]
"""Called with what is being done."""

MIXTURE = ("w4a16-g128", "w4a16-g32", "w8a16-g128")
"""Schemes that a budget chooses from, unless --quant names one of int8 activations."""

SENSITIVITY_WINDOWS = 4
"""Of the calibration text, on which each matrix is tried alone."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """What becomes of a model's weights on their way out; nothing unless something is named."""

    quant: str | None = None  # a scheme's name: w4a16-g128, w8a8, fp8, nf4, …
    method: str | None = None  # one of METHODS or qat; None: gptq with a text, else rtn
    calib: tuple[Path, ...] = ()
    num_samples: int = NUM_SAMPLES
    window: int = WINDOW  # tokens
    layout: Layout = "compressed-tensors"
    head: str | None = None  # a scheme of the output head; None: it stays as it is
    budget: str | None = None  # 4.5bpw, or a loss: schemes are chosen matrix by matrix
    merge_lora: Path | None = None

    def __post_init__(self) -> None:
        methods = (*METHODS, "qat")
        if self.method is not None and self.method not in methods:
            raise ConfigError(f"--method {self.method} isn't one of {', '.join(methods)}.")
        if self.quant is None and self.budget is None:
            self._nothing_without("--quant or --budget")
        if self.budget is not None:
            sensitivity.parse_budget(self.budget)
            if not self.calib:
                raise ConfigError(f"--budget {self.budget} is measured on a text: give --calib.")
            if self.quant is not None:
                raise ConfigError(
                    f"--budget {self.budget} chooses each matrix's scheme, so --quant {self.quant} "
                    "can't take effect. Leave one of them out."
                )
        for option, value, usual in (
            ("--num-samples", self.num_samples, NUM_SAMPLES),
            ("--window", self.window, WINDOW),
        ):
            if value != usual and not self.calib:
                raise ConfigError(f"{option} is of the calibration text: give --calib.")
        if self.method == "rtn" and self.calib and not self._measures:
            raise ConfigError(
                f"--method rtn takes each value by itself, so --calib {self.calib[0]} can't take "
                "effect. Leave one of them out."
            )
        if self.method not in (None, "rtn") and not self.calib:
            raise ConfigError(f"--method {self.method} is fitted to a text: give --calib.")
        if self.is_quantized:
            schemes = [self.scheme] if self.scheme else list(map(parse_scheme, MIXTURE))
            check_layout(self.layout, [*schemes, *filter(None, [self.head_scheme])])
            if self.head_scheme is not None and self.head_scheme.activations == "int8_static":
                raise ConfigError(
                    f"--head {self.head}: the head is rounded to nearest, and no text gives it a "
                    "scale of activations. Leave -static out of its name."
                )

    def _nothing_without(self, names: str) -> None:
        default = NewWeights.__dataclass_fields__
        for name in ("method", "calib", "num_samples", "window", "layout", "head"):
            if getattr(self, name) != default[name].default:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} has nothing to act on without {names}.")

    @property
    def _measures(self) -> bool:
        scheme = self.scheme
        return self.budget is not None or scheme is None or scheme.activations == "int8_static"

    @property
    def is_quantized(self) -> bool:
        """Whether matrices become codes."""
        return self.quant is not None or self.budget is not None

    @property
    def is_anything(self) -> bool:
        """Whether the checkpoint's tensors don't stay what they are."""
        return self.is_quantized or self.merge_lora is not None

    @property
    def scheme(self) -> Scheme | None:
        """That `quant` names."""
        return None if self.quant is None else parse_scheme(self.quant)

    @property
    def head_scheme(self) -> Scheme | None:
        """That `head` names."""
        return None if self.head is None else parse_scheme(self.head)

    def write(self, source: Path, folder: Path, work: Path | None, say: Say) -> dict[str, Any]:
        """Store the tensors of the model in `source` and its config.json in the empty `folder`.

        work: where what is done is kept until the whole is. Returns the choices, for the
        manifest.
        """
        base: Source = open_source(source)
        chosen: dict[str, Any] = {}
        if self.merge_lora is not None:
            base = Merged(base, self.merge_lora)
            chosen["merge_lora"] = _named(self.merge_lora, self.merge_lora / WEIGHTS)
        tensors: Iterable[tuple[str, Tensor | Codes]]
        if self.is_quantized:
            tensors, choices = self._quantized(base, source, work, say)
            chosen |= choices
        else:
            say("merging the adapter")
            tensors = ((name, base.read(name)) for name in base.names())
        write_checkpoint(folder, base.config, tensors, self.layout)
        return chosen

    def _quantized(
        self, base: Source, folder: Path, work: Path | None, say: Say
    ) -> tuple[Iterable[tuple[str, Tensor | Codes]], dict[str, Any]]:
        text = None
        if self.calib:
            say("reading the calibration text")
            text = self._text(folder, int(base.config["vocab_size"]))
        config = self._config(base, text, work, say)

        def tell(report: LayerReport) -> None:
            say(_of_layer(report))

        chosen = {
            "quant": config.scheme.name,
            "method": self.method or config.method,
            "head": self.head,
            "layout": self.layout,
            "budget": self.budget,
            "special": {m: s and s.name for m, s in sorted(config.special.items())},
            "calibration": _about(text, self.calib),
        }
        if self.method == "qat":
            assert text is not None
            return qat.train(
                base, config, text,
                report=lambda done, all_, loss: say(f"training: {done} of {all_}, loss {loss:.4f}"),
                work=work and work / "training", replace=True,
            ), chosen  # fmt: skip
        layers = work and work / "layers"
        tensors = quantize_model(base, config, text, work=layers, replace=True, progress=tell)
        return tensors, chosen

    def _text(self, folder: Path, vocab_size: int) -> CalibrationSet:
        """The calibration set, in rows of the model's embedding."""
        reduced = VocabMap.load(folder)
        size = vocab_size if reduced is None else reduced.original_size
        found = calibration_set(
            self.calib,
            open_tokenizer(folder, vocab_size=size),
            num_samples=self.num_samples,
            window=self.window,
        )
        if reduced is None:
            return found
        rows = [reduced.new[reduced.write(window)].tolist() for window in found.windows]
        return CalibrationSet(found.name, tuple(tuple(window) for window in rows))

    def _config(
        self, base: Source, text: CalibrationSet | None, work: Path | None, say: Say
    ) -> QuantizeConfig:
        scheme, special = self.scheme, dict[str, Scheme | None]()
        if self.budget is not None:
            assert text is not None
            schemes = [parse_scheme(name) for name in MIXTURE]
            measured = sensitivity.measure(
                base, schemes, text.first(SENSITIVITY_WINDOWS),
                lambda done, total: say(f"trying matrix {done} of {total}"),
                work=work and work / "sensitivity", replace=True,
            )  # fmt: skip
            count = sensitivity.num_weights(base)
            found = sensitivity.choose(measured, self.budget, schemes, count)
            scheme = max(schemes, key=list(found.values()).count)
            special = {m: s for m, s in found.items() if s != scheme}
        assert scheme is not None
        method = self.method if self.method not in (None, "qat") else None
        if method is None:
            method = "gptq" if text is not None and self.method is None else "rtn"
        whole = self.layout in ("awq", "gptq")  # which have no place for a shorter group
        return QuantizeConfig(scheme, method, special, self.head_scheme, whole_groups=whole)


def _of_layer(report: LayerReport) -> str:
    done = f"layer {report.layer + 1} of {report.layers}"
    if report.resumed:
        return f"{done}: done before"
    errors = report.errors.values()
    return f"{done}: output error {max(errors):.2%} at most" if errors else done


def _named(folder: Path, file: Path) -> Mapping[str, Any]:
    return {"name": folder.name, "sha256": sha256(file)}


def _about(text: CalibrationSet | None, files: tuple[Path, ...]) -> dict[str, Any] | None:
    """The calibration set, by name and hash."""
    if text is None:
        return None
    return {
        "name": text.name,
        "sha256": text.sha256,
        "windows": len(text.windows),
        "tokens": text.num_tokens,
        "files": [dict(_named(file, file)) for file in files],
    }
