"""What each matrix loses in each scheme, measured on text, and a mixture within a budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from penstock.cache import PagedLayout
from penstock.errors import ConfigError
from penstock.models.sources import open_source
from penstock.models.weights import Source, load_weights
from penstock.nn import Decoder
from penstock.nn.linear import Linear
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.parts import Parts, bits_per_weight
from penstock.pipeline.store import Store, source_digest
from penstock.pipeline.stream import BLOCK, steps
from penstock.quant import Dense, Scheme, WeightFormats
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
    probe: _Probe | None = None
    found: Measured = {}
    for module in modules:
        kept = None if store is None else _kept(store, module)
        losses = kept
        if losses is None:
            probe = probe or _Probe(parts, calibration)
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


class _Probe:
    """A float model on a text, in which one matrix at a time is another."""

    def __init__(self, parts: Parts, calibration: CalibrationSet) -> None:
        self._parts, spec = parts, parts.spec.decoder
        plain = Dense(torch.float32)
        self._decoder = Decoder(spec, WeightFormats(plain, plain), torch.float32)
        load_weights(self._decoder, parts.spec, parts.source)
        self._steps = list(steps(calibration))
        heads = tuple((x.attention.num_kv_heads, x.attention.head_dim) for x in spec.layers)
        layout = PagedLayout(heads, torch.float32, BLOCK)
        self._kv = layout.allocate(max(blocks for _, blocks in self._steps))
        self._before: list[list[Tensor]] = []  # of each step, before each layer [T, D]
        self._reference: list[Tensor] = []  # of each step, log-probabilities [T, V]
        with torch.inference_mode():
            for step, _ in self._steps:
                residual: Tensor = self._decoder.embed(step.tokens)
                if self._decoder.positions is not None:
                    residual = residual + self._decoder.positions(step.positions)
                self._before.append([])
                for layer, cache in zip(self._decoder.layers, self._kv, strict=True):
                    self._before[-1].append(residual.clone())
                    layer(residual, step, cache)
                self._reference.append(self._logits(residual).log_softmax(-1))

    def losses(self, module: str, schemes: Sequence[Scheme]) -> list[float]:
        """Mean KL with the matrix in `module` rounded to each of `schemes`."""
        pieces = self._parts.split(f"{module}.weight", self._parts.matrix(module)).values()
        return [
            self.loss(module, torch.cat([_rounded(piece, scheme) for piece in pieces]))
            for scheme in schemes
        ]

    def _logits(self, residual: Tensor) -> Tensor:
        logits: Tensor = self._decoder.head(residual, self._decoder.norm)
        cap = self._decoder.spec.final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.inference_mode()
    def loss(self, module: str, weight: Tensor) -> float:
        """Mean KL with `weight` [N, K] in `module`."""
        first = int(module.split(".")[1])
        linear = self._decoder.get_submodule(module)
        assert isinstance(linear, Linear)
        own = dict(linear.packed)
        linear.load("weight", weight)
        total, count = 0.0, 0
        for (step, _), before, want in zip(self._steps, self._before, self._reference, strict=True):
            residual = before[first].clone()
            for i in range(first, len(self._kv)):
                self._decoder.layers[i](residual, step, self._kv[i])
            found = self._logits(residual).log_softmax(-1)
            total += float((want.exp() * (want - found)).sum(dtype=torch.float64))
            count += len(want)
        linear.hold(own)
        return total / count


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
