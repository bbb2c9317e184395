"""What a quantization method may be told, and which method has a use for it.

The names are those of `penstock export`'s options, which are AutoGPTQ's, AutoAWQ's and the papers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import ConfigError
from penstock.pipeline.config import QuantizeConfig
from penstock.pipeline.qat import QatOptions
from penstock.quant import Scheme
from penstock.quant.methods.awq import AwqOptions
from penstock.quant.methods.calibrate import Calibrator
from penstock.quant.methods.clip import can_clip
from penstock.quant.methods.gptq import GptqOptions

_GPTQ = {"act_order": "act_order", "block_size": "block", "damp_percent": "damping"}
_AWQ = {"n_grid": "grid", "search_rows": "rows"}
_QAT = {
    "steps": "steps",
    "batch_size": "batch",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "distillation": "distillation",
    "seed": "seed",
}
_RUN = ("alpha", "calibrator", "percentile", "from_quantized")
"""What a whole run is told: fields of `QuantizeConfig` under the same names."""

_WHOSE = {
    **dict.fromkeys(_GPTQ, "GPTQ"),
    **dict.fromkeys(_AWQ, "AWQ"),
    **dict.fromkeys(_QAT, "QAT"),
    "clip": "GPTQ and AWQ, where each row or group has a free scale",
    "alpha": "SmoothQuant",
    "calibrator": "static activations (w8a8-static, fp8-w8a8-static)",
    "percentile": "static activations with --calibrator percentile",
    "from_quantized": "methods that measure inputs layer by layer on a text",
}


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """None is the method's own default."""

    act_order: bool | None = None  # GPTQ: columns of the largest inputs first
    block_size: int | None = None  # GPTQ: columns that are finished before the rest is updated
    damp_percent: float | None = None  # GPTQ: share of the Hessian's mean diagonal; 0.01 is 1%
    clip: bool | None = None  # GPTQ, AWQ: search how far a group's ends are drawn in
    n_grid: int | None = None  # AWQ: exponents that are tried
    search_rows: int | None = None  # AWQ: rows of each matrix that the search looks at
    alpha: float | None = None  # SmoothQuant: share that moves to the weights
    calibrator: Calibrator | None = None  # of static activations
    percentile: float | None = None  # of calibrator="percentile"
    from_quantized: bool | None = None  # inputs are those that quantized layers before give
    steps: int | None = None  # QAT, as those that follow
    batch_size: int | None = None  # windows a step
    learning_rate: float | None = None
    weight_decay: float | None = None
    distillation: float | None = None  # share of the float model's distribution in the loss
    seed: int | None = None  # of the order of windows

    def check(self, method: str, schemes: Sequence[Scheme]) -> None:
        """Raises ConfigError for what `method` in `schemes` has no use for, or can't be."""
        names = self._of(method, schemes)
        for name, value in self.given().items():
            if name not in names:
                raise ConfigError(
                    f"{_flag(name, value)} is for {_WHOSE[name]}: it can't take effect with method "
                    f"{method} in {', '.join(scheme.name for scheme in schemes)}. Leave it out."
                )
        self.qat()
        QuantizeConfig(schemes[0], **self.for_config(method))

    def given(self) -> dict[str, Any]:
        """Those that aren't None."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def for_config(self, method: str) -> dict[str, Any]:
        """The fields of `QuantizeConfig` that these decide."""
        gptq, awq = self._chosen(_GPTQ), self._chosen(_AWQ)
        if self.clip is not None:
            (gptq if method.endswith("gptq") else awq)["clip"] = self.clip
        given = self.given()
        run = {name: given[name] for name in _RUN if name in given}
        return {"gptq": GptqOptions(**gptq), "awq": AwqOptions(**awq), **run}

    def qat(self) -> QatOptions:
        """How QAT trains."""
        return QatOptions(**self._chosen(_QAT))

    def in_effect(self, method: str, schemes: Sequence[Scheme]) -> dict[str, Any]:
        """Every value that `method` works with, defaults included: for a manifest."""
        config, qat = QuantizeConfig(schemes[0], **self.for_config(method)), self.qat()
        clip = config.gptq.clip if method.endswith("gptq") else config.awq.clip
        values: dict[str, Any] = {
            **{name: getattr(config.gptq, field) for name, field in _GPTQ.items()},
            **{name: getattr(config.awq, field) for name, field in _AWQ.items()},
            **{name: getattr(qat, field) for name, field in _QAT.items()},
            **{name: getattr(config, name) for name in _RUN},
            "clip": clip,
        }
        return {name: values[name] for name in self._of(method, schemes)}

    def _chosen(self, names: dict[str, str]) -> dict[str, Any]:
        given = self.given()
        return {field: given[name] for name, field in names.items() if name in given}

    def _of(self, method: str, schemes: Sequence[Scheme]) -> list[str]:
        """The options that `method` in `schemes` has a use for."""
        parts = method.split("+")
        static = any(scheme.static for scheme in schemes)
        found = [*(_GPTQ if "gptq" in parts else ()), *(_AWQ if "awq" in parts else ())]
        if {"gptq", "awq"} & set(parts) and any(map(can_clip, schemes)):
            found.append("clip")
        if "smoothquant" in parts:
            found.append("alpha")
        if static:
            found.append("calibrator")
        if static and self.calibrator == "percentile":
            found.append("percentile")
        if method == "qat":
            return [*found, *_QAT]
        return [*found, "from_quantized"] if static or method != "rtn" else found


def _flag(name: str, value: Any) -> str:
    """`--act-order`, `--no-act-order`, `--alpha 0.7`."""
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words} {value}"
