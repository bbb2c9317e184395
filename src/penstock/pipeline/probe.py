"""A float model on a text: what it predicts, and how far from that another one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from penstock.cache import PagedLayout
from penstock.models.weights import load_weights
from penstock.nn import Decoder
from penstock.pipeline.calibration import CalibrationSet
from penstock.pipeline.parts import Parts
from penstock.pipeline.stream import BLOCK, steps
from penstock.quant import Dense, WeightFormats
from penstock.step import LayerCache


class Probe:
    """A decoder in float32 and the steps of a calibration set, with their caches.

    In memory: the weights in float32, keys and values of a step, its log-probabilities.
    """

    def __init__(self, parts: Parts, calibration: CalibrationSet) -> None:
        spec, plain = parts.spec.decoder, Dense(torch.float32)
        self.decoder = Decoder(spec, WeightFormats(plain, plain), torch.float32)
        load_weights(self.decoder, parts.spec, parts.source)
        self.steps = list(steps(calibration))
        heads = tuple(x.attention.cached for x in spec.layers)
        layout = PagedLayout(heads, torch.float32, BLOCK)
        self._kv = layout.allocate(max(blocks for _, blocks in self.steps))
        self.reference: list[Tensor] = []
        """Of each step, log-probabilities [T, V]: `remember` fills it."""

    def cache(self, layer: int) -> LayerCache:
        """Of a layer, for one step at a time."""
        return self._kv[layer]

    @property
    def num_layers(self) -> int:
        """Of the decoder."""
        return len(self._kv)

    @torch.inference_mode()
    def remember(self, before: Callable[[int, int, Tensor], None] | None = None) -> None:
        """Let the decoder as it is be the reference. before(step, layer, residual [T, D]) is shown
        what each layer reads.
        """
        self.reference = []
        for number in range(len(self.steps)):
            residual = self.run(number, range(self.num_layers), before=before)
            self.reference.append(self.logits(residual).log_softmax(-1))

    def embedded(self, number: int) -> Tensor:
        """The residual stream of a step before the first layer, [T, D]."""
        step, decoder = self.steps[number][0], self.decoder
        residual: Tensor = decoder.embed(step.tokens)
        if decoder.positions is not None:
            residual = residual + decoder.positions(step.positions)
        return residual

    @torch.inference_mode()
    def run(
        self,
        number: int,
        layers: Iterable[int],
        start: Tensor | None = None,
        before: Callable[[int, int, Tensor], None] | None = None,
    ) -> Tensor:
        """The stream of a step after these layers; start: before them, else what is embedded."""
        residual = self.embedded(number) if start is None else start.clone()
        step = self.steps[number][0]
        for i in layers:
            if before is not None:
                before(number, i, residual)
            self.decoder.layers[i](residual, step, self._kv[i])
        return residual

    def logits(self, residual: Tensor) -> Tensor:
        """Of what the final norm reads, [T, V]."""
        logits: Tensor = self.decoder.head(residual, self.decoder.norm)
        cap = self.decoder.spec.final_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    @torch.inference_mode()
    def divergence(self, streams: Iterable[Tensor], other: Probe | None = None) -> float:
        """Mean KL(reference ‖ p) in nats of the next token; streams: of each step, before the final
        norm. other: whose head they are for.
        """
        total, count = 0.0, 0
        for want, residual in zip(self.reference, streams, strict=True):
            found = (other or self).logits(residual).log_softmax(-1)
            total += float((want.exp() * (want - found)).sum(dtype=torch.float64))
            count += len(want)
        return total / count

    def compare(self, other: Probe) -> float:
        """The mean KL of another model, on the same text, from the reference."""
        layers: Sequence[int] = range(other.num_layers)
        return self.divergence((other.run(n, layers) for n in range(len(self.steps))), other)
