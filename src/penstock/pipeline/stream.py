"""A calibration set's residual stream, carried through a decoder one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.errors import WeightsError
from penstock.nn import Decoder, DecoderSpec
from penstock.nn.decoder import matrices_of
from penstock.nn.layer import DecoderLayer
from penstock.nn.linear import Linear
from penstock.nn.parameters import Loadable
from penstock.ops import Activation
from penstock.pipeline.calibration import CalibrationSet
from penstock.quant import Codes, Dense, Packed, WeightFormat, WeightFormats
from penstock.quant.formats.operators import OperatorFormat
from penstock.quant.methods.statistics import InputStatistics
from penstock.step import LayerCache, Step

BATCH_TOKENS = 4096
"""Windows that run together have up to so many tokens, and one window at least."""

BLOCK = 32
"""Tokens of a block of the cache."""

Weights = Mapping[str, Tensor | Codes]
"""A layer's tensors by their parameters' names within it: `attention.qkv.weight`, …"""


class Watched(OperatorFormat):
    """A format that shows each product's input, as the matrix sees it, and then computes it."""

    __slots__ = ("_inner", "_see")

    def __init__(self, inner: OperatorFormat, see: Callable[[Tensor], None]) -> None:
        self._inner, self._see = inner, see

    @property
    def inner(self) -> OperatorFormat:
        """What computes."""
        return self._inner

    def matmul(
        self,
        x: Tensor,
        packed: Packed,
        bias: Tensor | None,
        out_features: int,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        activation: Activation = "none",
        gated: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        self._see(x if norm is None else ops.rms_norm(x, norm, eps))
        return self._inner.matmul(
            x, packed, bias, out_features, norm=norm, eps=eps, activation=activation,
            gated=gated, out_dtype=out_dtype,
        )  # fmt: skip

    def add_(self, residual: Tensor, x: Tensor, packed: Packed, bias: Tensor | None) -> None:
        self._see(x)
        self._inner.add_(residual, x, packed, bias)


@dataclass(slots=True)
class _Batch:
    step: Step
    residual: Tensor  # [T, D]
    blocks: int


class Stream:
    """Where a calibration set stands in a decoder: before layer `at`.

    Everything is float32. In memory: D values a token, one layer's weights while it runs, and one
    layer's keys and values of a batch.
    """

    def __init__(self, spec: DecoderSpec, calibration: CalibrationSet, embeddings: Weights) -> None:
        """embeddings: `embed.weight` (of a tied embedding too), and `positions.weight` if any."""
        self.spec = spec
        self.at = 0
        plain = Dense(torch.float32)
        self.decoder = Decoder(spec, WeightFormats(plain, plain), torch.float32)
        self._batches = [_Batch(step, torch.empty(0), n) for step, n in steps(calibration)]
        self._embed(embeddings)

    @torch.inference_mode()
    def _embed(self, tensors: Weights) -> None:
        hidden = self.spec.hidden
        _check_shape("embed.weight", tensors["embed.weight"], (self.spec.vocab_size, hidden))
        if "positions.weight" in tensors:
            positions = (self.spec.learned_positions, hidden)
            _check_shape("positions.weight", tensors["positions.weight"], positions)
        for batch in self._batches:
            residual = _rows(tensors["embed.weight"], batch.step.tokens) * self.spec.embed_scale
            if "positions.weight" in tensors:
                residual = residual + _rows(tensors["positions.weight"], batch.step.positions)
            batch.residual = residual

    @torch.inference_mode()
    def observe(
        self, weights: Weights, *, hessian: bool = True, histogram: bool = False
    ) -> dict[str, InputStatistics]:
        """What the matrices of layer `at` are given with `weights`, by their names in the layer.

        The stream stays where it is.
        """
        layer = self._layer(weights)
        found: dict[str, InputStatistics] = {}
        for name in matrices_of(self.spec.layers[self.at]).values():
            linear = layer.get_submodule(name)
            assert isinstance(linear, Linear)
            found[name] = InputStatistics(linear.in_features, hessian=hessian, histogram=histogram)
            assert isinstance(linear.weight_format, OperatorFormat)
            watched = Watched(linear.weight_format, found[name].add)
            linear.weight_format = cast(WeightFormat, watched)
        cache = self._cache()
        for batch in self._batches:
            layer(batch.residual.clone(), batch.step, cache)
        for name in matrices_of(self.spec.layers[self.at]).values():
            linear = layer.get_submodule(name)
            assert isinstance(linear, Linear)
            linear.weight_format = Dense(torch.float32)
        _forget(layer)
        return found

    @torch.inference_mode()
    def advance(self, weights: Weights) -> None:
        """Carry the stream through layer `at`, with `weights`."""
        layer, cache = self._layer(weights), self._cache()
        for batch in self._batches:
            layer(batch.residual, batch.step, cache)
        _forget(layer)
        self.at += 1

    def residuals(self) -> list[Tensor]:
        """The stream as it is, [T, D] a batch."""
        return [batch.residual for batch in self._batches]

    def _layer(self, weights: Weights) -> DecoderLayer:
        layer = self.decoder.layers[self.at]
        assert isinstance(layer, DecoderLayer)
        for target, tensor in weights.items():
            module, _, parameter = target.rpartition(".")
            loadable = layer.get_submodule(module)
            assert isinstance(loadable, Loadable)
            name = f"layers.{self.at}.{target}"
            _check_shape(name, tensor, loadable.expected().get(parameter))
            loadable.load(parameter, tensor)
        return layer

    def _cache(self) -> LayerCache:
        attention = self.spec.layers[self.at].attention
        layout = PagedLayout((attention.cached,), torch.float32, BLOCK)
        return layout.allocate(max(batch.blocks for batch in self._batches))[0]


def _check_shape(name: str, tensor: Tensor | Codes, expected: tuple[int, ...] | None) -> None:
    """Raises WeightsError for a tensor of another shape than config.json asks for, or of none."""
    shape = tuple(tensor.shape)
    if shape != expected:
        needs = "has no place in the model" if expected is None else f"needs {list(expected)}"
        raise WeightsError(
            f"{name} {needs}, but the checkpoint's has shape {list(shape)}. config.json and the "
            "weights disagree: give the checkpoint that belongs to it."
        )


def _rows(table: Tensor | Codes, at: Tensor) -> Tensor:
    """Rows `at` [T] of a table, in float32: the whole of it may be large."""
    if isinstance(table, Codes):
        return table.rows(at.long()).dequantize()
    return table[at.long()].float()


def _forget(layer: DecoderLayer) -> None:
    """Free the layer's weights."""
    for module in layer.modules():
        if isinstance(module, Loadable):
            for name in list(module._parameters):
                module.register_parameter(name, None)
        if isinstance(module, Linear):
            module.packed.clear()


def steps(calibration: CalibrationSet) -> Iterator[tuple[Step, int]]:
    """Steps of whole windows, and the blocks that each needs."""
    batch: list[Tensor] = []
    for window in calibration.tensors():
        if batch and sum(map(len, batch)) + len(window) > BATCH_TOKENS:
            yield _step(batch)
            batch = []
        batch.append(window)
    if batch:
        yield _step(batch)


def _step(windows: list[Tensor]) -> tuple[Step, int]:
    lengths = torch.tensor([len(window) for window in windows])
    widest = -(-int(lengths.max()) // BLOCK)
    table = torch.arange(len(windows) * widest, dtype=torch.int32).view(len(windows), widest)
    positions = [torch.arange(len(window), dtype=torch.int32) for window in windows]
    slots = [at + int(own[0]) * BLOCK for at, own in zip(positions, table, strict=True)]
    start = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    step = Step(
        tokens=torch.cat(windows),
        positions=torch.cat(positions),
        slots=torch.cat(slots).to(torch.int32),
        query_start=start.to(torch.int32),
        context_len=lengths.to(torch.int32),
        block_table=table,
        sample_at=torch.empty(0, dtype=torch.int32),
    )
    return step, table.numel()
