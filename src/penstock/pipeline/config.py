"""What a quantization run is asked to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from penstock.errors import ConfigError
from penstock.quant import Scheme
from penstock.quant.methods.awq import AwqOptions
from penstock.quant.methods.calibrate import Calibrator, Rounded, check_calibrator
from penstock.quant.methods.gptq import GptqOptions
from penstock.quant.names import head_scheme
from penstock.quant.scheme import Kind

METHODS = ("rtn", "gptq", "awq", "smoothquant", "awq+gptq", "smoothquant+gptq")
"""How values are chosen: to nearest, by GPTQ; before it, columns may be scaled."""


def rounded_to(scheme: Scheme) -> Rounded:
    """What a scheme's activations become where they share a calibrated scale."""
    return "fp8" if scheme.activations == "fp8_static" else "int8"


@dataclass(frozen=True, slots=True)
class QuantizeConfig:
    """Every choice of a run; equal choices give equal bytes."""

    scheme: Scheme
    """Of the layers' matrices."""
    method: str = "rtn"
    special: Mapping[str, Scheme | None] = field(default_factory=dict)
    """Of matrices that differ, by their module's name (`layers.3.mlp.down`); None: kept."""
    head: Scheme | Literal["auto"] | None = "auto"
    """Of the output head, and the embedding tied to it. auto: 8 bits; None: kept as it is."""
    from_quantized: bool = True
    """Each layer is fitted to what the quantized layers before it give, not the float ones."""
    gptq: GptqOptions = field(default_factory=GptqOptions)
    awq: AwqOptions = field(default_factory=AwqOptions)
    alpha: float = 0.5
    """SmoothQuant's share that moves to the weights."""
    calibrator: Calibrator = "minmax"
    """Of static activations."""
    percentile: float = 99.99
    """Of `calibrator="percentile"`."""
    whole_groups: tuple[Kind, ...] = ()
    """Of these kinds a matrix is refused whose K isn't a multiple of its group: the layout of its
    file can't hold it."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method={self.method!r} isn't one of {', '.join(METHODS)}.")
        head = self.head if isinstance(self.head, Scheme) else None
        for scheme in (self.scheme, head, *self.special.values()):
            if scheme is not None and scheme.rotated:
                raise ConfigError(
                    f"No layout of files has matrices in {scheme.name}, whose rows are rotated: "
                    f"export {scheme.name.removesuffix('-rotated')}, or build an engine, or load "
                    f"the checkpoint with quantization={scheme.name!r}."
                )
            if scheme is not None:
                check_calibrator(self.calibrator, rounded_to(scheme))
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} doesn't lie from 0 to 1.")
        if not 0 < self.percentile <= 100:
            raise ConfigError(f"percentile={self.percentile} isn't above 0 and at most 100.")

    @property
    def scaling(self) -> str:
        """`awq`, `smoothquant`, or nothing."""
        first = self.method.split("+")[0]
        return first if first in ("awq", "smoothquant") else ""

    @property
    def rounding(self) -> Literal["nearest", "clip", "gptq"]:
        """How values are chosen once columns are scaled."""
        if self.method.endswith("gptq"):
            return "gptq"
        return "clip" if self.scaling == "awq" and self.awq.clip else "nearest"

    def scheme_of(self, module: str) -> Scheme | None:
        """Of the matrix in `module`; None: it is kept as it is."""
        if module in self.special:
            return self.special[module]
        if module != "head":
            return self.scheme
        return head_scheme(self.scheme) if self.head == "auto" else self.head

    def needs_text(self, modules: Mapping[str, Scheme | None]) -> bool:
        """Whether anything is measured on a calibration set."""
        schemes = [scheme for scheme in modules.values() if scheme is not None]
        static = any(scheme.static for scheme in schemes)
        return bool(schemes) and (self.method != "rtn" or static)

    def key(self) -> dict[str, Any]:
        """All choices as JSON: what a half-finished run must have been started with."""
        found = asdict(self)
        found["scheme"] = self.scheme.name
        found["special"] = {m: s and s.name for m, s in sorted(self.special.items())}
        found["head"] = self.head.name if isinstance(self.head, Scheme) else self.head
        return found
