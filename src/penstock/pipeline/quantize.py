"""From a float checkpoint to a quantized one, layer by layer, in bounded memory.

A layer's float weights are read, its inputs measured on the calibration text, its columns scaled,
its values chosen; then the text is carried through what came of it, and it is forgotten. Weights
come out under the checkpoint's own names.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, listed
from penstock.models.checkpoint import Source
from penstock.models.registry import check_blind
from penstock.models.sources import open_source
from penstock.nn.decoder import layer_matrices
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.config import QuantizeConfig, rounded_to
from penstock.pipeline.fold import fold, foldable, tie
from penstock.pipeline.parts import Parts, Tensors, joined
from penstock.pipeline.store import Result, Store, source_digest
from penstock.pipeline.stream import Stream
from penstock.quant import Codes, Scheme
from penstock.quant.methods import awq, clip, gptq, rtn, smoothquant
from penstock.quant.methods.calibrate import input_scale
from penstock.quant.methods.statistics import InputStatistics, output_error

logger = logging.getLogger("penstock")

Statistics = Mapping[str, InputStatistics]


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One layer that is done."""

    layer: int
    layers: int
    resumed: bool  # taken from the work folder
    errors: Mapping[str, float]
    """‖X·(W − Ŵ)ᵀ‖² / ‖X·Wᵀ‖² of each matrix on the calibration text, where it was measured."""


Progress = Callable[[LayerReport], None]


def quantize_model(
    source: Path | Source,
    config: QuantizeConfig,
    calibration: CalibrationSet | None = None,
    *,
    work: Path | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Tensor | Codes]]:
    """Every tensor of the checkpoint `source`, by its name: codes, or a tensor that stays.

    A norm that took the scales of columns comes in float32; what nobody changed, as it is stored.
    work: a folder where finished layers are kept, so that a run that was cut off goes on there with
    the same result. replace: another run's layers in it make way, instead of being an error.
    progress: called after each layer.

    Raises ConfigError for choices that can't work, before anything is computed; WeightsError for a
    tensor that isn't finite, which it names; UnsupportedModelError for families whose checkpoints
    have their matrices' values in another order.
    """
    parts = Parts.of(open_source(source) if isinstance(source, Path) else source)
    check_blind(parts.source.path, "quantizing a checkpoint")
    schemes = {module: config.scheme_of(module) for module in parts.modules()}
    unknown = sorted(set(config.special) - set(schemes))
    if unknown:
        raise ConfigError(
            f"special names {listed(unknown)}, but the matrices of this model are "
            f"layers.0.attention.qkv … {list(schemes)[-2]} and head."
        )
    parts.check_groups(schemes, config.whole_groups)
    if not config.needs_text(schemes):
        calibration = None
    elif calibration is None:
        raise ConfigError(
            f"{config.method} in {config.scheme.name} is fitted to text: give a calibration set."
        )
    else:
        decoder = parts.spec.decoder
        parts.check_dense(config.method)
        calibration.check(decoder.vocab_size, decoder.max_position)
    store = None
    if work is not None:
        store = Store(work, _key(parts, config, calibration), replace=replace)
    return _Run(parts, config, schemes, calibration, store, progress).tensors()


def _key(
    parts: Parts, config: QuantizeConfig, calibration: CalibrationSet | None
) -> dict[str, Any]:
    return {
        "source": source_digest(parts.source),
        "choices": config.key(),
        "calibration": calibration and calibration.key(),
    }


@dataclass(slots=True)
class _Run:
    parts: Parts
    config: QuantizeConfig
    schemes: Mapping[str, Scheme | None]
    calibration: CalibrationSet | None
    store: Store | None
    progress: Progress | None

    def tensors(self) -> Iterator[tuple[str, Tensor | Codes]]:
        """Embedding and head, then layer after layer, then the rest."""
        parts, count = self.parts, self.parts.num_layers
        done: set[str] = set()
        edges = self._edges()
        for name, value in edges.items():
            done.add(name)
            yield name, value
        stream = self._stream(edges)
        for i in range(count):
            result = self._layer(i, stream)
            for name, value in result.items():
                done.add(name)
                yield name, value
            if stream is not None:
                self._advance(i, result, stream)
        copied = parts.spec.decoder.tied and "embed.weight" in parts.names
        tied_copy = parts.names.get("head.weight", ()) if copied else ()
        for target, names in parts.names.items():
            for name in names:
                if name not in done and not (target == "head.weight" and name in tied_copy):
                    yield name, parts.source.read(name)

    def _edges(self) -> Result:
        """The head, rounded to nearest, and the embedding: tied, it is the same."""
        (name,) = self.parts.head()
        scheme = self.schemes["head"]
        if scheme is None:
            return {}
        return {name: rtn.quantize(self.parts.read(name), scheme)}

    def _stream(self, edges: Result) -> Stream | None:
        if self.calibration is None or all(map(self._has, range(self.parts.num_layers))):
            return None
        parts, use = self.parts, self.config.from_quantized
        table = parts.embedding()
        tensors: Result = {"embed.weight": edges[table] if use and table in edges
                           else parts.source.read(table)}  # fmt: skip
        if "positions.weight" in parts.names:
            tensors["positions.weight"] = parts.source.read(parts.names["positions.weight"][0])
        return Stream(parts.spec.decoder, self.calibration, tensors)

    def _has(self, layer: int) -> bool:
        return self.store is not None and self.store.has(_name(layer))

    def _advance(self, i: int, result: Result, stream: Stream) -> None:
        """Carry the text through layer i, where a later one still needs it."""
        if all(map(self._has, range(i + 1, self.parts.num_layers))):
            return
        if not self.config.from_quantized:
            stream.advance(self.parts.layer(i))
            return
        prefix = f"layers.{i}."
        weights = {
            target.removeprefix(prefix): joined([result[name] for name in names])
            for target, names in self.parts.names.items()
            if target.startswith(prefix)
        }
        stream.advance(weights)

    def _layer(self, i: int, stream: Stream | None) -> Result:
        if self.store is not None and self.store.has(_name(i)):
            self._report(i, True, {})
            return self.store.load(_name(i))
        tensors = self.parts.layer(i)
        changed: set[str] = set()
        statistics: Statistics = {}
        if stream is not None:
            statistics = self._observe(stream, tensors)
            if self.config.scaling:
                changed = self._scale(i, tensors, statistics)
                statistics = self._observe(stream, tensors) if changed else statistics
        result, errors = self._choose(i, tensors, changed, statistics)
        if self.store is not None:
            self.store.save(_name(i), result)
        self._report(i, False, errors)
        return result

    def _report(self, i: int, resumed: bool, errors: Mapping[str, float]) -> None:
        if self.progress is not None:
            self.progress(LayerReport(i, self.parts.num_layers, resumed, errors))

    def _observe(self, stream: Stream, tensors: Tensors) -> Statistics:
        static = any(s and s.static for s in self.schemes.values())
        return stream.observe(tensors, histogram=static)

    def _scale(self, i: int, tensors: Tensors, statistics: Statistics) -> set[str]:
        """Scale columns where something before them takes the inverse."""
        config, decoder = self.config, self.parts.spec.decoder
        layer = decoder.layers[i]
        changed: set[str] = set()
        for module in foldable(layer):
            scheme = self.schemes[f"layers.{i}.{module}"]
            smooth = config.scaling == "smoothquant"
            if scheme is None or (smooth and module not in ("attention.qkv", "mlp.up")):
                continue
            weight, seen = tensors[f"{module}.weight"], statistics[module]
            if smooth:
                scales = smoothquant.smoothing_scales([weight], seen.max_abs, config.alpha)
            else:
                scales = awq.search_scales(
                    [weight], scheme, seen.mean_abs, seen.hessian, config.awq,
                    tie=tie(layer, module),
                )  # fmt: skip
            changed |= fold(tensors, decoder, layer, module, scales)
        return changed

    def _choose(
        self, i: int, tensors: Tensors, changed: set[str], statistics: Statistics
    ) -> tuple[Result, dict[str, float]]:
        """Codes of a layer's matrices, and its other tensors."""
        result: Result = {}
        errors: dict[str, float] = {}
        matrices = set(layer_matrices(self.parts.spec.decoder.layers[i]))
        for target, whole in tensors.items():
            module, _, parameter = target.rpartition(".")
            scheme = None
            if module in matrices and parameter == "weight":
                scheme = self.schemes[f"layers.{i}.{module}"]
            pieces = self.parts.split(f"layers.{i}.{target}", whole)
            if scheme is not None:
                codes = self._codes(f"layers.{i}.{module}", pieces, scheme, statistics.get(module))
                result |= codes
                if module in statistics:
                    errors[module] = _relative_error(pieces, codes, statistics[module])
                continue
            for name, piece in pieces.items():
                stored = self.parts.source.read(name)
                assert isinstance(stored, Tensor)
                kept = piece.to(stored.dtype) if module in matrices else piece
                result[name] = kept if target in changed else stored
        return result, errors

    def _codes(
        self,
        module: str,
        pieces: Mapping[str, Tensor],
        scheme: Scheme,
        seen: InputStatistics | None,
    ) -> dict[str, Codes]:
        config, static = self.config, None
        if scheme.static:
            assert seen is not None and seen.histogram is not None
            static = input_scale(
                seen.histogram, config.calibrator, config.percentile, rounded_to(scheme)
            )
        if seen is None or config.rounding == "nearest":
            return {name: rtn.quantize(piece, scheme, static) for name, piece in pieces.items()}
        hessian = seen.hessian
        if config.rounding == "clip":
            return {
                name: clip.quantize(piece, scheme, hessian, static)
                for name, piece in pieces.items()
            }
        inverse = gptq.invert(hessian, config.gptq, module)

        def fit(name: str, weight: Tensor) -> Codes:
            return gptq.quantize(
                weight, scheme, hessian, config.gptq,
                inverse=inverse, input_scale=static, name=name,
            )  # fmt: skip

        if scheme.rows != 1 or scheme.kind == "nvfp4":  # what rows share ends with a tensor
            return {name: fit(name, piece) for name, piece in pieces.items()}
        whole = fit(module, torch.cat(list(pieces.values())))
        bounds = [0, *accumulate(len(piece) for piece in pieces.values())]
        return {
            name: whole.rows(slice(*at)) for name, at in zip(pieces, pairwise(bounds), strict=True)
        }


def _name(layer: int) -> str:
    """What a layer is called in a store."""
    return f"layer-{layer:05}"


def _relative_error(
    pieces: Mapping[str, Tensor], codes: Mapping[str, Codes], seen: InputStatistics
) -> float:
    hessian = seen.hessian
    lost = sum(output_error(p - codes[name].dequantize(), hessian) for name, p in pieces.items())
    whole = sum(output_error(p, hessian) for p in pieces.values())
    return lost / whole if whole else 0.0
