"""What each matrix loses in each scheme, measured on text, and a mixture within a budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.checkpoint import Source
from penstock.models.sources import open_source
from penstock.nn.linear import Linear
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.parts import Parts, bits_per_weight
from penstock.pipeline.probe import Probe
from penstock.pipeline.store import Store, source_digest
from penstock.quant import Scheme
from penstock.quant.methods import rtn
from penstock.quant.methods.sensitivity import Choice, within_bits, within_loss

Measured = dict[str, list[Choice]]


def parse_budget(text: str) -> tuple[Literal["bits", "loss"], float]:
    """`4.5bpw`: bits a weight, on average over the layers' matrices; `0.01`: summed loss."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)(bpw)?", text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(
            f"budget={text!r} is neither bits a weight (4.5bpw) nor a loss above 0 (0.01)."
        )
    return ("bits" if match[2] else "loss"), float(match[1])


def measure(
    source: Path | Source,
    schemes: Sequence[Scheme],
    calibration: CalibrationSet,
    progress: Callable[[int, int], None] | None = None,
    *,
    work: Path | None = None,
    replace: bool = False,
) -> Measured:
    """Each matrix of the layers in each scheme, rounded to nearest, alone in a float model.

    The loss is the mean KL(p_float ‖ p) of the next token over the calibration text, in nats.
    progress: called with (matrices done, matrices in all). work, replace: as of `quantize_model`;
    the losses of each matrix are kept.
    Cost: half a pass over the text for each matrix and scheme; the model in float32, its logits,
    and the residual stream before each layer lie in memory. A few windows are enough.
    """
    parts = Parts.of(open_source(source) if isinstance(source, Path) else source)
    spec = parts.spec.decoder
    parts.check_dense("a budget")
    calibration.check(spec.vocab_size, spec.max_position)
    if not schemes:
        raise ConfigError("There is no scheme to measure.")
    store = None
    if work is not None:
        key = {
            "source": source_digest(parts.source),
            "schemes": [scheme.name for scheme in schemes],
            "calibration": calibration.key(),
        }
        store = Store(work, key, replace=replace)
    modules = [module for module in parts.modules() if module != "head"]
    probe: _Trials | None = None
    found: Measured = {}
    for module in modules:
        kept = None if store is None else _kept(store, module)
        losses = kept
        if losses is None:
            probe = probe or _Trials(parts, calibration)
            losses = probe.losses(module, schemes)
            if store is not None:
                store.save(module, {"losses": torch.tensor(losses, dtype=torch.float64)})
        found[module] = [
            Choice(scheme.name, _bits(parts, module, scheme), loss)
            for scheme, loss in zip(schemes, losses, strict=True)
        ]
        if progress is not None and kept is None:  # the others take no time to estimate by
            progress(len(found), len(modules))
    return found


def _kept(store: Store, module: str) -> list[float] | None:
    if not store.has(module):
        return None
    losses = store.load(module)["losses"]
    assert isinstance(losses, Tensor)
    return [float(loss) for loss in losses]


class _Trials:
    """A float model on a text, in which one matrix at a time is another."""

    def __init__(self, parts: Parts, calibration: CalibrationSet) -> None:
        self._parts, self._probe = parts, Probe(parts, calibration)
        self._before: list[list[Tensor]] = [[] for _ in self._probe.steps]  # each layer's [T, D]

        def keep(step: int, layer: int, residual: Tensor) -> None:
            self._before[step].append(residual.clone())

        self._probe.remember(keep)

    def losses(self, module: str, schemes: Sequence[Scheme]) -> list[float]:
        """Mean KL with the matrix in `module` rounded to each of `schemes`."""
        pieces = self._parts.split(f"{module}.weight", self._parts.matrix(module)).values()
        return [
            self.loss(module, torch.cat([_rounded(piece, scheme) for piece in pieces]))
            for scheme in schemes
        ]

    def loss(self, module: str, weight: Tensor) -> float:
        """Mean KL with `weight` [N, K] in `module`."""
        first, probe = int(module.split(".")[1]), self._probe
        linear = probe.decoder.get_submodule(module)
        assert isinstance(linear, Linear)
        own = dict(linear.packed)
        linear.load("weight", weight)
        rest = range(first, probe.num_layers)
        found = probe.divergence(
            probe.run(number, rest, before[first]) for number, before in enumerate(self._before)
        )
        linear.hold(own)
        return found


def _rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    static = 1.0 if scheme.static else None
    return rtn.quantize(weight, scheme, static).dequantize()


def _bits(parts: Parts, module: str, scheme: Scheme) -> float:
    """What a matrix takes in a scheme, all parts of it together."""
    shapes = (parts.source.shape(name) for name in parts.names[f"{module}.weight"])
    return sum(bits_per_weight(scheme, n, k) * n * k for n, k in shapes)


def choose(
    measured: Measured, budget: str, schemes: Sequence[Scheme], weights: int
) -> dict[str, Scheme]:
    """The scheme of each matrix within `budget` (`parse_budget`): `QuantizeConfig.special`.

    weights: how many the measured matrices have together (`num_weights`).
    """
    kind, amount = parse_budget(budget)
    names = (
        within_bits(measured, amount * weights)
        if kind == "bits"
        else (within_loss(measured, amount))
    )
    by_name = {scheme.name: scheme for scheme in schemes}
    return {module: by_name[name] for module, name in names.items()}


def num_weights(source: Path | Source) -> int:
    """Of the layers' matrices together."""
    parts = Parts.of(open_source(source) if isinstance(source, Path) else source)
    return sum(math.prod(parts.shape(m)) for m in parts.modules() if m != "head")
