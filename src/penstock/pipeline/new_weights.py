"""What an export stores instead of a checkpoint's own tensors: merged, reduced, quantized.

In this order: an adapter is added, the vocabulary is cut, the matrices are quantized. Each step is
a source or a stream of tensors over the one before; nothing holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.checkpoint import Source
from penstock.models.experts import warn_of_names
from penstock.models.exported import sha256
from penstock.models.lora import WEIGHTS, Merged
from penstock.models.sources import open_source, open_tokenizer
from penstock.nn.decoder import stored_in
from penstock.pipeline import qat, sensitivity
from penstock.pipeline.calibration import NUM_SAMPLES, WINDOW, CalibrationSet, calibration_set
from penstock.pipeline.config import METHODS, QuantizeConfig
from penstock.pipeline.method_options import MethodOptions
from penstock.pipeline.parts import Parts
from penstock.pipeline.quantize import LayerReport, quantize_model
from penstock.quant import Codes, Scheme, parse_scheme
from penstock.quant.files import LAYOUTS, Layout, layouts_for, write_checkpoint
from penstock.quant.files.writer import check_layout, whole_groups
from penstock.tokenizer import VocabMap

logger = logging.getLogger("penstock")

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and all of it: 0 where nobody counts."""

MIXTURE = ("w4a16-g128", "w4a16-g32", "w8a16-g128")
"""Schemes that a budget chooses from."""

BUDGET_WINDOWS = 4
"""Of the calibration text, on which each matrix is tried alone."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """What becomes of a model's weights on their way out; nothing unless something is named."""

    quant: str | None = None  # a scheme's name: w4a16-g128, w8a8, fp8, nf4, …
    method: str | None = None  # one of METHODS or qat; None: gptq with a text, else rtn
    options: MethodOptions = field(default_factory=MethodOptions)
    calib: tuple[Path, ...] = ()
    num_samples: int = NUM_SAMPLES
    window: int = WINDOW  # tokens
    layout: str = "auto"  # the first of LAYOUTS that can hold the schemes
    head: str | None = None  # a scheme of the output head; None: it stays as it is
    special: Mapping[str, str | None] = field(default_factory=dict)
    """Schemes of matrices by their names (`layers.3.mlp.down`), which may be patterns (`*.down`);
    None: kept. Of several that match, the last."""
    budget: str | None = None  # 4.5bpw, or a loss: schemes are chosen matrix by matrix
    mixture: tuple[str, ...] = MIXTURE  # what a budget chooses from
    budget_windows: int = BUDGET_WINDOWS
    merge_lora: Path | None = None

    def __post_init__(self) -> None:
        methods = (*METHODS, "qat")
        if self.method is not None and self.method not in methods:
            raise ConfigError(f"--method {self.method} isn't one of {', '.join(methods)}.")
        if not self.is_quantized:
            self._check_unquantized()
            return
        self._check_budget()
        self._check_text()
        if self.head_scheme is not None and self.head_scheme.static:
            raise ConfigError(
                f"--head {self.head}: the head is rounded to nearest, and no text gives it a "
                "scale of activations. Leave -static out of its name."
            )
        self.options.check(self.chosen_method, self.schemes)
        _ = self.stored_layout  # refuses one that can't hold the schemes

    def _check_unquantized(self) -> None:
        names = [f.name for f in fields(self) if getattr(self, f.name) != _default(f)]
        names = [name for name in names if name not in ("options", "merge_lora")]
        for name in (*names, *self.options.given()):
            raise ConfigError(
                f"--{name.replace('_', '-')} has nothing to act on without --quant or --budget."
            )

    def _check_budget(self) -> None:
        if self.budget is None:
            for option, value, usual in (
                ("--mixture", self.mixture, MIXTURE),
                ("--budget-windows", self.budget_windows, BUDGET_WINDOWS),
            ):
                if value != usual:
                    raise ConfigError(f"{option} is of a budget: give --budget.")
            return
        sensitivity.parse_budget(self.budget)
        if not self.calib:
            raise ConfigError(f"--budget {self.budget} is measured on a text: give --calib.")
        for option, given in (("--quant", self.quant), ("--special", ", ".join(self.special))):
            if given:
                raise ConfigError(
                    f"--budget {self.budget} chooses each matrix's scheme, so {option} {given} "
                    "can't take effect. Leave one of them out."
                )
        if not self.mixture or self.budget_windows < 1:
            raise ConfigError(
                f"--budget with {len(self.mixture)} schemes to choose from and "
                f"{self.budget_windows} windows to try them on: one of each is the least."
            )

    def _check_text(self) -> None:
        static = [s.name for s in self.schemes if s.static]
        if not self.calib:
            for option, value, usual in (
                ("--num-samples", self.num_samples, NUM_SAMPLES),
                ("--window", self.window, WINDOW),
            ):
                if value != usual:
                    raise ConfigError(f"{option} is of the calibration text: give --calib.")
            if self.method not in (None, "rtn"):
                raise ConfigError(f"--method {self.method} is fitted to a text: give --calib.")
            if static:
                raise ConfigError(
                    f"{static[0]} has a scale of activations that a text gives: give --calib."
                )
        elif self.method == "rtn" and self.budget is None and not static:
            raise ConfigError(
                f"--method rtn takes each value by itself, so --calib {self.calib[0]} can't take "
                "effect. Leave one of them out."
            )

    @property
    def is_quantized(self) -> bool:
        """Whether matrices become codes."""
        return self.quant is not None or self.budget is not None

    @property
    def is_anything(self) -> bool:
        """Whether the checkpoint's tensors don't stay what they are."""
        return self.is_quantized or self.merge_lora is not None

    @property
    def chosen_method(self) -> str:
        """`method`, or what it is where it isn't named."""
        return self.method or ("gptq" if self.calib else "rtn")

    @property
    def schemes(self) -> list[Scheme]:
        """That the layers' matrices have, or may have."""
        usual = self.mixture if self.quant is None else (self.quant,)
        names = dict.fromkeys((*usual, *self.special.values()))
        return [parse_scheme(name) for name in names if name is not None]

    @property
    def head_scheme(self) -> Scheme | None:
        """That `head` names."""
        return None if self.head is None else parse_scheme(self.head)

    @property
    def stored_layout(self) -> Layout:
        """`layout`, or the one that `auto` means; ConfigError where it can't hold the schemes."""
        if not self.is_quantized:
            return "compressed-tensors"
        schemes = [*self.schemes, *filter(None, [self.head_scheme])]
        layout = _layout_for(schemes) if self.layout == "auto" else self.layout
        check_layout(layout, schemes)
        return cast("Layout", layout)

    def write(
        self, source: Path, folder: Path, work: Path | None, report: Progress
    ) -> dict[str, Any]:
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
            tensors, choices = self._quantized(base, source, work, report)
            chosen |= choices
        else:
            report("merging the adapter", 0, 0)
            tensors = ((name, base.read(name)) for name in base.names())
        warn_of_names(base.config)
        write_checkpoint(folder, base.config, tensors, self.stored_layout)
        return chosen

    def _quantized(
        self, base: Source, folder: Path, work: Path | None, report: Progress
    ) -> tuple[Iterable[tuple[str, Tensor | Codes]], dict[str, Any]]:
        text = None
        if self.calib:
            report("reading the calibration text", 0, 0)
            text = self._text(folder, int(base.config["vocab_size"]))
        config = self._config(base, text, work, report)
        chosen = self._choices(config, text)
        if self.method == "qat":
            assert text is not None
            return qat.train(
                base, config, text, self.options.qat(),
                lambda done, total, loss: report(f"training, loss {loss:.4f}", done, total),
                work=work and work / "training", replace=True,
            ), chosen  # fmt: skip
        report("quantizing", 0, 0)

        resumed = 0

        def tell(layer: LayerReport) -> None:
            nonlocal resumed
            if layer.resumed:  # which takes no time that an estimate could go by
                resumed += 1
                return
            if resumed == layer.layer > 0:
                logger.warning(
                    "%d of %d layers are taken from %s, where an earlier start left them.",
                    resumed, layer.layers, work,
                )  # fmt: skip
            report(_of_layer(layer), layer.layer + 1, layer.layers)

        layers = work and work / "layers"
        tensors = quantize_model(base, config, text, work=layers, replace=True, progress=tell)
        return tensors, chosen

    def _choices(self, config: QuantizeConfig, text: CalibrationSet | None) -> dict[str, Any]:
        """For the manifest."""
        found: dict[str, Any] = {
            "quant": config.scheme.name,
            "method": self.chosen_method,
            "options": self.options.in_effect(self.chosen_method, self.schemes),
            "head": self.head,
            "layout": self.stored_layout,
            "budget": self.budget,
            "special": {m: s and s.name for m, s in sorted(config.special.items())},
            "calibration": _about(text, self.calib),
        }
        if self.budget is not None:
            found |= {"mixture": list(self.mixture), "budget_windows": self.budget_windows}
        return found

    def _text(self, folder: Path, vocab_size: int) -> CalibrationSet:
        """The calibration set, in rows of the model's embedding."""
        reduced = VocabMap.load(folder)
        size = vocab_size if reduced is None else reduced.original_size
        return calibration_set(
            self.calib,
            open_tokenizer(folder, vocab_size=size),
            num_samples=self.num_samples,
            window=self.window,
            reduced=reduced,
        )

    def _config(
        self, base: Source, text: CalibrationSet | None, work: Path | None, report: Progress
    ) -> QuantizeConfig:
        schemes = self.schemes
        scheme, special = schemes[0], self._special(Parts.of(base).modules())
        if self.budget is not None:
            assert text is not None
            measured = sensitivity.measure(
                base, schemes, text.first(self.budget_windows),
                lambda done, total: report("trying each matrix in each scheme", done, total),
                work=work and work / "sensitivity", replace=True,
            )  # fmt: skip
            count = sensitivity.num_weights(base)
            found = sensitivity.choose(measured, self.budget, schemes, count)
            scheme = max(schemes, key=list(found.values()).count)
            special = {m: s for m, s in found.items() if s != scheme}
        return QuantizeConfig(
            scheme,
            "rtn" if self.method == "qat" else self.chosen_method,
            special,
            self.head_scheme,
            whole_groups=whole_groups(self.stored_layout),
            **self.options.for_config(self.chosen_method),
        )

    def _special(self, modules: Sequence[str]) -> dict[str, Scheme | None]:
        found: dict[str, Scheme | None] = {}
        layers = [module for module in modules if module != "head"]
        for pattern, name in self.special.items():
            matching = [module for module in layers if fnmatchcase(stored_in(module), pattern)]
            if not matching:
                raise ConfigError(
                    f"--special {pattern} is none of this model's {len(layers)} matrices, "
                    f"{layers[0]} … {stored_in(layers[-1])}."
                )
            found |= dict.fromkeys(matching, None if name is None else parse_scheme(name))
        return found


def _default(of: Any) -> Any:
    """Of a dataclass's field."""
    return of.default if of.default is not MISSING else of.default_factory()


def _layout_for(schemes: Sequence[Scheme]) -> str:
    """The first of LAYOUTS that can hold matrices in all of `schemes`."""
    able = {scheme.name: layouts_for(scheme) for scheme in schemes}
    for layout in LAYOUTS:
        if all(layout in layouts for layouts in able.values()):
            return layout
    if none := [name for name, layouts in able.items() if not layouts]:
        raise ConfigError(
            f"{', '.join(none)}: no layout of files holds that. Choose another scheme, or round to "
            "it when the model is loaded (quantization=, --quantization)."
        )
    each = "; ".join(f"{name}: {', '.join(layouts)}" for name, layouts in able.items())
    raise ConfigError(f"No layout holds all of the schemes ({each}). Choose those of one layout.")


def _of_layer(layer: LayerReport) -> str:
    errors = layer.errors.values()
    return f"quantizing, output error {max(errors):.2%} at most" if errors else "quantizing"


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
